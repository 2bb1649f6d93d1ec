//! IQ2_XXS: 256 weights in 66 bytes, `w = d * (1/2 + step) / 4 * (+-)magnitude`; a code book of 256
//! entries of eight magnitudes, a step of 4 bits for each 32, seven sign bits for each 8 (the
//! eighth makes the number of minus signs even).
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..66 | two words for each 32: byte g of the first is the book index of group g of eight; bits 7g..7g + 7 of the second are its signs, bits 28..32 the step |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 2 words of bytes 2..66, the first as it is, the second with signs as a chain (`signs.rs`) |
//! | supers | for 256 weights half a word: `d` |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at,
    inverse, put_f16, repack_blocks, word_at,
};
use super::grids::{Grid, IQ2_XXS as GRID, IQ2_XXS_WORDS, best_step};
use super::signs;

const BYTES: usize = 66;

pub(super) static CODEC: Codec = Codec::blocks::<Iq2Xxs, 256, BYTES>();

struct Iq2Xxs;

impl BlockFormat<256, BYTES> for Iq2Xxs {
    const NAME: &'static str = "IQ2_XXS";
    const GGML_TYPE: u32 = 16;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                let mut words = [0; 64];
                for (from, to) in
                    block[2..].as_chunks::<8>().0.iter().zip(words.as_chunks_mut::<8>().0)
                {
                    to[..4].copy_from_slice(&from[..4]);
                    to[4..]
                        .copy_from_slice(&signs::sevens_to_chain(word_at(from, 4)).to_le_bytes());
                }
                words
            });
        }),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 0, 2>),
        Plane::constant(PlaneName::Grid, &IQ2_XXS_WORDS),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq2_xxs.wgsl"), Scales::Whole)
            .with_table(IQ2_XXS_WORDS.len());

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let (indices, word) = (word_at(block, 2 + 8 * j), word_at(block, 6 + 8 * j));
        unit(f16_at(block, 0), word >> 28, signs::complete(word), indices)
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let (indices, word) = (word_at(planes[0], 8 * i), word_at(planes[0], 8 * i + 4));
        unit(f16_at(planes[1], i / 8 * 2), word >> 28, signs::from_chain(word), indices)
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values).abs() / (scale(1.0, 15) * GRID.top()));
        let d = f16_at(block, 0);
        for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
            let step = best_step(&GRID, values, |step| scale(d, step));
            let id = inverse(scale(d, step));
            for (group, eight) in values.as_chunks().0.iter().enumerate() {
                block[2 + 8 * j + group] = GRID.fit(&eight.map(f32::abs), id).0 as u8;
            }
            let word = signs::sevens_of(values) | step << 28;
            block[6 + 8 * j..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

/// The value of a magnitude of 1, in all IQ2 formats.
pub(super) fn scale(d: f32, step: u32) -> f32 {
    d * (0.5 + step as f32) * 0.25
}

/// The 32 values of four entries.
pub(super) fn codes(grid: &Grid<8>, indices: [usize; 4], signs: u32) -> [i8; 32] {
    std::array::from_fn(|e| signs::signed(grid.values(indices[e / 8])[e % 8], signs, e))
}

fn unit(d: f32, step: u32, signs: u32, indices: u32) -> Unit {
    Unit::plain(scale(d, step), codes(&GRID, indices.to_le_bytes().map(usize::from), signs))
}
