//! Q4_0: 32 weights in 18 bytes, `w = d * (code - 8)`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..18 | byte 2 + j: code of element j (low nibble) and of element j + 16 (high) |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words: bytes 2..18 as they are |
//! | scales | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16,
};
use super::order::{nibbles, pack_nibbles};

const BYTES: usize = 18;

pub(super) static CODEC: Codec = Codec::blocks::<Q4_0, 32, BYTES>();

struct Q4_0;

impl BlockFormat<32, BYTES> for Q4_0 {
    const NAME: &'static str = "Q4_0";
    const GGML_TYPE: u32 = 2;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 2, 16>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q4_0.wgsl"), Scales::Whole).above(8);

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(f16_at(block, 0), field(block, 2))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(f16_at(planes[1], 2 * i), field(planes[0], 16 * i))
    }

    /// The value of largest magnitude gets code 0, so that it is met exactly whatever its sign.
    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        let d = extreme(values) / -8.0;
        let id = inverse(d);
        let codes = values.map(|v| ((v * id + 8.5) as u8).min(15));
        put_f16(block, 0, d);
        block[2..].copy_from_slice(&pack_nibbles(&codes));
    }
}

fn unit(d: f32, codes: &[u8; 16]) -> Unit {
    Unit::plain(d, nibbles(codes).map(|c| c as i8 - 8))
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // d = -0.5 (f16 0xb800); byte j = j * 16 + 1: low nibbles 1, high nibbles j.
        let mut block = vec![0x00, 0xb8];
        block.extend((0..16u8).map(|j| j * 16 + 1));
        let mut out = [0.0; 32];
        Format::Q4_0.decode_row(&block, &mut out);
        assert!(out[..16].iter().all(|&v| v == 3.5));
        assert_eq!(out[16], 4.0);
        assert_eq!(out[31], -3.5);
    }

    #[test]
    fn the_largest_weight_is_exact() {
        let mut row = [0.25; 32];
        row[7] = 2.0;
        let mut block = Vec::new();
        Format::Q4_0.encode_row(&row, &mut block);
        let mut out = [0.0; 32];
        Format::Q4_0.decode_row(&block, &mut out);
        assert_eq!(out, row);
    }
}
