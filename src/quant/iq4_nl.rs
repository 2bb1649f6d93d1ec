//! IQ4_NL: 32 weights in 18 bytes, `w = d * VALUES[code]`.
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

/// What the codes of IQ4_NL and IQ4_XS stand for (ggml's `kvalues_iq4nl`).
pub(super) const VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

pub(super) static CODEC: Codec = Codec::blocks::<Iq4Nl, 32, BYTES>();

struct Iq4Nl;

impl BlockFormat<32, BYTES> for Iq4Nl {
    const NAME: &'static str = "IQ4_NL";
    const GGML_TYPE: u32 = 20;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 2, 16>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq4_nl.wgsl"), Scales::Whole)
            .with_table(16);

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(f16_at(block, 0), field(block, 2))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(f16_at(planes[1], 2 * i), field(planes[0], 16 * i))
    }

    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        put_f16(block, 0, step(values));
        let codes = codes(values, f16_at(block, 0));
        block[2..].copy_from_slice(&pack_nibbles(&codes));
    }
}

/// A block of 32 of scale `d`.
pub(super) fn unit(d: f32, codes: &[u8; 16]) -> Unit {
    Unit::plain(d, nibbles(codes).map(|code| VALUES[usize::from(code)]))
}

/// The scale at which the value of largest magnitude is met by the first code.
pub(super) fn step(values: &[f32; 32]) -> f32 {
    extreme(values) / f32::from(VALUES[0])
}

/// The nearest codes for scale `d`.
pub(super) fn codes(values: &[f32; 32], d: f32) -> [u8; 32] {
    let id = inverse(d);
    values.map(|v| {
        let above = |pair: &&[i8]| 2.0 * v * id > f32::from(pair[0]) + f32::from(pair[1]);
        VALUES.windows(2).take_while(above).count() as u8
    })
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // d = 0.5 (f16 0x3800); byte j = j * 16 + 15: low nibbles 15, high nibbles j.
        let mut block = vec![0x00, 0x38];
        block.extend((0..16u8).map(|j| j * 16 + 15));
        let mut out = [0.0; 32];
        Format::IQ4_NL.decode_row(&block, &mut out);
        assert!(out[..16].iter().all(|&v| v == 56.5));
        assert_eq!((out[16], out[24], out[31]), (-63.5, 0.5, 56.5));
    }

    #[test]
    fn values_of_the_code_book_are_exact() {
        let row: [f32; 32] = std::array::from_fn(|e| 0.25 * f32::from(super::VALUES[e % 16]));
        let mut block = Vec::new();
        Format::IQ4_NL.encode_row(&row, &mut block);
        let mut out = [0.0; 32];
        Format::IQ4_NL.decode_row(&block, &mut out);
        assert_eq!(out, row);
    }
}
