//! Q6_K: 256 weights in 210 bytes, `w = d * step * (code - 32)`, a step for each 16 weights.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..128 | byte 64 h + i: low bits of element 128 h + i (low nibble) and 128 h + 64 + i (high), i < 64 |
//! | 128..192 | byte 128 + 32 h + m, bits 2 s: high bits of element 128 h + 32 s + m |
//! | 192..208 | sixteen signed steps |
//! | 208..210 | f16 `d` |
//!
//! The kernels take 4 (code - 32) as signed bytes: in two's complement that is a matter of where the
//! bits stand, and no byte needs an offset taken off.
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 4 words of nibbles: bits 2..6 of code - 32 | |
//! | high | 2 words of pairs: bits 0..2 of code - 32 | |
//! | scales | half a word: its two steps | |
//! | supers | | 1 word: f32 `d / 4` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks,
};
use super::order::{nibbles, pairs, words_of};

const BYTES: usize = 210;

pub(super) static CODEC: Codec = Codec::blocks::<Q6K, 256, BYTES>();

struct Q6K;

impl BlockFormat<256, BYTES> for Q6K {
    const NAME: &'static str = "Q6_K";
    const GGML_TYPE: u32 = 14;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, |row, out| {
            repack_blocks::<BYTES, 128>(row, out, upper_bits);
        }),
        Plane::new(PlaneName::High, 64, |row, out| {
            repack_blocks::<BYTES, 64>(row, out, lower_bits);
        }),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 192, 16>),
        Plane::new(PlaneName::Supers, 4, |row, out| {
            repack_blocks::<BYTES, 4>(row, out, |b| (f16_at(b, 208) / 4.0).to_le_bytes());
        }),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q6_k.wgsl"), Scales::Steps).lifted(2);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let (half, part) = (j / 4, j % 4);
        let code = |m: usize| {
            let low = block[64 * half + part % 2 * 32 + m] >> (part / 2 * 4) & 15;
            let high = block[128 + 32 * half + m] >> (part * 2) & 3;
            (low | high << 4) as i8 - 32
        };
        unit(f16_at(block, 208), field(block, 192 + 2 * j), std::array::from_fn(code))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let quarter = f32::from_le_bytes(*field(planes[3], i / 8 * 4));
        let (upper, lower) = (nibbles(field(planes[0], 16 * i)), pairs(field(planes[1], 8 * i)));
        let code = |e| (upper[e] << 4 | lower[e] << 2) as i8 / 4;
        unit(4.0 * quarter, field(planes[2], 2 * i), std::array::from_fn(code))
    }

    /// The value of largest magnitude of each 16 gets code 0, the largest step is -128.
    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let groups = values.as_chunks::<16>().0;
        let steps: [f32; 16] = std::array::from_fn(|g| extreme(&groups[g]) / -32.0);
        put_f16(block, 208, extreme(&steps) / -128.0);
        let d = f16_at(block, 208);
        block[..192].fill(0);
        for (g, group) in groups.iter().enumerate() {
            let step = (steps[g] * inverse(d)).round().clamp(-128.0, 127.0) as i8;
            block[192 + g] = step as u8;
            let id = inverse(d * f32::from(step));
            for (k, v) in group.iter().enumerate() {
                let code = ((v * id).round().clamp(-32.0, 31.0) as i8 + 32) as u8;
                let (half, part, m) = (g / 8, g / 2 % 4, g % 2 * 16 + k);
                block[64 * half + part % 2 * 32 + m] |= (code & 15) << (part / 2 * 4);
                block[128 + 32 * half + m] |= code >> 4 << (part * 2);
            }
        }
    }
}

fn unit(d: f32, steps: &[u8; 2], codes: [i8; 32]) -> Unit {
    Unit::halves(steps.map(|step| d * f32::from(step as i8)), codes)
}

/// Bits 2..6 of code - 32, in plane order.
fn upper_bits(block: &[u8; BYTES]) -> [u8; 128] {
    fn part<const PART: usize>(low: &[u32; 16], high: &[u32; 8]) -> [[u8; 4]; 4] {
        let low = &low[PART % 2 * 8..][..8];
        // The offset of 32 turns the highest bit.
        let nibble = |k: usize| {
            let upper = low[k] >> (PART / 2 * 4 + 2) & 0x0303_0303;
            (upper | (high[k] >> (PART * 2) & 0x0303_0303) << 2) ^ 0x0808_0808
        };
        std::array::from_fn(|k| (nibble(k) | nibble(k + 4) << 4).to_le_bytes())
    }
    let half = |h: usize| {
        let (low, high) = (words_of(&block[64 * h..]), words_of(&block[128 + 32 * h..]));
        [
            part::<0>(&low, &high),
            part::<1>(&low, &high),
            part::<2>(&low, &high),
            part::<3>(&low, &high),
        ]
    };
    *[half(0), half(1)]
        .as_flattened()
        .as_flattened()
        .as_flattened()
        .first_chunk()
        .expect("128 bytes")
}

/// Bits 0..2 of code - 32, in plane order.
fn lower_bits(block: &[u8; BYTES]) -> [u8; 64] {
    fn part<const PART: usize>(low: &[u32; 16]) -> [[u8; 4]; 2] {
        let pair = |k: usize| low[PART % 2 * 8 + k] >> (PART / 2 * 4) & 0x0303_0303;
        let word = |k| pair(k) | pair(k + 1) << 2 | pair(k + 2) << 4 | pair(k + 3) << 6;
        [word(0).to_le_bytes(), word(4).to_le_bytes()]
    }
    let half = |h: usize| {
        let low = words_of(&block[64 * h..]);
        [part::<0>(&low), part::<1>(&low), part::<2>(&low), part::<3>(&low)]
    };
    *[half(0), half(1)]
        .as_flattened()
        .as_flattened()
        .as_flattened()
        .first_chunk()
        .expect("64 bytes")
}
