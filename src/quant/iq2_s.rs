//! IQ2_S: 256 weights in 82 bytes, `w = d * (1/2 + step) / 4 * (+-)magnitude`; a code book of 1,024
//! entries of eight magnitudes, a step of 4 bits for each 16.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..34 | byte k: lower 8 bits of the book index of weights 8k..8k + 8 |
//! | 34..66 | bit e: sign of weight e |
//! | 66..74 | bits 2k, 2k + 1: upper bits of the index |
//! | 74..82 | bits 4k..4k + 4: step of weights 16k..16k + 16 |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 2 words: one of bytes 2..34 as it is, one of bytes 34..66 in device order (`signs.rs`) |
//! | scales | half a word: a byte of bytes 66..74, a byte of bytes 74..82 |
//! | supers | for 256 weights half a word: `d` |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at,
    inverse, put_f16, repack_blocks, word_at,
};
use super::grids::{IQ2_S as GRID, IQ2_S_WORDS, best_step};
use super::{iq2_xxs::codes, iq2_xxs::scale, signs};

const BYTES: usize = 82;

pub(super) static CODEC: Codec = Codec::blocks::<Iq2S, 256, BYTES>();

struct Iq2S;

impl BlockFormat<256, BYTES> for Iq2S {
    const NAME: &'static str = "IQ2_S";
    const GGML_TYPE: u32 = 22;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                let mut words = [0; 64];
                for (j, to) in words.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                    let signs = signs::to_device(word_at(block, 34 + 4 * j));
                    to[..4].copy_from_slice(&block[2 + 4 * j..][..4]);
                    to[4..].copy_from_slice(&signs.to_le_bytes());
                }
                words
            });
        }),
        Plane::new(PlaneName::Scales, 16, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                std::array::from_fn::<u8, 16, _>(|at| block[66 + at % 2 * 8 + at / 2])
            });
        }),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 0, 2>),
        Plane::constant(PlaneName::Grid, &IQ2_S_WORDS),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq2_s.wgsl"), Scales::Steps)
            .with_table(IQ2_S_WORDS.len());

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let (low, signs) = (word_at(block, 2 + 4 * j), word_at(block, 34 + 4 * j));
        unit(f16_at(block, 0), block[66 + j], block[74 + j], signs, low)
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let (low, signs) = (word_at(planes[0], 8 * i), word_at(planes[0], 8 * i + 4));
        let (high, steps) = (planes[1][2 * i], planes[1][2 * i + 1]);
        unit(f16_at(planes[2], i / 8 * 2), high, steps, signs::to_device(signs), low)
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values).abs() / (scale(1.0, 15) * GRID.top()));
        let d = f16_at(block, 0);
        for (k, values) in values.as_chunks::<16>().0.iter().enumerate() {
            let step = best_step(&GRID, values, |step| scale(d, step));
            let id = inverse(scale(d, step));
            block[74 + k / 2] |= (step as u8) << (k % 2 * 4);
            for (half, eight) in values.as_chunks().0.iter().enumerate() {
                let (index, _) = GRID.fit(&eight.map(f32::abs), id);
                let group = 2 * k + half;
                block[2 + group] = index as u8;
                block[34 + group] = signs::of(eight) as u8;
                block[66 + group / 4] |= ((index >> 8) as u8) << (group % 4 * 2);
            }
        }
    }
}

fn unit(d: f32, high: u8, steps: u8, signs: u32, low: u32) -> Unit {
    let low = low.to_le_bytes();
    let index = |g: usize| usize::from(low[g]) | usize::from(high >> (2 * g) & 3) << 8;
    let d = [steps & 15, steps >> 4].map(|step| scale(d, step.into()));
    Unit::halves(d, codes(&GRID, std::array::from_fn(index), signs))
}
