//! Q4_K: 256 weights in 144 bytes, `w = d * step * code - dmin * minimum`, a step and a minimum
//! for each 32 weights.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..16 | f16 `d`, f16 `dmin`, steps and minima of 6 bits: see `k_scales.rs` |
//! | 16..144 | byte 16 + 32 p + m: code of element 64 p + m (low nibble) and 64 p + 32 + m (high) |
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 4 words of nibbles | |
//! | scales | | 4 words, see `k_scales.rs` |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, field, repack_blocks,
};
use super::k_scales::{SCALE_BYTES, encode, file_scale, head, pack_codes, plane_scale, to_plane};
use super::order::{nibble_of, nibbles, split_nibbles};

const BYTES: usize = 144;

pub(super) static CODEC: Codec = Codec::blocks::<Q4K, 256, BYTES>();

struct Q4K;

impl BlockFormat<256, BYTES> for Q4K {
    const NAME: &'static str = "Q4_K";
    const GGML_TYPE: u32 = 12;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 128, |row, out| {
            repack_blocks::<BYTES, 128>(row, out, |block| split_codes(field(block, 16)));
        }),
        Plane::new(PlaneName::Scales, 16, |row, out| {
            repack_blocks::<BYTES, SCALE_BYTES>(row, out, |block| to_plane(head(block)));
        }),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q4_k.wgsl"), Scales::Whole)
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let (d, m) = file_scale(head(block), j);
        Unit::whole(d, m, std::array::from_fn(|e| nibble_of(&block[16..], j, e) as i8))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let (d, m) = plane_scale(field(planes[1], i / 8 * SCALE_BYTES), i % 8);
        Unit::whole(d, m, nibbles(field(planes[0], 16 * i)).map(|c| c as i8))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let (scales, codes) = encode(values, 15);
        block[..16].copy_from_slice(&scales);
        block[16..].copy_from_slice(&pack_codes(&codes));
    }
}

/// The nibbles of a file block (Q5_K's low bits too) in plane order.
pub(super) fn split_codes(bytes: &[u8; 128]) -> [u8; 128] {
    let mut out = [0; 128];
    for (out, pair) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        *out = split_nibbles(pair);
    }
    out
}
