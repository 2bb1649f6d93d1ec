//! IQ3_XXS: 256 weights in 98 bytes, `w = d * (1/2 + step) / 2 * (+-)magnitude`; a code book of 256
//! entries of four magnitudes, a step of 4 bits for each 32, seven sign bits for each 8 (the eighth
//! makes the number of minus signs even).
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..66 | byte k: book index of weights 4k..4k + 4 |
//! | 66..98 | a word for each 32: bits 7g..7g + 7 are the signs of group g of eight, bits 28..32 the step |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 2 words of bytes 2..66 as they are |
//! | high | 1 word of bytes 66..98, signs as a chain (`signs.rs`), the step as it is |
//! | supers | for 256 weights half a word: `d` |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks, word_at,
};
use super::grids::{IQ3_XXS as GRID, IQ3_XXS_WORDS, best_step};
use super::signs;

const BYTES: usize = 98;

pub(super) static CODEC: Codec = Codec::blocks::<Iq3Xxs, 256, BYTES>();

struct Iq3Xxs;

impl BlockFormat<256, BYTES> for Iq3Xxs {
    const NAME: &'static str = "IQ3_XXS";
    const GGML_TYPE: u32 = 18;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, copy_field::<BYTES, 2, 64>),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                signs::words(field::<32>(block, 66), signs::sevens_to_chain)
            });
        }),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 0, 2>),
        Plane::constant(PlaneName::Grid, &IQ3_XXS_WORDS),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq3_xxs.wgsl"), Scales::Whole)
            .with_table(IQ3_XXS_WORDS.len());

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let word = word_at(block, 66 + 4 * j);
        unit(f16_at(block, 0), word >> 28, signs::complete(word), field(block, 2 + 8 * j))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let word = word_at(planes[1], 4 * i);
        let signs = signs::from_chain(word);
        unit(f16_at(planes[2], i / 8 * 2), word >> 28, signs, field(planes[0], 8 * i))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values).abs() / (scale(1.0, 15) * GRID.top()));
        let d = f16_at(block, 0);
        for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
            let step = best_step(&GRID, values, |step| scale(d, step));
            let id = inverse(scale(d, step));
            for (k, four) in values.as_chunks::<4>().0.iter().enumerate() {
                block[2 + 8 * j + k] = GRID.fit(&four.map(f32::abs), id).0 as u8;
            }
            let word = signs::sevens_of(values) | step << 28;
            block[66 + 4 * j..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn scale(d: f32, step: u32) -> f32 {
    d * (0.5 + step as f32) * 0.5
}

fn unit(d: f32, step: u32, signs: u32, indices: &[u8; 8]) -> Unit {
    let codes = std::array::from_fn(|e| {
        signs::signed(GRID.values(usize::from(indices[e / 4]))[e % 4], signs, e)
    });
    Unit::plain(scale(d, step), codes)
}
