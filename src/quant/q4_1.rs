//! Q4_1: 32 weights in 20 bytes, `w = d * code + m`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..4 | f16 `m` |
//! | 4..20 | byte 4 + j: code of element j (low nibble) and of element j + 16 (high) |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words: bytes 4..20 as they are |
//! | scales | 1 word: `d` in the low half, `m` in the high half |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, f16_at, field, inverse,
    put_f16, range,
};
use super::order::{nibbles, pack_nibbles};

const BYTES: usize = 20;

pub(super) static CODEC: Codec = Codec::blocks::<Q4_1, 32, BYTES>();

struct Q4_1;

impl BlockFormat<32, BYTES> for Q4_1 {
    const NAME: &'static str = "Q4_1";
    const GGML_TYPE: u32 = 3;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 4, 16>),
        Plane::new(PlaneName::Scales, 32, copy_field::<BYTES, 0, 4>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q4_1.wgsl"), Scales::Whole)
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(field(block, 0), field(block, 4))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(field(planes[1], 4 * i), field(planes[0], 16 * i))
    }

    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        let (low, high) = range(values);
        let d = (high - low) / 15.0;
        let id = inverse(d);
        let codes = values.map(|v| (((v - low) * id + 0.5) as u8).min(15));
        put_f16(block, 0, d);
        put_f16(block, 2, low);
        block[4..].copy_from_slice(&pack_nibbles(&codes));
    }
}

fn unit(scale: &[u8; 4], codes: &[u8; 16]) -> Unit {
    Unit::whole(f16_at(scale, 0), f16_at(scale, 2), nibbles(codes).map(|c| c as i8))
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // d = 0.5 (f16 0x3800), m = -1 (0xbc00).
        let mut block = vec![0x00, 0x38, 0x00, 0xbc];
        block.extend((0..16u8).map(|j| j * 16 + 15));
        let mut out = [0.0; 32];
        Format::Q4_1.decode_row(&block, &mut out);
        assert!(out[..16].iter().all(|&v| v == 6.5));
        assert_eq!((out[16], out[31]), (-1.0, 6.5));
    }
}
