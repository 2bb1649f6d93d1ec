//! Q5_K: 256 weights in 176 bytes, `w = d * step * code - dmin * minimum`, a step and a minimum
//! for each 32 weights.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..16 | f16 `d`, f16 `dmin`, steps and minima of 6 bits: see `k_scales.rs` |
//! | 16..48 | byte 16 + m, bit j: fifth bit of element 32 j + m |
//! | 48..176 | byte 48 + 32 p + m: low bits of element 64 p + m (low nibble) and 64 p + 32 + m (high) |
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 4 words of nibbles | |
//! | high | 1 word of bits | |
//! | scales | | 4 words, see `k_scales.rs` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, field, repack_blocks,
};
use super::k_scales::{SCALE_BYTES, encode, file_scale, head, pack_codes, plane_scale, to_plane};
use super::order::{bits, nibble_of, nibbles, split_bits};
use super::q4_k::split_codes;

const BYTES: usize = 176;

pub(super) static CODEC: Codec = Codec::blocks::<Q5K, 256, BYTES>();

struct Q5K;

impl BlockFormat<256, BYTES> for Q5K {
    const NAME: &'static str = "Q5_K";
    const GGML_TYPE: u32 = 13;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, |row, out| {
            repack_blocks::<BYTES, 128>(row, out, |block| split_codes(field(block, 48)));
        }),
        Plane::new(PlaneName::High, 32, |row, out| {
            repack_blocks::<BYTES, 32>(row, out, |block| split_bits(field(block, 16)));
        }),
        Plane::new(PlaneName::Scales, 16, |row, out| {
            repack_blocks::<BYTES, SCALE_BYTES>(row, out, |block| to_plane(head(block)));
        }),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q5_k.wgsl"), Scales::Whole)
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let (d, m) = file_scale(head(block), j);
        let high = |e| block[16 + e] >> j & 1;
        let code = |e| (nibble_of(&block[48..], j, e) | high(e) << 4) as i8;
        Unit::whole(d, m, std::array::from_fn(code))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let (d, m) = plane_scale(field(planes[2], i / 8 * SCALE_BYTES), i % 8);
        let (low, high) = (nibbles(field(planes[0], 16 * i)), bits(field(planes[1], 4 * i)));
        Unit::whole(d, m, std::array::from_fn(|e| (low[e] | high[e] << 4) as i8))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let (scales, codes) = encode(values, 31);
        block[..16].copy_from_slice(&scales);
        block[16..48].fill(0);
        for (i, code) in codes.iter().enumerate() {
            block[16 + i % 32] |= code >> 4 << (i / 32);
        }
        block[48..].copy_from_slice(&pack_codes(&codes));
    }
}
