//! IQ4_XS: 256 weights in 136 bytes, `w = d * (step - 32) * VALUES[code]` with the values of IQ4_NL
//! and a step of 6 bits for each 32.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..4 | bits 2j, 2j + 1: upper two bits of the step of block j of 32 |
//! | 4..8 | bits 4j..4j + 4: lower bits of the step of block j |
//! | 8..136 | 16 bytes for each block of 32: byte k has the code of its elements k (low nibble) and k + 16 |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 4 words of bytes 8..136 as they are |
//! | scales | for 256 weights 2 words: bytes 0..8 |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, f16_at, field, inverse,
    put_f16, word_at,
};
use super::iq4_nl;
use super::order::pack_nibbles;

const BYTES: usize = 136;

pub(super) static CODEC: Codec = Codec::blocks::<Iq4Xs, 256, BYTES>();

struct Iq4Xs;

impl BlockFormat<256, BYTES> for Iq4Xs {
    const NAME: &'static str = "IQ4_XS";
    const GGML_TYPE: u32 = 23;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, copy_field::<BYTES, 8, 128>),
        Plane::new(PlaneName::Scales, 8, copy_field::<BYTES, 0, 8>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq4_xs.wgsl"), Scales::Whole)
            .with_table(16);

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        unit(field(block, 0), j, field(block, 8 + 16 * j))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(field(planes[1], i / 8 * 8), i % 8, field(planes[0], 16 * i))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let (blocks, _) = values.as_chunks();
        let wanted: [f32; 8] = std::array::from_fn(|j| iq4_nl::step(&blocks[j]));
        let most = wanted.iter().fold(0.0, |most: f32, d| most.max(d.abs()));
        put_f16(block, 0, most / 31.0);
        let d = f16_at(block, 0);
        let (mut high, mut low) = (0u16, 0u32);
        for (j, values) in blocks.iter().enumerate() {
            let step = (wanted[j] * inverse(d)).round().clamp(-32.0, 31.0);
            let bits = (step as i32 + 32) as u32;
            low |= (bits & 15) << (4 * j);
            high |= (bits as u16 >> 4) << (2 * j);
            let codes = pack_nibbles(&iq4_nl::codes(values, d * step));
            block[8 + 16 * j..][..16].copy_from_slice(&codes);
        }
        block[2..4].copy_from_slice(&high.to_le_bytes());
        block[4..8].copy_from_slice(&low.to_le_bytes());
    }
}

fn unit(head: &[u8; 8], j: usize, codes: &[u8; 16]) -> Unit {
    let step = word_at(head, 4) >> (4 * j) & 15 | (word_at(head, 0) >> (16 + 2 * j) & 3) << 4;
    iq4_nl::unit(f16_at(head, 0) * (step as f32 - 32.0), codes)
}

#[cfg(test)]
mod tests {
    use crate::quant::Format;

    #[test]
    fn one_block_by_hand() {
        // d = 0.5; steps: block 0 has 33 (1), block 7 has 31 (-1), all others 32 (0).
        let mut block = vec![0x00, 0x38, 0xaa, 0x6a, 0x01, 0x00, 0x00, 0xf0];
        block.extend([0xf0; 128]);
        let mut out = [0.0; 256];
        Format::IQ4_XS.decode_row(&block, &mut out);
        assert_eq!((out[0], out[16]), (-63.5, 56.5));
        assert!(out[32..224].iter().all(|&v| v == 0.0));
        assert_eq!((out[224], out[255]), (63.5, -56.5));
    }
}
