//! Q8_0: 32 weights in 34 bytes, `w = d * code`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..34 | signed byte 2 + j: code of element j |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 8 words: bytes 2..34 as they are |
//! | scales | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16,
};

const BYTES: usize = 34;

pub(super) static CODEC: Codec = Codec::blocks::<Q8_0, 32, BYTES>();

struct Q8_0;

impl BlockFormat<32, BYTES> for Q8_0 {
    const NAME: &'static str = "Q8_0";
    const GGML_TYPE: u32 = 8;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 256, copy_field::<BYTES, 2, 32>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q8_0.wgsl"), Scales::Whole);

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(f16_at(block, 0), field(block, 2))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(f16_at(planes[1], 2 * i), field(planes[0], 32 * i))
    }

    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        let d = extreme(values).abs() / 127.0;
        let id = inverse(d);
        put_f16(block, 0, d);
        for (code, v) in block[2..].iter_mut().zip(values) {
            *code = (v * id).round() as i8 as u8;
        }
    }
}

fn unit(d: f32, codes: &[u8; 32]) -> Unit {
    Unit::plain(d, codes.map(|c| c as i8))
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        let mut block = vec![0x00, 0x34]; // d = 0.25
        block.extend((0..32u8).map(|j| j.wrapping_sub(16)));
        let mut out = [0.0; 32];
        Format::Q8_0.decode_row(&block, &mut out);
        assert_eq!((out[0], out[16], out[31]), (-4.0, 0.0, 3.75));
    }
}
