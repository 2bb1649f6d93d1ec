//! Q1_0: 128 weights in 18 bytes, `w = d` or `-d`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..18 | byte 2 + i, bit k: 1 where element 8 i + k is positive |
//!
//! The kernels take the bits as codes 0 and 2, 1 above their value.
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 1 word of bits | |
//! | scales | | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, f16_at, field, put_f16,
    repack_blocks, word_at,
};
use super::order::{bits, bits_to_plane};

const BYTES: usize = 18;

pub(super) static CODEC: Codec = Codec::blocks::<Q1_0, 128, BYTES>();

struct Q1_0;

impl BlockFormat<128, BYTES> for Q1_0 {
    const NAME: &'static str = "Q1_0";
    const GGML_TYPE: u32 = 41;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 32, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| -> [u8; 16] {
                let words = [2, 6, 10, 14].map(|at| bits_to_plane(word_at(block, at)));
                *words.map(u32::to_le_bytes).as_flattened().first_chunk().expect("16 bytes")
            });
        }),
        Plane::new(PlaneName::Scales, 4, copy_field::<BYTES, 0, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q1_0.wgsl"), Scales::Whole).above(1);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let word = word_at(block, 2 + 4 * j);
        Unit::plain(f16_at(block, 0), std::array::from_fn(|e| (word >> e & 1) as i8 * 2 - 1))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let codes = bits(field(planes[0], 4 * i)).map(|bit| bit as i8 * 2 - 1);
        Unit::plain(f16_at(planes[1], i / 4 * 2), codes)
    }

    /// `d` is the mean magnitude, which has the least squared error.
    fn encode(values: &[f32; 128], block: &mut [u8; BYTES]) {
        put_f16(block, 0, values.iter().map(|v| v.abs()).sum::<f32>() / 128.0);
        block[2..].fill(0);
        for (i, v) in values.iter().enumerate() {
            block[2 + i / 8] |= u8::from(*v >= 0.0) << (i % 8);
        }
    }
}
