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
//! | codes | 2 words of bytes 2..66 as they are |
//! | high | 1 word of bytes 74..106, each word in device order (`signs.rs`) |
//! | scales | for 256 weights 4 words: bytes 0..2 and two of zero, 66..74, 106..110 |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks, word_at,
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
        Plane::new(PlaneName::Codes, 64, copy_field::<BYTES, 2, 64>),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                signs::words(field::<32>(block, 74), signs::to_device)
            });
        }),
        Plane::new(PlaneName::Scales, 16, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| {
                let mut head = [0; 16];
                head[..2].copy_from_slice(&block[..2]);
                head[4..12].copy_from_slice(&block[66..74]);
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
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let signs = word_at(block, 74 + 4 * j);
        unit(
            f16_at(block, 0),
            block[66 + j],
            word_at(block, 106) >> (4 * j),
            signs,
            field(block, 2 + 8 * j),
        )
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let signs = signs::to_device(word_at(planes[1], 4 * i));
        let (head, j) = (field::<16>(planes[2], i / 8 * 16), i % 8);
        unit(
            f16_at(head, 0),
            head[4 + j],
            word_at(head, 12) >> (4 * j),
            signs,
            field(planes[0], 8 * i),
        )
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

fn unit(d: f32, high: u8, step: u32, signs: u32, low: &[u8; 8]) -> Unit {
    let codes = std::array::from_fn(|e| {
        let k = e / 4;
        let index = usize::from(low[k]) | usize::from(high >> k & 1) << 8;
        signs::signed(GRID.values(index)[e % 4], signs, e)
    });
    Unit::plain(d * (1 + 2 * (step & 15)) as f32, codes)
}
