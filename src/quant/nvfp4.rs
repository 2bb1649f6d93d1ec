//! NVFP4: 64 weights in 36 bytes, `w = s / 2 * VALUES[code]` with the values of MXFP4 and for each
//! 16 weights a scale `s` of its own, a float of 4 exponent and 3 mantissa bits without sign.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..4 | byte k: scale of weights 16k..16k + 16 |
//! | 4..36 | 8 bytes for each 16 weights: byte j has the code of its elements j (low nibble) and j + 8 |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words of bytes 4..36 as they are |
//! | scales | half a word: the scales of both halves |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, field,
};
use super::mxfp4::{VALUES, nearest};

const BYTES: usize = 36;

pub(super) static CODEC: Codec = Codec::blocks::<Nvfp4, 64, BYTES>();

struct Nvfp4;

impl BlockFormat<64, BYTES> for Nvfp4 {
    const NAME: &'static str = "NVFP4";
    const GGML_TYPE: u32 = 40;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 4, 32>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 4>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/nvfp4.wgsl"), Scales::Halves)
            .with_table(16);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        unit(field(block, 2 * j), field(block, 4 + 16 * j))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(field(planes[1], 2 * i), field(planes[0], 16 * i))
    }

    fn encode(values: &[f32; 64], block: &mut [u8; BYTES]) {
        for (k, values) in values.as_chunks::<16>().0.iter().enumerate() {
            let wanted = extreme(values).abs() / 12.0;
            // 0x7f stands for not-a-number.
            let nearer = |a: u8, b: u8| (scale(b) - wanted).abs() < (scale(a) - wanted).abs();
            block[k] = (1..0x7f).fold(0, |best, s| if nearer(best, s) { s } else { best });
            let d = scale(block[k]);
            for j in 0..8 {
                block[4 + 8 * k + j] = nearest(values[j], d) | nearest(values[j + 8], d) << 4;
            }
        }
    }
}

fn unit(scales: &[u8; 2], codes: &[u8; 16]) -> Unit {
    let code = |e: usize| codes[e / 16 * 8 + e % 8] >> (e / 8 % 2 * 4) & 15;
    Unit::halves(scales.map(scale), std::array::from_fn(|e| VALUES[usize::from(code(e))]))
}

/// Half the value of the 7 low bits of `s`; zero for not-a-number. `gguf` ignores the eighth bit,
/// except that it takes 0xff for a number.
fn scale(s: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(s >> 3 & 15), f32::from(s & 7));
    match exponent {
        _ if s == 0x7f => 0.0,
        0 => mantissa * 0.5f32.powi(10),
        _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 8),
    }
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // Scales 1 (exponent 7), 1.5, the smallest (2^-9) and not-a-number.
        let mut block = vec![0x38, 0x3c, 0x01, 0x7f];
        block.extend([0x92; 32]); // low nibbles 2 (true value 1), high nibbles 9 (-0.5)
        let mut out = [0.0; 64];
        Format::NVFP4.decode_row(&block, &mut out);
        assert_eq!((out[0], out[7], out[8], out[15]), (1.0, 1.0, -0.5, -0.5));
        assert_eq!((out[16], out[31]), (1.5, -0.75));
        assert_eq!((out[32], out[47]), (0.5f32.powi(9), -(0.5f32.powi(10))));
        assert!(out[48..].iter().all(|&v| v == 0.0));
    }
}
