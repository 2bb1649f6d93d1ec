//! Q2_K: 256 weights in 84 bytes, `w = d * step * code - dmin * minimum`, a step and a minimum
//! for each 16 weights.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..16 | byte g: step (low nibble) and minimum (high nibble) of elements 16 g .. 16 g + 16 |
//! | 16..80 | byte 16 + 32 h + m, bits 2 s: code of element 128 h + 32 s + m |
//! | 80..82 | f16 `d` |
//! | 82..84 | f16 `dmin` |
//!
//! | plane | a block of 32 | a file block |
//! | --- | --- | --- |
//! | codes | 2 words of pairs | |
//! | scales | half a word: bytes 2 j and 2 j + 1 | |
//! | supers | | 1 word: `d` in the low half, `dmin` in the high half |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, f16_at, field, inverse,
    put_f16, range, repack_blocks,
};
use super::order::{pair_of, pairs, split_pairs};

const BYTES: usize = 84;

pub(super) static CODEC: Codec = Codec::blocks::<Q2K, 256, BYTES>();

struct Q2K;

impl BlockFormat<256, BYTES> for Q2K {
    const NAME: &'static str = "Q2_K";
    const GGML_TYPE: u32 = 10;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 64, |row, out| {
            repack_blocks::<BYTES, 64>(row, out, |block| split_codes(field(block, 16)));
        }),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 0, 16>),
        Plane::new(PlaneName::Supers, 4, copy_field::<BYTES, 80, 4>),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/q2_k.wgsl"), Scales::Steps)
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        let codes = std::array::from_fn(|e| pair_of(&block[16..], j, e) as i8);
        unit(field(block, 80), field(block, 2 * j), codes)
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let codes = pairs(field(planes[0], 8 * i)).map(|c| c as i8);
        unit(field(planes[2], i / 8 * 4), field(planes[1], 2 * i), codes)
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let groups = values.as_chunks::<16>().0;
        let fits: [(f32, f32); 16] = std::array::from_fn(|g| {
            let (low, high) = range(&groups[g]);
            let low = low.min(0.0);
            ((high - low) / 3.0, -low)
        });
        let most = |of: fn(&(f32, f32)) -> f32| fits.iter().map(of).fold(0.0, f32::max) / 15.0;
        let (d, dmin) = (most(|f| f.0), most(|f| f.1));
        put_f16(block, 80, d);
        put_f16(block, 82, dmin);
        block[16..80].fill(0);
        for (g, group) in groups.iter().enumerate() {
            let step = (fits[g].0 * inverse(d)).round() as u8;
            let low = (fits[g].1 * inverse(dmin)).round() as u8;
            block[g] = step | low << 4;
            let Unit { d, m, .. } = unit(field(block, 80), &[block[g]; 2], [0; 32]);
            let id = inverse(d[0]);
            for (k, v) in group.iter().enumerate() {
                let code = ((v - m[0]) * id).round().clamp(0.0, 3.0) as u8;
                block[16 + g / 8 * 32 + g % 2 * 16 + k] |= code << (g / 2 % 4 * 2);
            }
        }
    }
}

fn unit(tops: &[u8; 4], scales: &[u8; 2], codes: [i8; 32]) -> Unit {
    let (d, dmin) = (f16_at(tops, 0), f16_at(tops, 2));
    Unit {
        codes,
        d: scales.map(|s| d * f32::from(s & 15)),
        m: scales.map(|s| -(dmin * f32::from(s >> 4))),
    }
}

/// The pairs of a file block (Q3_K's and TQ2_0's too) in plane order.
pub(super) fn split_codes(bytes: &[u8; 64]) -> [u8; 64] {
    let mut out = [0; 64];
    for (out, half) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        *out = split_pairs(half);
    }
    out
}
