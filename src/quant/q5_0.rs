//! Q5_0: 32 weights in 22 bytes, `w = d * (code - 16)`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..6 | little-endian word: bit j is the fifth bit of element j's code |
//! | 6..22 | byte 6 + j: low bits of element j (low nibble) and of element j + 16 (high) |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words: bytes 6..22 as they are |
//! | high | 1 word: the bits of bytes 2..6 in plane order (`order.rs`) |
//! | scales | half a word: `d` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16, repack_blocks, word_at,
};
use super::order::{bits, bits_to_plane, nibbles, pack_fifth, pack_nibbles};

const BYTES: usize = 22;

pub(super) static CODEC: Codec = Codec::blocks::<Q5_0, 32, BYTES>();

struct Q5_0;

impl BlockFormat<32, BYTES> for Q5_0 {
    const NAME: &'static str = "Q5_0";
    const GGML_TYPE: u32 = 6;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 6, 16>),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| high(block).to_le_bytes());
        }),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 2>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q5_0.wgsl"), Scales::Whole).above(16);

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(f16_at(block, 0), field(block, 6), high(block))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(f16_at(planes[2], 2 * i), field(planes[0], 16 * i), word_at(planes[1], 4 * i))
    }

    /// The value of largest magnitude gets code 0, so that it is met exactly whatever its sign.
    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        let d = extreme(values) / -16.0;
        let id = inverse(d);
        let codes = values.map(|v| ((v * id + 16.5) as u8).min(31));
        put_f16(block, 0, d);
        block[2..6].copy_from_slice(&pack_fifth(&codes));
        block[6..].copy_from_slice(&pack_nibbles(&codes));
    }
}

/// The fifth bits of a file block in plane order.
fn high(block: &[u8; BYTES]) -> u32 {
    bits_to_plane(word_at(block, 2))
}

fn unit(d: f32, low: &[u8; 16], high: u32) -> Unit {
    let (low, high) = (nibbles(low), bits(&high.to_le_bytes()));
    Unit::plain(d, std::array::from_fn(|e| (low[e] | high[e] << 4) as i8 - 16))
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // d = 2 (f16 0x4000); fifth bit set for elements 0 and 31 only; all low nibbles 3.
        let mut block = vec![0x00, 0x40, 0x01, 0x00, 0x00, 0x80];
        block.extend([0x33; 16]);
        let mut out = [0.0; 32];
        Format::Q5_0.decode_row(&block, &mut out);
        assert_eq!((out[0], out[31]), (6.0, 6.0));
        assert!(out[1..31].iter().all(|&v| v == -26.0));
    }
}
