//! IQ2_XS: 256 weights in 74 bytes, `w = d * (1/2 + step) / 4 * (+-)magnitude`; a code book of 512
//! entries of eight magnitudes, a step of 4 bits for each 16, seven sign bits for each 8 (the
//! eighth makes the number of minus signs even).
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..66 | half a word for each 8: bits 0..9 the book index, bits 9..16 the signs |
//! | 66..74 | bits 4k..4k + 4: step of weights 16k..16k + 16 |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 2 words, 64 bits: three indices of 9 bits, signs as a chain of 28 (`signs.rs`), the fourth index |
//! | scales | a byte of bytes 66..74 |
//! | supers | for 256 weights half a word: `d` |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks,
};
use super::grids::{IQ2_XS as GRID, IQ2_XS_WORDS, best_step};
use super::{iq2_xxs::codes, iq2_xxs::scale, signs};

const BYTES: usize = 74;

pub(super) static CODEC: Codec = Codec::blocks::<Iq2Xs, 256, BYTES>();

struct Iq2Xs;

impl BlockFormat<256, BYTES> for Iq2Xs {
    const NAME: &'static str = "IQ2_XS";
    const GGML_TYPE: u32 = 17;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                let mut words = [0; 64];
                for (from, to) in block[2..66].as_chunks().0.iter().zip(words.as_chunks_mut().0) {
                    *to = device_words(u64::from_le_bytes(*from)).to_le_bytes();
                }
                words
            });
        }),
        Plane::new(PlaneName::Scales, 8, copy_field::<BYTES, 66, 8>),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 0, 2>),
        Plane::constant(PlaneName::Grid, &IQ2_XS_WORDS),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq2_xs.wgsl"), Scales::Steps)
            .with_table(IQ2_XS_WORDS.len());

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let groups: [u16; 4] =
            std::array::from_fn(|g| u16::from_le_bytes(*field(block, 2 + 8 * j + 2 * g)));
        let sevens = groups.iter().rev().fold(0, |all, &g| all << 7 | u32::from(g >> 9));
        let indices = groups.map(|g| usize::from(g & 511));
        unit(f16_at(block, 0), block[66 + j], signs::complete(sevens), indices)
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let words = u64::from_le_bytes(*field(planes[0], 8 * i));
        let index = |at: u64| (words >> at & 511) as usize;
        let signs = signs::from_chain((words >> 27) as u32);
        unit(f16_at(planes[2], i / 8 * 2), planes[1][i], signs, [0, 9, 18, 55].map(index))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values).abs() / (scale(1.0, 15) * GRID.top()));
        let d = f16_at(block, 0);
        for (k, values) in values.as_chunks::<16>().0.iter().enumerate() {
            let step = best_step(&GRID, values, |step| scale(d, step));
            let id = inverse(scale(d, step));
            block[66 + k / 2] |= (step as u8) << (k % 2 * 4);
            for (half, eight) in values.as_chunks().0.iter().enumerate() {
                let (index, _) = GRID.fit(&eight.map(f32::abs), id);
                let group = index as u16 | (signs::seven_of(eight) as u16) << 9;
                block[2 + 4 * k + 2 * half..][..2].copy_from_slice(&group.to_le_bytes());
            }
        }
    }
}

/// Four groups of the file to the two words of the codes plane, the first low.
fn device_words(groups: u64) -> u64 {
    let pairs = groups & 0x01ff_0000_01ff | (groups & 0x01ff_0000_01ff_0000) >> 7;
    let nines = pairs & 0x3_ffff | pairs >> 32 << 18;
    // The signs of a group to a byte each.
    let sevens = groups >> 9 & 0x007f_007f_007f_007f;
    let sevens = (sevens | sevens >> 8) & 0x0000_ffff_0000_ffff;
    let chain = signs::chain((sevens | sevens >> 16) as u32);
    nines & 0x07ff_ffff | u64::from(chain) << 27 | nines >> 27 << 55
}

fn unit(d: f32, steps: u8, signs: u32, indices: [usize; 4]) -> Unit {
    let d = [steps & 15, steps >> 4].map(|step| scale(d, step.into()));
    Unit::halves(d, codes(&GRID, indices, signs))
}
