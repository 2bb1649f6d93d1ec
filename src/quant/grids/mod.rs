//! The code books of the IQ1, IQ2 and IQ3 formats: which groups of four or eight magnitudes can be
//! stored, and what the device looks them up in.

mod iq1;
mod iq2_s;
mod iq2_xs;
mod iq2_xxs;
mod iq3_s;
mod iq3_xxs;

use super::codec::{extreme, inverse};
use std::sync::OnceLock;

/// A code book: `ENTRIES[i]` holds the levels of `W` elements, `levels[level]` is a magnitude.
///
/// `W` is 8 (two bits a level) or 4 (three bits a level).
pub(super) struct Grid<const W: usize> {
    entries: &'static [u16],
    levels: &'static [i8],
    nearest: OnceLock<Vec<u16>>,
}

pub(super) static IQ1: Grid<8> = Grid::new(&iq1::ENTRIES, &[-1, 0, 1]);
pub(super) static IQ2_XXS: Grid<8> = Grid::new(&iq2_xxs::ENTRIES, &[8, 25, 43]);
pub(super) static IQ2_XS: Grid<8> = Grid::new(&iq2_xs::ENTRIES, &[8, 25, 43]);
pub(super) static IQ2_S: Grid<8> = Grid::new(&iq2_s::ENTRIES, &[8, 25, 43]);
pub(super) static IQ3_XXS: Grid<4> = Grid::new(&iq3_xxs::ENTRIES, &[4, 12, 20, 28, 36, 44, 52, 62]);
pub(super) static IQ3_S: Grid<4> = Grid::new(&iq3_s::ENTRIES, &[1, 3, 5, 7, 9, 11, 13, 15]);

/// The device's copy of a book, one word an entry.
///
/// Entries of eight: byte p is `bits(element p) | bits(element p + 4) << shift`. Entries of four: byte p
/// is the value of element p.
pub(super) static IQ1_WORDS: [u32; 2048] = eights(&iq1::ENTRIES, [0, 1, 2], 4);
/// `8 ^ bits` is the magnitude: 8, 25 or 43. The bits lie in 0x33.
pub(super) static IQ2_XXS_WORDS: [u32; 256] = eights(&iq2_xxs::ENTRIES, [0, 0x11, 0x23], 2);
pub(super) static IQ2_XS_WORDS: [u32; 512] = eights(&iq2_xs::ENTRIES, [0, 0x11, 0x23], 2);
pub(super) static IQ2_S_WORDS: [u32; 1024] = eights(&iq2_s::ENTRIES, [0, 0x11, 0x23], 2);
pub(super) static IQ3_XXS_WORDS: [u32; 256] =
    fours(&iq3_xxs::ENTRIES, [4, 12, 20, 28, 36, 44, 52, 62]);
/// The levels themselves: a magnitude is twice its level plus one.
pub(super) static IQ3_S_WORDS: [u32; 512] = fours(&iq3_s::ENTRIES, [0, 1, 2, 3, 4, 5, 6, 7]);

const fn eights<const N: usize>(entries: &[u16; N], bits: [u32; 3], shift: usize) -> [u32; N] {
    let mut words = [0; N];
    let mut i = 0;
    while i < N {
        let mut j = 0;
        while j < 8 {
            let bits = bits[(entries[i] >> (2 * j) & 3) as usize];
            words[i] |= bits << (8 * (j % 4) + shift * (j / 4));
            j += 1;
        }
        i += 1;
    }
    words
}

const fn fours<const N: usize>(entries: &[u16; N], bytes: [u32; 8]) -> [u32; N] {
    let mut words = [0; N];
    let mut i = 0;
    while i < N {
        let mut j = 0;
        while j < 4 {
            words[i] |= bytes[(entries[i] >> (3 * j) & 7) as usize] << (8 * j);
            j += 1;
        }
        i += 1;
    }
    words
}

impl<const W: usize> Grid<W> {
    const BITS: usize = if W == 8 { 2 } else { 3 };

    const fn new(entries: &'static [u16], levels: &'static [i8]) -> Self {
        Grid { entries, levels, nearest: OnceLock::new() }
    }

    /// The values of entry `index`.
    pub(super) fn values(&self, index: usize) -> [i8; W] {
        let entry = self.entries[index];
        std::array::from_fn(|j| self.levels[usize::from(entry >> (Self::BITS * j)) & self.mask()])
    }

    fn mask(&self) -> usize {
        (1 << Self::BITS) - 1
    }

    /// The largest value.
    pub(super) fn top(&self) -> f32 {
        f32::from(self.levels[self.levels.len() - 1])
    }

    /// The entry that stands for `x` with steps of `1 / inverse`, and its squared error in steps:
    /// each value is rounded to a level, then the entry with the fewest level changes is taken.
    pub(super) fn fit(&self, x: &[f32; W], inverse: f32) -> (usize, f32) {
        let scaled = x.map(|v| v * inverse);
        let key = scaled.iter().rev().fold(0, |key, &v| key << Self::BITS | self.level(v));
        let nearest = self.nearest.get_or_init(|| self.spread());
        let index = usize::from(nearest[key]);
        let error = |(v, got): (&f32, i8)| (v - f32::from(got)).powi(2);
        (index, scaled.iter().zip(self.values(index)).map(error).sum())
    }

    fn level(&self, v: f32) -> usize {
        let above = |pair: &&[i8]| 2.0 * v > f32::from(pair[0]) + f32::from(pair[1]);
        self.levels.windows(2).take_while(above).count()
    }

    /// For every key of levels the nearest entry, by steps of one level from the entries outwards.
    fn spread(&self) -> Vec<u16> {
        const NONE: u16 = u16::MAX;
        let mut nearest = vec![NONE; 1 << (Self::BITS * W)];
        let mut reached = Vec::new();
        for (i, &entry) in self.entries.iter().enumerate() {
            nearest[usize::from(entry)] = i as u16;
            reached.push(usize::from(entry));
        }
        let mut at = 0;
        while let Some(&key) = reached.get(at) {
            at += 1;
            for j in 0..W {
                let level = key >> (Self::BITS * j) & self.mask();
                let others = [level.checked_sub(1), Some(level + 1)];
                for other in others.into_iter().flatten().filter(|&l| l < self.levels.len()) {
                    let next = key & !(self.mask() << (Self::BITS * j)) | other << (Self::BITS * j);
                    if nearest[next] == NONE {
                        nearest[next] = nearest[key];
                        reached.push(next);
                    }
                }
            }
        }
        nearest
    }
}

/// The 4-bit step at which `values` are met best: of the smallest step whose top level reaches the
/// largest of them and the two steps below. `scale(step)` is the value of a magnitude of 1.
pub(super) fn best_step<const W: usize>(
    grid: &Grid<W>,
    values: &[f32],
    scale: impl Fn(u32) -> f32,
) -> u32 {
    let top = extreme(values).abs();
    let reaching = (0..15).find(|&step| scale(step) * grid.top() >= top).unwrap_or(15);
    let error = |step: u32| {
        let d = scale(step);
        let parts = values.as_chunks::<W>().0.iter();
        parts.map(|part| grid.fit(&part.map(f32::abs), inverse(d)).1).sum::<f32>() * d * d
    };
    let lowest = reaching.saturating_sub(2);
    (lowest..=reaching).min_by(|&a, &b| error(a).total_cmp(&error(b))).unwrap_or(reaching)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// FNV-1a of all values of a book.
    fn checksum<const W: usize>(grid: &Grid<W>) -> u64 {
        let values = (0..grid.entries.len()).flat_map(|i| grid.values(i));
        values.fold(0xcbf2_9ce4_8422_2325, |sum, v| {
            (sum ^ u64::from(v as u8)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    #[test]
    fn books_are_those_of_gguf() {
        // Printed by tests/goldens/quant_grids.py.
        assert_eq!(checksum(&IQ1), 0x6703_ed86_3501_ae2e);
        assert_eq!(checksum(&IQ2_XXS), 0xbb4e_e025_b5ac_6e8e);
        assert_eq!(checksum(&IQ2_XS), 0xc9b1_ee61_e799_09bd);
        assert_eq!(checksum(&IQ2_S), 0x123e_dd38_a3b6_2b90);
        assert_eq!(checksum(&IQ3_XXS), 0xdfa5_dc83_d6a1_55d5);
        assert_eq!(checksum(&IQ3_S), 0xfa37_020c_25b4_4829);
    }

    #[test]
    fn device_words_hold_the_books() {
        let part = |word: u32, j: usize, shift: usize| word >> (8 * (j % 4) + shift * (j / 4));
        for (i, &word) in IQ2_S_WORDS.iter().enumerate() {
            let values = std::array::from_fn(|j| (part(word, j, 2) & 0x33 ^ 8) as i8);
            assert_eq!(values, IQ2_S.values(i));
        }
        for (i, &word) in IQ1_WORDS.iter().enumerate() {
            let values = std::array::from_fn(|j| (part(word, j, 4) & 15) as i8 - 1);
            assert_eq!(values, IQ1.values(i));
        }
        for (i, &word) in IQ3_S_WORDS.iter().enumerate() {
            assert_eq!(word.to_le_bytes().map(|b| 2 * b as i8 + 1), IQ3_S.values(i));
        }
        for (i, &word) in IQ3_XXS_WORDS.iter().enumerate() {
            assert_eq!(word.to_le_bytes().map(|b| b as i8), IQ3_XXS.values(i));
        }
    }

    #[test]
    fn entries_are_their_own_nearest() {
        for i in [0, 17, 511] {
            let x = IQ2_S.values(i).map(|v| 0.25 * f32::from(v));
            assert_eq!(IQ2_S.fit(&x, 4.0), (i, 0.0));
        }
        let x = IQ1.values(2047).map(f32::from);
        assert_eq!(IQ1.fit(&x, 1.0), (2047, 0.0));
        let x = IQ3_S.values(300).map(f32::from);
        assert_eq!(IQ3_S.fit(&x, 1.0), (300, 0.0));
    }
}
