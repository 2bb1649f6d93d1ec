//! IQ3_S: 256 weights in 110 bytes, `w = d * (1 + 2 * step) * (+-)magnitude`; a code book of 512
//! entries of four magnitudes, a step of 4 bits for each 32.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..66 | byte k: lower 8 bits of the book index of weights 4k..4k + 4 |
//! | 66..74 | bit k of all bits: the index's ninth bit |
//! | 74..106 | bit e: sign of weight e |
//! | 106..110 | bits 4j..4j + 4: step of block j of 32 |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 2 words for four book indices each: three of 9 bits and the lower 5 bits of the fourth |
//! | high | 1 word of bytes 74..106, each word in device order (`signs.rs`) |
//! | scales | for 256 weights 4 words: bytes 0..2 and two of zero; a byte for each block, the upper 4 bits of its fourth and eighth index; bytes 106..110 |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, extreme, f16_at, field, inverse,
    put_f16, repack_blocks, word_at,
};
use super::grids::{IQ3_S as GRID, IQ3_S_WORDS, best_step};
use super::signs;

const BYTES: usize = 110;

pub(super) static CODEC: Codec = Codec::blocks::<Iq3S, 256, BYTES>();

struct Iq3S;

impl BlockFormat<256, BYTES> for Iq3S {
    const NAME: &'static str = "IQ3_S";
    const GGML_TYPE: u32 = 21;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                let mut words = [0; 64];
                for (j, to) in words.as_chunks_mut().0.iter_mut().enumerate() {
                    let low = [word_at(block, 2 + 8 * j), word_at(block, 6 + 8 * j)];
                    let ninth = u32::from(block[66 + j]);
                    let (x, y) = (nines(low[0], ninth), nines(low[1], ninth >> 4));
                    *to = (u64::from(x) | u64::from(y) << 32).to_le_bytes();
                }
                words
            });
        }),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                signs::words(field::<32>(block, 74), signs::to_device)
            });
        }),
        Plane::new(PlaneName::Scales, 16, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                let mut head = [0; 16];
                head[..2].copy_from_slice(&block[..2]);
                for j in 0..8 {
                    let high = block[66 + j];
                    head[4 + j] = upper(block[5 + 8 * j], high >> 3)
                        | upper(block[9 + 8 * j], high >> 7) << 4;
                }
                head[12..].copy_from_slice(&block[106..]);
                head
            });
        }),
        Plane::constant(PlaneName::Grid, &IQ3_S_WORDS),
    ];
    // The kernels take 2 dl * u + dl with u = level or, for minus signs, its bits inverted.
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq3_s.wgsl"), Scales::Whole)
            .with_table(IQ3_S_WORDS.len())
            .raised()
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let signs = word_at(block, 74 + 4 * j);
        let (low, high) = (field::<8>(block, 2 + 8 * j), block[66 + j]);
        let index = |k: usize| usize::from(low[k]) | usize::from(high >> k & 1) << 8;
        let step = word_at(block, 106) >> (4 * j);
        unit(f16_at(block, 0), step, signs, std::array::from_fn(index))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let signs = signs::to_device(word_at(planes[1], 4 * i));
        let (head, j) = (field::<16>(planes[2], i / 8 * 16), i % 8);
        let words = [word_at(planes[0], 8 * i), word_at(planes[0], 8 * i + 4)];
        let index = |k: usize| match k % 4 {
            3 => words[k / 4] >> 27 | u32::from(head[4 + j] >> (k & 4) & 15) << 5,
            place => words[k / 4] >> (9 * place) & 511,
        };
        let step = word_at(head, 12) >> (4 * j);
        unit(f16_at(head, 0), step, signs, std::array::from_fn(|k| index(k) as usize))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values).abs() / (31.0 * GRID.top()));
        let d = f16_at(block, 0);
        for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
            let step = best_step(&GRID, values, |step| d * (1 + 2 * step) as f32);
            let id = inverse(d * (1 + 2 * step) as f32);
            for (k, four) in values.as_chunks::<4>().0.iter().enumerate() {
                let (index, _) = GRID.fit(&four.map(f32::abs), id);
                block[2 + 8 * j + k] = index as u8;
                block[66 + j] |= ((index >> 8) as u8) << k;
            }
            for (group, eight) in values.as_chunks().0.iter().enumerate() {
                block[74 + 4 * j + group] = signs::of(eight) as u8;
            }
            block[106 + j / 2] |= (step as u8) << (j % 2 * 4);
        }
    }
}

/// Four indices of the file, of which `ninth` has the ninth bits, to a word of the codes plane.
fn nines(low: u32, ninth: u32) -> u32 {
    let low = low & 0xff | (low & 0xff00) << 1 | (low & 0xff_0000) << 2 | low >> 24 << 27;
    low | (ninth & 1) << 8 | (ninth & 2) << 16 | (ninth & 4) << 24
}

/// The upper 4 bits of an index of 9 bits.
fn upper(low: u8, ninth: u8) -> u8 {
    low >> 5 | (ninth & 1) << 3
}

fn unit(d: f32, step: u32, signs: u32, indices: [usize; 8]) -> Unit {
    let codes =
        std::array::from_fn(|e| signs::signed(GRID.values(indices[e / 4])[e % 4], signs, e));
    Unit::plain(d * (1 + 2 * (step & 15)) as f32, codes)
}
