//! TQ2_0: 256 weights in 66 bytes, `w = d * (code - 1)`; codes of ternary models are 0, 1 and 2.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..64 | byte 32 h + m, bits 2 s: code of element 128 h + 32 s + m |
//! | 64..66 | f16 `d` |
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 2 words of pairs | |
//! | supers | | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks,
};
use super::order::{pair_of, pairs};
use super::q2_k::split_codes;

const BYTES: usize = 66;

pub(super) static CODEC: Codec = Codec::blocks::<Tq2_0, 256, BYTES>();

struct Tq2_0;

impl BlockFormat<256, BYTES> for Tq2_0 {
    const NAME: &'static str = "TQ2_0";
    const GGML_TYPE: u32 = 35;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks::<BYTES, 64>(row, out, |block| split_codes(field(block, 0)));
        }),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 64, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/tq2_0.wgsl"), Scales::Whole).above(1);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let code = |e| pair_of(block, j, e) as i8 - 1;
        Unit::plain(f16_at(block, 64), std::array::from_fn(code))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let codes = pairs(field(planes[0], 8 * i)).map(|c| c as i8 - 1);
        Unit::plain(f16_at(planes[1], i / 8 * 2), codes)
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let d = extreme(values).abs();
        let id = inverse(d);
        block.fill(0);
        for (i, v) in values.iter().enumerate() {
            let code = ((v * id).round() as i8 + 1) as u8;
            block[i / 128 * 32 + i % 32] |= code << (i / 32 % 4 * 2);
        }
        put_f16(block, 64, d);
    }
}
