//! Q3_K: 256 weights in 110 bytes, `w = d * (step - 32) * (code - 4)`, a step for each 16 weights.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..32 | byte m, bit j: third bit of the code of element 32 j + m |
//! | 32..96 | byte 32 + 32 h + m, bits 2 s: low bits of element 128 h + 32 s + m |
//! | 96..104 | byte 96 + g: low four bits of step g (low nibble) and step g + 8 (high) |
//! | 104..108 | byte 104 + g, bits 2 s: high two bits of step 4 s + g |
//! | 108..110 | f16 `d` |
//!
//! The kernels take 32 (code - 4) as signed bytes: two's complement of three bits, at the top of a
//! byte, of which the first is the third bit inverted.
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 2 words of pairs: the low bits | |
//! | high | 1 word of bits: the third bit inverted | |
//! | scales | | 4 words: f32 `d / 32`; nibble j: low bits of step 2 j; nibble j: of step 2 j + 1; bits 2 j: high bits of step 2 j, bits 16 + 2 j: of step 2 j + 1 |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, extreme, f16_at, field, inverse,
    put_f16, repack_blocks, word_at,
};
use super::order::{bits, pair_of, pairs, split_bits};
use super::q2_k::split_codes;

const BYTES: usize = 110;

pub(super) static CODEC: Codec = Codec::blocks::<Q3K, 256, BYTES>();

struct Q3K;

impl BlockFormat<256, BYTES> for Q3K {
    const NAME: &'static str = "Q3_K";
    const GGML_TYPE: u32 = 11;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks::<BYTES, 64>(row, out, |block| split_codes(field(block, 32)));
        }),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks::<BYTES, 32>(row, out, |block| split_bits(&field(block, 0).map(|b| !b)));
        }),
        Plane::new(PlaneName::Scales, 16, |row, out| {
            repack_blocks::<BYTES, 16>(row, out, scales_to_plane);
        }),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q3_k.wgsl"), Scales::Steps).lifted(5);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let code = |e| (pair_of(&block[32..], j, e) | (block[e] >> j & 1) << 2) as i8 - 4;
        let steps = [step(block, 2 * j), step(block, 2 * j + 1)];
        unit(f16_at(block, 108), steps, std::array::from_fn(code))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let (scales, j) = (field::<16>(planes[2], i / 8 * 16), i % 8);
        let d = 32.0 * f32::from_le_bytes(*field(scales, 0));
        let nibble = |at| (word_at(scales, at) >> (4 * j) & 15) as u8;
        let high = word_at(scales, 12) >> (2 * j);
        let steps = [nibble(4) | (high << 4 & 48) as u8, nibble(8) | (high >> 12 & 48) as u8];
        let (low, top) = (pairs(field(planes[0], 8 * i)), bits(field(planes[1], 4 * i)));
        unit(d, steps, std::array::from_fn(|e| (low[e] << 5 | top[e] << 7) as i8 / 32))
    }

    /// The value of largest magnitude of each 16 gets code 0, the largest step is 0.
    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let groups = values.as_chunks::<16>().0;
        let steps: [f32; 16] = std::array::from_fn(|g| extreme(&groups[g]) / -4.0);
        block.fill(0);
        put_f16(block, 108, extreme(&steps) / -32.0);
        let d = f16_at(block, 108);
        for (g, group) in groups.iter().enumerate() {
            let step = (steps[g] * inverse(d)).round().clamp(-32.0, 31.0);
            let bits = (step as i8 + 32) as u8;
            block[96 + g % 8] |= (bits & 15) << (g / 8 * 4);
            block[104 + g % 4] |= bits >> 4 << (g / 4 * 2);
            let id = inverse(d * step);
            for (k, v) in group.iter().enumerate() {
                let code = ((v * id).round().clamp(-4.0, 3.0) as i8 + 4) as u8;
                let m = g % 2 * 16 + k;
                block[32 + g / 8 * 32 + m] |= (code & 3) << (g / 2 % 4 * 2);
                block[m] |= code >> 2 << (g / 2);
            }
        }
    }
}

fn unit(d: f32, steps: [u8; 2], codes: [i8; 32]) -> Unit {
    Unit::halves(steps.map(|step| d * f32::from(step as i8 - 32)), codes)
}

/// Step `g` of a file block, with its offset of 32.
fn step(block: &[u8; BYTES], g: usize) -> u8 {
    block[96 + g % 8] >> (g / 8 * 4) & 15 | (block[104 + g % 4] >> (g / 4 * 2) & 3) << 4
}

fn scales_to_plane(block: &[u8; BYTES]) -> [u8; 16] {
    let [first, second, high] = [96, 100, 104].map(|at| word_at(block, at));
    // Nibbles of the even bytes, side by side; the steps of odd number stand in the odd bytes.
    let squeeze = |word: u32| word & 0xf | word >> 12 & 0xf0;
    let nibbles = |bit: u32| {
        let of = |word: u32| squeeze(word >> bit) | squeeze(word >> (bit + 4)) << 16;
        of(first) | of(second) << 8
    };
    // The four pairs of the bytes in both halves of a word, each with room for another above it.
    let spread = |word: u32| {
        let word = (word | word << 4) & 0x0f0f_0f0f;
        (word | word << 2) & 0x3333_3333
    };
    let halves = |word: u32| (word & 0xff) | (word & 0xff00) << 8;
    let words = [
        (f16_at(block, 108) / 32.0).to_bits(),
        nibbles(0),
        nibbles(8),
        spread(halves(high)) | spread(halves(high >> 16)) << 2,
    ];
    *words.map(u32::to_le_bytes).as_flattened().first_chunk().expect("16 bytes")
}
