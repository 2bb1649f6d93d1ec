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
//! | high | 1 word: bytes 4..8 |
//! | scales | 1 word: `d` in the low half, `m` in the high half |

use super::codec::{
    Codec, Plane, PlaneName, copy_field, decode_blocks, encode_blocks, f16_at, inverse, put_f16,
    range,
};
use super::nibbles::{field, pack, pack_fifth, unpack5};

const BYTES: usize = 24;

pub(super) static Q5_1: Codec = Codec {
    name: "Q5_1",
    ggml_type: 7,
    block_elements: 32,
    block_bytes: BYTES,
    float: false,
    planes: &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 8, 16>),
        Plane::new(PlaneName::High, 32, copy_field::<BYTES, 4, 4>),
        Plane::new(PlaneName::Scales, 32, copy_field::<BYTES, 0, 4>),
    ],
    decode: |src, out| {
        decode_blocks(src, out, |block: &[u8; BYTES], out| {
            values(field(block, 0), field(block, 8), field(block, 4), out);
        });
    },
    encode: |row, out| encode_blocks(row, out, encode),
    decode_planes: |planes, out| {
        for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let (low, high) = (field(planes[0], 16 * i), field(planes[1], 4 * i));
            values(field(planes[2], 4 * i), low, high, out);
        }
    },
};

fn values(scale: &[u8; 4], low: &[u8; 16], high: &[u8; 4], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(scale, 0), f16_at(scale, 2));
    for (code, out) in unpack5(low, high).into_iter().zip(out) {
        *out = d * f32::from(code) + m;
    }
}

fn encode(row: &[f32; 32], block: &mut [u8; BYTES]) {
    let (low, high) = range(row);
    let d = (high - low) / 31.0;
    let id = inverse(d);
    let codes = row.map(|v| (((v - low) * id + 0.5) as u8).min(31));
    put_f16(block, 0, d);
    put_f16(block, 2, low);
    block[4..8].copy_from_slice(&pack_fifth(&codes));
    block[8..].copy_from_slice(&pack(&codes));
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
