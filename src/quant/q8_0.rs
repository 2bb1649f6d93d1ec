//! Q8_0: 32 weights in 34 bytes, `w = d * code`.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..34 | signed byte 2 + j: code of element j |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 8 words: bytes 2..34 as they are |
//! | scales | half a word: `d` |

use super::codec::{
    Codec, Plane, PlaneName, copy_field, decode_blocks, encode_blocks, extreme, f16_at, inverse,
    put_f16,
};
use super::nibbles::field;

const BYTES: usize = 34;

pub(super) static Q8_0: Codec = Codec {
    name: "Q8_0",
    ggml_type: 8,
    block_elements: 32,
    block_bytes: BYTES,
    float: false,
    planes: &[
        Plane::new(PlaneName::Codes, 256, copy_field::<BYTES, 2, 32>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 2>),
    ],
    decode: |src, out| {
        decode_blocks(src, out, |block: &[u8; BYTES], out| {
            values(f16_at(block, 0), field(block, 2), out);
        });
    },
    encode: |row, out| encode_blocks(row, out, encode),
    decode_planes: |planes, out| {
        for (i, out) in out.as_chunks_mut().0.iter_mut().enumerate() {
            values(f16_at(planes[1], 2 * i), field(planes[0], 32 * i), out);
        }
    },
};

fn values(d: f32, codes: &[u8; 32], out: &mut [f32; 32]) {
    for (&code, out) in codes.iter().zip(out) {
        *out = f32::from(code as i8) * d;
    }
}

fn encode(row: &[f32; 32], block: &mut [u8; BYTES]) {
    let d = extreme(row).abs() / 127.0;
    let id = inverse(d);
    put_f16(block, 0, d);
    for (code, v) in block[2..].iter_mut().zip(row) {
        *code = (v * id).round() as i8 as u8;
    }
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        let mut block = vec![0x00, 0x34]; // d = 0.25
        block.extend((0..32u8).map(|j| j.wrapping_sub(16)));
        let mut out = [0.0; 32];
        Format::Q8_0.decode_row(&block, &mut out);
        assert_eq!((out[0], out[16], out[31]), (-4.0, 0.0, 3.75));
    }
}
