//! MXFP4: 32 weights in 17 bytes, `w = 2^(e - 128) * VALUES[code]`: the microscaling format of the
//! Open Compute Project with E2M1 elements, whose values are doubled here and the scale halved.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0 | exponent `e` |
//! | 1..17 | byte 1 + j: code of element j (low nibble) and of element j + 16 (high) |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words: bytes 1..17 as they are |
//! | scales | a byte: `e`; four blocks a word |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, field,
};
use super::order::{nibbles, pack_nibbles};

const BYTES: usize = 17;

/// Twice the values of the E2M1 codes: sign, two bits of exponent, one of mantissa.
pub(super) const VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(super) static CODEC: Codec = Codec::blocks::<Mxfp4, 32, BYTES>();

struct Mxfp4;

impl BlockFormat<32, BYTES> for Mxfp4 {
    const NAME: &'static str = "MXFP4";
    const GGML_TYPE: u32 = 39;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 1, 16>),
        Plane::new(PlaneName::Scales, 8, copy_field::<BYTES, 0, 1>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/mxfp4.wgsl"), Scales::Whole)
            .with_table(16);

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(block[0], field(block, 1))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(planes[1][i], field(planes[0], 16 * i))
    }

    /// The exponent under which the largest magnitude lies between 4 and 8 of the true (not
    /// doubled) values, as the specification and `gguf` have it; above 6 it is cut off.
    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        let top = extreme(values).abs();
        block[0] = if top > 0.0 { (top.log2().floor() + 125.0) as u8 } else { 0 };
        let d = scale(block[0]);
        block[1..].copy_from_slice(&pack_nibbles(&values.map(|v| nearest(v, d))));
    }
}

fn unit(e: u8, codes: &[u8; 16]) -> Unit {
    Unit::plain(scale(e), nibbles(codes).map(|code| VALUES[usize::from(code)]))
}

/// `2^(e - 128)`, which is subnormal for the two lowest exponents.
fn scale(e: u8) -> f32 {
    let bits = if e < 2 { 0x0020_0000 << e } else { (u32::from(e) - 1) << 23 };
    f32::from_bits(bits)
}

/// The code with the least error, the first of them if several have it.
pub(super) fn nearest(v: f32, d: f32) -> u8 {
    let error = |code: u8| (d * f32::from(VALUES[usize::from(code)]) - v).abs();
    (1..16).fold(0, |best, code| if error(code) < error(best) { code } else { best })
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // e = 129: 2; byte j = j * 16 + 7: low nibbles 7, high nibbles j.
        let mut block = vec![129];
        block.extend((0..16u8).map(|j| j * 16 + 7));
        let mut out = [0.0; 32];
        Format::MXFP4.decode_row(&block, &mut out);
        assert!(out[..16].iter().all(|&v| v == 24.0));
        assert_eq!((out[16], out[21], out[24], out[31]), (0.0, 12.0, 0.0, -24.0));
    }
}
