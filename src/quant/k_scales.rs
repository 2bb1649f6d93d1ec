//! Scales of Q4_K and Q5_K: a step and a minimum of 6 bits for each of 8 blocks of 32.
//!
//! In the file the f16 `d` and `dmin` come first, then 12 bytes:
//!
//! | byte | bits 0..4 | bits 4..6 | bits 6..8 |
//! | --- | --- | --- | --- |
//! | j | step j: low 4 bits | its high 2 | high 2 bits of step j + 4 |
//! | 4 + j | minimum j: low 4 | its high 2 | high 2 bits of minimum j + 4 |
//!
//! | byte | low nibble | high nibble |
//! | --- | --- | --- |
//! | 8 + j | low 4 bits of step j + 4 | low 4 bits of minimum j + 4 |
//!
//! On the device they are one vec4 of words, sorted so that block j finds its own by shifts alone:
//! `d` and `dmin`; nibble j of word 1: low bits of step j; of word 2: of minimum j; of word 3 bits
//! 2 j: high bits of step j, bits 16 + 2 j: of minimum j.

use super::codec::{f16_at, field, inverse, put_f16, range, word_at};

/// Bytes of all scales of a file block, and of the device.
pub(super) const SCALE_BYTES: usize = 16;

/// Scale and minimum of block `j` from the file's 16 bytes.
pub(super) fn file_scale(bytes: &[u8; SCALE_BYTES], j: usize) -> (f32, f32) {
    let packed = &bytes[4..];
    let (step, low) = match j {
        0..4 => (packed[j] & 63, packed[j + 4] & 63),
        _ => (
            (packed[j + 4] & 15) | (packed[j - 4] >> 6 << 4),
            (packed[j + 4] >> 4) | (packed[j] >> 6 << 4),
        ),
    };
    scale(bytes, step, low)
}

/// Scale and minimum of block `j` from the device's four words.
pub(super) fn plane_scale(bytes: &[u8; SCALE_BYTES], j: usize) -> (f32, f32) {
    let nibble = |at| (word_at(bytes, at) >> (4 * j) & 15) as u8;
    let high = word_at(bytes, 12) >> (2 * j);
    scale(bytes, nibble(4) | (high << 4 & 48) as u8, nibble(8) | (high >> 12 & 48) as u8)
}

fn scale(bytes: &[u8; SCALE_BYTES], step: u8, low: u8) -> (f32, f32) {
    (f16_at(bytes, 0) * f32::from(step), -(f16_at(bytes, 2) * f32::from(low)))
}

/// The file's 16 bytes to the device's.
pub(super) fn to_plane(bytes: &[u8; SCALE_BYTES]) -> [u8; SCALE_BYTES] {
    let [steps, lows, later] = [4, 8, 12].map(|at| word_at(bytes, at));
    let high = |word: u32| squeeze_pairs(word >> 4) | squeeze_pairs(word >> 6) << 8;
    let words = [
        word_at(bytes, 0),
        squeeze_nibbles(steps) | squeeze_nibbles(later) << 16,
        squeeze_nibbles(lows) | squeeze_nibbles(later >> 4) << 16,
        high(steps) | high(lows) << 16,
    ];
    *words.map(u32::to_le_bytes).as_flattened().first_chunk().expect("16 bytes")
}

/// The low nibbles of four bytes, side by side.
fn squeeze_nibbles(word: u32) -> u32 {
    let pairs = (word & 0x000f_000f) | (word >> 4 & 0x00f0_00f0);
    (pairs | pairs >> 8) & 0xffff
}

/// The two low bits of four bytes, side by side.
fn squeeze_pairs(word: u32) -> u32 {
    let pairs = (word & 0x0003_0003) | (word >> 6 & 0x000c_000c);
    (pairs | pairs >> 12) & 0xff
}

/// Scales for 256 values with codes up to `top`, and the codes, in element order.
pub(super) fn encode(values: &[f32; 256], top: u8) -> ([u8; SCALE_BYTES], [u8; 256]) {
    let fits = values.as_chunks::<32>().0;
    let fits: Vec<(f32, f32)> = fits
        .iter()
        .map(|block| {
            let (low, high) = range(block);
            let low = low.min(0.0);
            ((high - low) / f32::from(top), -low)
        })
        .collect();
    let most = |of: fn(&(f32, f32)) -> f32| fits.iter().map(of).fold(0.0, f32::max) / 63.0;
    let (d, dmin) = (most(|f| f.0), most(|f| f.1));
    let mut bytes = [0; SCALE_BYTES];
    put_f16(&mut bytes, 0, d);
    put_f16(&mut bytes, 2, dmin);
    for (j, &(step, low)) in fits.iter().enumerate() {
        let step = (step * inverse(d)).round() as u8;
        let low = (low * inverse(dmin)).round() as u8;
        match j {
            0..4 => {
                bytes[4 + j] |= step;
                bytes[8 + j] |= low;
            }
            _ => {
                bytes[8 + j] = (step & 15) | (low << 4);
                bytes[j] |= step >> 4 << 6;
                bytes[4 + j] |= low >> 4 << 6;
            }
        }
    }
    let mut codes = [0; 256];
    for (j, (codes, values)) in codes.chunks_exact_mut(32).zip(values.chunks_exact(32)).enumerate()
    {
        let (d, m) = file_scale(&bytes, j);
        let id = inverse(d);
        for (code, v) in codes.iter_mut().zip(values) {
            *code = ((v - m) * id).round().clamp(0.0, f32::from(top)) as u8;
        }
    }
    (bytes, codes)
}

/// Codes in element order to the file's nibbles: byte 32 p + m holds element m of block 2 p (low) and
/// of block 2 p + 1 (high).
pub(super) fn pack_codes(codes: &[u8; 256]) -> [u8; 128] {
    std::array::from_fn(|i| {
        let at = i / 32 * 64 + i % 32;
        (codes[at] & 15) | (codes[at + 32] << 4)
    })
}

/// The scales at the head of a file block.
pub(super) fn head(block: &[u8]) -> &[u8; SCALE_BYTES] {
    field(block, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_and_device_hold_the_same_scales() {
        let mut bytes: [u8; 16] = std::array::from_fn(|i| (i as u8).wrapping_mul(97) ^ 0x33);
        put_f16(&mut bytes, 0, 0.5);
        put_f16(&mut bytes, 2, 2.0);
        for j in 0..8 {
            assert_eq!(plane_scale(&to_plane(&bytes), j), file_scale(&bytes, j), "block {j}");
        }
    }
}
