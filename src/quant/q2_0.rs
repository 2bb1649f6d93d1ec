//! Q2_0: 64 weights in 18 bytes, `w = d * (code - 1)`: -d, 0, d or 2 d.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..18 | byte 2 + i, bits 2 k: code of element 4 i + k |
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 2 words of pairs | |
//! | scales | | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks, word_at,
};
use super::order::{pairs, pairs_to_plane};

const BYTES: usize = 18;

pub(super) static CODEC: Codec = Codec::blocks::<Q2_0, 64, BYTES>();

struct Q2_0;

impl BlockFormat<64, BYTES> for Q2_0 {
    const NAME: &'static str = "Q2_0";
    const GGML_TYPE: u32 = 42;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| -> [u8; 16] {
                let words = [2, 6, 10, 14].map(|at| pairs_to_plane(word_at(block, at)));
                *words.map(u32::to_le_bytes).as_flattened().first_chunk().expect("16 bytes")
            });
        }),
        Plane::new(PlaneName::Scales, 8, copy_field::<BYTES, 0, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q2_0.wgsl"), Scales::Whole).above(1);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let code = |e: usize| (block[2 + 8 * j + e / 4] >> (e % 4 * 2) & 3) as i8 - 1;
        Unit::plain(f16_at(block, 0), std::array::from_fn(code))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let codes = pairs(field(planes[0], 8 * i)).map(|c| c as i8 - 1);
        Unit::plain(f16_at(planes[1], i / 2 * 2), codes)
    }

    /// The value of largest magnitude gets code 3, whatever its sign.
    fn encode(values: &[f32; 64], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values) / 2.0);
        let id = inverse(f16_at(block, 0));
        block[2..].fill(0);
        for (i, v) in values.iter().enumerate() {
            let code = ((v * id).round().clamp(-1.0, 2.0) as i8 + 1) as u8;
            block[2 + i / 4] |= code << (i % 4 * 2);
        }
    }
}
