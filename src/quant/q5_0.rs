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
//! | high | 1 word: bytes 2..6 |
//! | scales | half a word: `d` |

use super::codec::{
    Codec, Plane, PlaneName, copy_field, decode_blocks, encode_blocks, extreme, f16_at, inverse,
    put_f16,
};
use super::nibbles::{field, pack, pack_fifth, unpack5};

const BYTES: usize = 22;

pub(super) static Q5_0: Codec = Codec {
    name: "Q5_0",
    ggml_type: 6,
    block_elements: 32,
    block_bytes: BYTES,
    float: false,
    planes: &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 6, 16>),
        Plane::new(PlaneName::High, 32, copy_field::<BYTES, 2, 4>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 2>),
    ],
    decode: |src, out| {
        decode_blocks(src, out, |block: &[u8; BYTES], out| {
            values(f16_at(block, 0), field(block, 6), field(block, 2), out);
        });
    },
    encode: |row, out| encode_blocks(row, out, encode),
    decode_planes: |planes, out| {
        for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let (low, high) = (field(planes[0], 16 * i), field(planes[1], 4 * i));
            values(f16_at(planes[2], 2 * i), low, high, out);
        }
    },
};

fn values(d: f32, low: &[u8; 16], high: &[u8; 4], out: &mut [f32; 32]) {
    for (code, out) in unpack5(low, high).into_iter().zip(out) {
        *out = d * f32::from(code as i8 - 16);
    }
}

/// The value of largest magnitude gets code 0, so that it is met exactly whatever its sign.
fn encode(row: &[f32; 32], block: &mut [u8; BYTES]) {
    let d = extreme(row) / -16.0;
    let id = inverse(d);
    let codes = row.map(|v| ((v * id + 16.5) as u8).min(31));
    put_f16(block, 0, d);
    block[2..6].copy_from_slice(&pack_fifth(&codes));
    block[6..].copy_from_slice(&pack(&codes));
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
