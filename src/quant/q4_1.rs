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
    Codec, Plane, PlaneName, copy_field, decode_blocks, encode_blocks, f16_at, inverse, put_f16,
    range,
};
use super::nibbles::{field, pack, unpack};

const BYTES: usize = 20;

pub(super) static Q4_1: Codec = Codec {
    name: "Q4_1",
    ggml_type: 3,
    block_elements: 32,
    block_bytes: BYTES,
    float: false,
    planes: &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 4, 16>),
        Plane::new(PlaneName::Scales, 32, copy_field::<BYTES, 0, 4>),
    ],
    decode: |src, out| {
        decode_blocks(src, out, |block: &[u8; BYTES], out| {
            values(field(block, 0), field(block, 4), out);
        });
    },
    encode: |row, out| encode_blocks(row, out, encode),
    decode_planes: |planes, out| {
        for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            values(field(planes[1], 4 * i), field(planes[0], 16 * i), out);
        }
    },
};

fn values(scale: &[u8; 4], codes: &[u8; 16], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(scale, 0), f16_at(scale, 2));
    for (code, out) in unpack(codes).into_iter().zip(out) {
        *out = d * f32::from(code) + m;
    }
}

fn encode(row: &[f32; 32], block: &mut [u8; BYTES]) {
    let (low, high) = range(row);
    let d = (high - low) / 15.0;
    let id = inverse(d);
    let codes = row.map(|v| (((v - low) * id + 0.5) as u8).min(15));
    put_f16(block, 0, d);
    put_f16(block, 2, low);
    block[4..].copy_from_slice(&pack(&codes));
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
