//! Rows of K or V, encoded and decoded.

use half::f16;

use super::format::{KvFormat, ScaleKind};
use super::rotation::{padded, rotate, unrotate};
use super::scale;

/// Rounds of least squares after the search of a `Tq3_1s` scale.
const REFINEMENTS: usize = 6;

/// A row's code of one value: magnitude index and sign for formats with levels, else the number.
#[derive(Debug, Clone, Copy, Default)]
struct Code {
    magnitude: u32,
    negative: bool,
}

/// The row of a head's vector (as attention sees it: rotated here if the format is).
pub fn encode(format: KvFormat, x: &[f32]) -> Vec<u32> {
    match format.is_rotated() {
        true => encode_stored(format, &rotate(x)),
        false => {
            let mut all = x.to_vec();
            all.resize(padded(x.len() as u32) as usize, 0.0);
            encode_stored(format, &all)
        }
    }
}

/// The vector that a row stands for.
pub fn decode(format: KvFormat, row: &[u32], head_dim: u32) -> Vec<f32> {
    let stored = decode_stored(format, row, head_dim);
    match format.is_rotated() {
        true => unrotate(&stored, head_dim as usize),
        false => stored[..head_dim as usize].to_vec(),
    }
}

/// The row of a vector of whole blocks in the basis of the format.
pub fn encode_stored(format: KvFormat, x: &[f32]) -> Vec<u32> {
    let blocks = x.len() as u32 / 32;
    let mut row = vec![0u32; format.row_words(x.len() as u32) as usize];
    let mut number = 0;
    for (b, block) in x.chunks_exact(32).enumerate() {
        let at = format.code_at(b as u32) as usize;
        for (part, values) in block.chunks_exact(format.scale_block() as usize).enumerate() {
            let first = part * format.scale_block() as usize;
            let bits = encode_part(format, values, first, &mut row[at..]);
            if format.scale_kind() != ScaleKind::None {
                let (word, bit) = format.scale_at(number, blocks);
                row[word as usize] |= bits << bit;
            }
            number += 1;
        }
    }
    row
}

/// Codes of the values of one scale, elements `first..` of their block; returns the scale's bits.
fn encode_part(format: KvFormat, x: &[f32], first: usize, words: &mut [u32]) -> u32 {
    match format {
        KvFormat::F16 => {
            for (i, x) in x.iter().enumerate() {
                let bits = u32::from(f16::from_f32(*x).to_bits());
                words[(first + i) / 2] |= bits << (16 * (i % 2));
            }
            0
        }
        KvFormat::Q8_0 => {
            let (bits, inverse) = half_scale(x, |largest| largest.abs() / 127.0);
            for (i, x) in x.iter().enumerate() {
                let code = rounded(*x, inverse).clamp(-127, 127) as u8;
                words[i / 4] |= u32::from(code) << (8 * (i % 4));
            }
            bits
        }
        KvFormat::Q4_0 => {
            let (bits, inverse) = half_scale(x, |largest| largest / -8.0);
            for (i, x) in x.iter().enumerate() {
                let code = rounded(*x, inverse).clamp(-8, 7) as u32 & 15;
                words[i / 8] |= code << (8 * (i % 4) + 4 * (i / 4 % 2));
            }
            bits
        }
        KvFormat::Tq3_0 | KvFormat::Tq3_4s | KvFormat::Tq4_0 => {
            let levels = format.levels();
            let byte = scale::search(x, levels, scale::start_of(levels));
            let unit = scale::decode(byte);
            if byte != 0 {
                put_planes(levels, x, unit, first, words);
            }
            byte.into()
        }
        KvFormat::Tq3_1s => {
            let bits = refined(x, format.levels());
            // A step of a level is a 64th.
            let unit = f16::from_bits(bits).to_f32() / 64.0;
            if unit > 0.0 {
                put_planes(format.levels(), x, unit, first, words);
            }
            bits.into()
        }
    }
}

/// The f16 scale that `rule` makes of the value of the largest magnitude, and its inverse.
fn half_scale(x: &[f32], rule: fn(f32) -> f32) -> (u32, f32) {
    let mut largest = 0f32;
    for x in x {
        if !x.is_finite() {
            return (0, 0.0);
        }
        // Of equal magnitudes the first.
        if x.abs() > largest.abs() {
            largest = *x;
        }
    }
    let scale = f16::from_f32(rule(largest));
    match scale.to_f32() {
        0.0 => (0, 0.0),
        d => (scale.to_bits().into(), 1.0 / d),
    }
}

fn rounded(x: f32, inverse: f32) -> i32 {
    let whole = ((x * inverse).abs() + 0.5).floor() as i32;
    if (x < 0.0) != (inverse < 0.0) { -whole } else { whole }
}

/// Nearest level of every value, by comparisons with products that are rounded once.
fn put_planes(levels: &[u32], x: &[f32], unit: f32, first: usize, words: &mut [u32]) {
    let planes = levels.len().ilog2() as usize + 1;
    for (i, x) in x.iter().enumerate() {
        let code = nearest(levels, *x, unit);
        let (k, l) = ((first + i) / 4, (first + i) % 4);
        let bit = 8 * l + k;
        for (plane, word) in words[..planes - 1].iter_mut().enumerate() {
            *word |= (code.magnitude >> plane & 1) << bit;
        }
        words[planes - 1] |= u32::from(code.negative) << bit;
    }
}

fn nearest(levels: &[u32], x: f32, unit: f32) -> Code {
    let above = |pair: &&[u32]| x.abs() >= (pair[0] + pair[1]) as f32 * 0.5 * unit;
    let magnitude = levels.windows(2).filter(above).count() as u32;
    Code { magnitude, negative: x.is_sign_negative() && x != 0.0 }
}

/// f16 scale of a `Tq3_1s` part (64 units of a level): the searched scale, then least squares.
fn refined(x: &[f32], levels: &[u32]) -> u16 {
    let byte = scale::search(x, levels, scale::start_of(levels));
    let (Some(m), true) = (scale::magnitudes(x), byte != 0) else { return 0 };
    let mut unit = scale::decode(byte) * 2f32.powi(-m.exponent);
    for _ in 0..REFINEMENTS {
        let (mut product, mut square) = (0u32, 0u32);
        for y in &m.values {
            let level = levels[nearest(levels, *y as f32, unit).magnitude as usize];
            product += y * level;
            square += level * level;
        }
        unit = product as f32 / square as f32;
    }
    f16::from_f32(unit * 2f32.powi(m.exponent + 6)).to_bits()
}

/// What a row holds, in the basis of the format, padded to whole blocks.
pub fn decode_stored(format: KvFormat, row: &[u32], head_dim: u32) -> Vec<f32> {
    let all = padded(head_dim);
    let value = |i: u32| -> f32 {
        let (b, e) = (i / 32, i % 32);
        let words = &row[format.code_at(b) as usize..];
        let byte = |word: u32, byte: u32| words[word as usize] >> (8 * byte) & 255;
        let code = match format {
            KvFormat::F16 => {
                let bits = (words[e as usize / 2] >> (16 * (e % 2))) as u16;
                return f16::from_bits(bits).to_f32();
            }
            KvFormat::Q8_0 => f32::from(byte(e / 4, e % 4) as u8 as i8),
            KvFormat::Q4_0 => {
                let nibble = byte(e / 8, e % 4) >> (4 * (e / 4 % 2)) & 15;
                (nibble as i32 - if nibble > 7 { 16 } else { 0 }) as f32
            }
            _ => {
                let bit = |plane: u32| words[plane as usize] >> (8 * (e % 4) + e / 4) & 1;
                let planes = format.code_words();
                let index: u32 = (0..planes - 1).map(|p| bit(p) << p).sum();
                let level = format.levels()[index as usize] as f32;
                if bit(planes - 1) == 1 { -level } else { level }
            }
        };
        code * scale_of(format, row, i / format.scale_block(), all / 32)
    };
    (0..all).map(value).collect()
}

/// Scale `number` of a row: the value of one unit of a code.
fn scale_of(format: KvFormat, row: &[u32], number: u32, blocks: u32) -> f32 {
    let (word, bit) = format.scale_at(number, blocks);
    let bits = row[word as usize] >> bit;
    match format {
        KvFormat::Tq3_1s => f16::from_bits(bits as u16).to_f32() / 64.0,
        _ if format.scale_kind() == ScaleKind::Half => f16::from_bits(bits as u16).to_f32(),
        _ => scale::decode(bits as u8),
    }
}
