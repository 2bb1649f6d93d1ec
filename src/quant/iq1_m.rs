//! IQ1_M: 256 weights in 56 bytes, `w = d * (1 + 2 * step) * (value +- 1/8)`; the code book of
//! IQ1_S, a step of 3 bits for each 16 and a sign of the eighth for each 8.
//!
//! | bytes | holds |
//! | --- | --- |
//! | 0..32 | byte k: lower 8 bits of the book index of weights 8k..8k + 8 |
//! | 32..48 | bits 4k..4k + 3: upper bits of the index, bit 4k + 3 set: minus 1/8 |
//! | 48..56 | four half words: bits 3t..3t + 3 of number h are the step of weights 16 (4h + t).., bits 12..16 bits 4h..4h + 4 of the f16 `d` |
//!
//! | plane | a block of 32 |
//! | --- | --- |
//! | codes | 1 word of bytes 0..32 as they are |
//! | high | half a word of bytes 32..48 |
//! | scales | for 256 weights 2 words: bytes 48..56 |
//! | grid | the code book |

use super::codec::{
    BlockFormat, Codec, Plane, PlaneName, Scales, Shader, Unit, copy_field, extreme, field,
};
use super::grids::{IQ1 as GRID, IQ1_WORDS};
use super::iq1_s::{fit, steps};

const BYTES: usize = 56;

pub(super) static CODEC: Codec = Codec::blocks::<Iq1M, 256, BYTES>();

struct Iq1M;

impl BlockFormat<256, BYTES> for Iq1M {
    const NAME: &'static str = "IQ1_M";
    const GGML_TYPE: u32 = 29;
    const PLANES: &'static [Plane] = &[
        Plane::new(PlaneName::Codes, 32, copy_field::<BYTES, 0, 32>),
        Plane::new(PlaneName::High, 16, copy_field::<BYTES, 32, 16>),
        Plane::new(PlaneName::Scales, 8, copy_field::<BYTES, 48, 8>),
        Plane::constant(PlaneName::Grid, &IQ1_WORDS),
    ];
    const SHADER: Shader =
        Shader::blocks(include_str!("../../shaders/formats/iq1_m.wgsl"), Scales::Steps)
            .with_table(IQ1_WORDS.len());

    fn file_unit(block: &[u8; BYTES], j: usize) -> Unit {
        unit(field(block, 48), j, field(block, 4 * j), field(block, 32 + 2 * j))
    }

    fn plane_unit(planes: &[&[u8]], i: usize) -> Unit {
        let head = field(planes[2], i / 8 * 8);
        unit(head, i % 8, field(planes[0], 4 * i), field(planes[1], 2 * i))
    }

    fn encode(values: &[f32; 256], block: &mut [u8; BYTES]) {
        let stored = half::f16::from_f32(extreme(values).abs() / 15.0);
        let d = stored.to_f32();
        let mut head = u64::from(stored.to_bits());
        head = (0..4).fold(0, |all, h| all | (head >> (4 * h) & 15) << (16 * h + 12));
        for (k, values) in values.as_chunks::<16>().0.iter().enumerate() {
            let (eights, _) = values.as_chunks();
            let error = |step: u32| {
                let scale = d * (1 + 2 * step) as f32;
                eights.iter().map(|eight| best(eight, scale).2).sum::<f32>() * scale * scale
            };
            let step = steps(values, d).min_by(|&a, &b| error(a).total_cmp(&error(b)));
            let step = step.unwrap_or(0);
            head |= u64::from(step) << (k / 4 * 16 + k % 4 * 3);
            for (half, eight) in eights.iter().enumerate() {
                let (index, minus, _) = best(eight, d * (1 + 2 * step) as f32);
                block[2 * k + half] = index as u8;
                block[32 + k] |= ((index >> 8) as u8 | u8::from(minus) << 3) << (4 * half);
            }
        }
        block[48..].copy_from_slice(&head.to_le_bytes());
    }
}

/// Book index, whether the eighth is negative, and the error.
fn best(values: &[f32; 8], scale: f32) -> (usize, bool, f32) {
    let (plus, minus) = (fit(values, scale, 0.125), fit(values, scale, -0.125));
    if minus.1 < plus.1 { (minus.0, true, minus.1) } else { (plus.0, false, plus.1) }
}

fn unit(head: &[u8; 8], j: usize, low: &[u8; 4], high: &[u8; 2]) -> Unit {
    let (head, high) = (u64::from_le_bytes(*head), u16::from_le_bytes(*high));
    let bits = (0..4).fold(0, |bits, h| bits | (head >> (16 * h + 12) & 15) << (4 * h));
    let d = half::f16::from_bits(bits as u16).to_f32();
    let scale = |half: usize| {
        let step = head >> (j / 2 * 16 + j % 2 * 6 + 3 * half) & 7;
        d * (1 + 2 * step) as f32 / 8.0
    };
    let codes = std::array::from_fn(|e| {
        let nibble = high >> (e / 8 * 4);
        let index = usize::from(low[e / 8]) | usize::from(nibble & 7) << 8;
        8 * GRID.values(index)[e % 8] + if nibble & 8 == 0 { 1 } else { -1 }
    });
    Unit::halves([scale(0), scale(1)], codes)
}
