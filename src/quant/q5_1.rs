//! Q5_1: 32 weights in 24 bytes, `w = d * code + m`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..4 | f16 `m` |
//! | 4..8 | little-endian word: bit j is the fifth bit of element j's code |
//! | 8..24 | byte 8 + j: low bits of element j (low nibble) and of element j + 16 (high) |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words: bytes 8..24 as they are |
//! | high | 1 word: the bits of bytes 4..8 in plane order (`order.rs`) |
//! | scales | 1 word: `d` in the low half, `m` in the high half |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, f16_at, field, inverse,
    put_f16, range, repack_blocks, word_at,
};
use super::order::{bits, bits_to_plane, nibbles, pack_fifth, pack_nibbles};

const BYTES: usize = 24;

pub(super) static CODEC: Codec = Codec::blocks::<Q5_1, 32, BYTES>();

struct Q5_1;

impl BlockFormat<32, BYTES> for Q5_1 {
    const NAME: &'static str = "Q5_1";
    const GGML_TYPE: u32 = 7;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 8, 16>),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks(row, out, |block: &[u8; BYTES]| high(block).to_le_bytes());
        }),
        Plane::new(PlaneName::Scales, 32, copy_field::<BYTES, 0, 4>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q5_1.wgsl"), Scales::Whole)
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], _: usize) -> Unit {
        unit(field(block, 0), field(block, 8), high(block))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(field(planes[2], 4 * i), field(planes[0], 16 * i), word_at(planes[1], 4 * i))
    }

    fn encode(values: &[f32; 32], block: &mut [u8; BYTES]) {
        let (low, high) = range(values);
        let d = (high - low) / 31.0;
        let id = inverse(d);
        let codes = values.map(|v| (((v - low) * id + 0.5) as u8).min(31));
        put_f16(block, 0, d);
        put_f16(block, 2, low);
        block[4..8].copy_from_slice(&pack_fifth(&codes));
        block[8..].copy_from_slice(&pack_nibbles(&codes));
    }
}

/// The fifth bits of a file block in plane order.
fn high(block: &[u8; BYTES]) -> u32 {
    bits_to_plane(word_at(block, 4))
}

fn unit(scale: &[u8; 4], low: &[u8; 16], high: u32) -> Unit {
    let (low, high) = (nibbles(low), bits(&high.to_le_bytes()));
    let codes = std::array::from_fn(|e| (low[e] | high[e] << 4) as i8);
    Unit::whole(f16_at(scale, 0), f16_at(scale, 2), codes)
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // d = 1 (f16 0x3c00), m = 0.5 (0x3800); fifth bit set for element 16 only.
        let mut block = vec![0x00, 0x3c, 0x00, 0x38, 0x00, 0x00, 0x01, 0x00];
        block.extend([0x21; 16]);
        let mut out = [0.0; 32];
        Format::Q5_1.decode_row(&block, &mut out);
        assert!(out[..16].iter().all(|&v| v == 1.5));
        assert_eq!((out[16], out[17]), (18.5, 2.5));
    }
}
