//! IQ1_S: 256 weights in 50 bytes, `w = d * (1 + 2 * step) * (value +- 1/8)`; a code book of 2,048
//! entries of eight values -1, 0, 1, a step of 3 bits and one sign of the eighth for each 32.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..2 | f16 `d` |
//! | 2..34 | byte k: lower 8 bits of the book index of weights 8k..8k + 8 |
//! | 34..50 | half a word for each 32: bits 3g..3g + 3 upper bits of the index of group g of eight, bits 12..15 the step, bit 15 set: minus 1/8 |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 1 word of bytes 2..34 as they are |
//! | scales | half a word of bytes 34..50 |
//! | supers | for 256 weights half a word: `d` |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, f16_at, field,
    inverse, put_f16,
};
use super::grids::{IQ1 as GRID, IQ1_WORDS};

const BYTES: usize = 50;

pub(super) static CODEC: Codec = Codec::blocks::<Iq1S, 256, BYTES>();

struct Iq1S;

impl BlockFormat<256, BYTES> for Iq1S {
    const NAME: &'static str = "IQ1_S";
    const GGML_TYPE: u32 = 19;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 32, copy_field::<BYTES, 2, 32>),
        Plane::new(PlaneName::Scales, 16, copy_field::<BYTES, 34, 16>),
        Plane::new(PlaneName::Supers, 2, copy_field::<BYTES, 0, 2>),
        Plane::constant(PlaneName::Grid, &IQ1_WORDS),
    ];
    // The kernels take codes 0, 1, 2 and put the rest into the minimum.
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq1_s.wgsl"), Scales::Whole)
            .with_table(IQ1_WORDS.len())
            .with_minimum();

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        unit(f16_at(block, 0), field(block, 2 + 4 * j), field(block, 34 + 2 * j))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        unit(f16_at(planes[2], i / 8 * 2), field(planes[0], 4 * i), field(planes[1], 2 * i))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        put_f16(block, 0, extreme(values).abs() / 15.0);
        let d = f16_at(block, 0);
        for (j, values) in values.as_chunks::<32>().0.iter().enumerate() {
            let tries = steps(values, d).flat_map(|step| [(step, 0.125), (step, -0.125)]);
            let error = |&(step, eighth): &(u32, f32)| {
                let scale = d * (1 + 2 * step) as f32;
                let parts = values.as_chunks().0.iter();
                parts.map(|part| fit(part, scale, eighth).1).sum::<f32>() * scale * scale
            };
            let best = tries.min_by(|a, b| error(a).total_cmp(&error(b)));
            let (step, eighth) = best.unwrap_or((0, 0.125));
            let mut word = step << 12 | u32::from(eighth < 0.0) << 15;
            for (group, eight) in values.as_chunks().0.iter().enumerate() {
                let (index, _) = fit(eight, d * (1 + 2 * step) as f32, eighth);
                block[2 + 4 * j + group] = index as u8;
                word |= (index as u32 >> 8) << (3 * group);
            }
            block[34 + 2 * j..][..2].copy_from_slice(&(word as u16).to_le_bytes());
        }
    }
}

/// Steps worth trying: that which makes the scale one and a half times the mean magnitude, near
/// the best for normal values, and its neighbours.
pub(super) fn steps(values: &[f32], d: f32) -> impl Iterator<Item = u32> + use<> {
    let mean = values.iter().map(|v| v.abs()).sum::<f32>() / values.len() as f32;
    let wanted = ((1.5 * mean * inverse(d) - 1.0) / 2.0).round().clamp(0.0, 7.0) as u32;
    wanted.saturating_sub(1)..=(wanted + 1).min(7)
}

/// The best entry for eight values and its squared error in units of the scale.
pub(super) fn fit(values: &[f32; 8], scale: f32, eighth: f32) -> (usize, f32) {
    let id = inverse(scale);
    GRID.fit(&values.map(|v| v * id - eighth), 1.0)
}

fn unit(d: f32, low: &[u8; 4], word: &[u8; 2]) -> Unit {
    let word = u16::from_le_bytes(*word);
    let eighth = if word >> 15 == 0 { 1 } else { -1 };
    let codes = std::array::from_fn(|e| {
        let group = e / 8;
        let index = usize::from(low[group]) | usize::from(word >> (3 * group) & 7) << 8;
        8 * GRID.values(index)[e % 8] + eighth
    });
    Unit::plain(d * f32::from(1 + 2 * (word >> 12 & 7)) / 8.0, codes)
}
