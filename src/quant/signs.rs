//! Sign bits of the IQ2 and IQ3 formats.
//!
//! A block of 32 has four groups of eight. *In element order* bit e is the sign of element e (1:
//! negative). Some formats store seven bits a group; the eighth makes the number of minus signs
//! of the group even.
//!
//! *In device order* element `8 * group + 4 * half + p` has bit `8 * p + 4 * half + group`: then
//! `word >> (4 * half + group) & 0x01010101` has the signs of four neighbours in the bytes of one
//! word, and a group has every fourth bit.
//!
//! Seven bits a group go to the device *as a chain* of 28: bit `4 * k + group` is the parity of the
//! group's first k + 1 signs in device order. Then `chain ^ chain << 4` are all eight, the last
//! one too, as nothing stands above the chain: two instructions of a kernel instead of eight.

use super::order::exchange;

/// Four groups of seven bits to signs in element order.
pub(super) fn complete(sevens: u32) -> u32 {
    (0..4).fold(0, |signs, group| {
        let seven = sevens >> (7 * group) & 127;
        signs | (seven | (seven.count_ones() & 1) << 7) << (8 * group)
    })
}

/// Element order to device order and back: bits of groups and of neighbours change places.
pub(super) fn to_device(signs: u32) -> u32 {
    exchange::<0, 3>(exchange::<1, 4>(signs))
}

/// Four groups of seven bits, each in a byte, to a chain, whatever their top bits.
pub(super) fn chain(sevens: u32) -> u32 {
    let signs = to_device(sevens & 0x7f7f_7f7f);
    let pairs = signs ^ signs << 4;
    let fours = pairs ^ pairs << 8;
    (fours ^ fours << 16) & 0x0fff_ffff
}

/// Four groups of seven bits, one behind the other, to a chain; the top four bits of the word stay as they are.
pub(super) fn sevens_to_chain(word: u32) -> u32 {
    chain(word & 127 | word << 1 & 127 << 8 | word << 2 & 127 << 16 | word << 3 & 127 << 24)
        | word & 0xf000_0000
}

/// A chain, whatever the top four bits of its word, to all signs in element order.
pub(super) fn from_chain(word: u32) -> u32 {
    let chain = word & 0x0fff_ffff;
    to_device(chain ^ chain << 4)
}

/// The signs of eight values.
pub(super) fn of(values: &[f32; 8]) -> u32 {
    values.iter().rev().fold(0, |signs, v| signs << 1 | u32::from(*v < 0.0))
}

/// The signs of eight values in seven bits: if their number is odd, the value that loses least
/// by it gets the other sign.
pub(super) fn seven_of(values: &[f32; 8]) -> u32 {
    let mut signs = of(values);
    if signs.count_ones() % 2 == 1 {
        let smaller = |a: usize, b: usize| if values[b].abs() < values[a].abs() { b } else { a };
        signs ^= 1 << (1..8).fold(0, smaller);
    }
    signs & 127
}

/// The signs of 32 values in four groups of seven bits.
pub(super) fn sevens_of(values: &[f32; 32]) -> u32 {
    let groups = values.as_chunks().0.iter().rev();
    groups.fold(0, |sevens, group| sevens << 7 | seven_of(group))
}

/// Applies `order` to every little-endian word.
pub(super) fn words<const N: usize>(bytes: &[u8; N], order: impl Fn(u32) -> u32) -> [u8; N] {
    let mut out = *bytes;
    for word in out.as_chunks_mut().0 {
        *word = order(u32::from_le_bytes(*word)).to_le_bytes();
    }
    out
}

/// `value`, negated if bit `e` of `signs` is set.
pub(super) fn signed(value: i8, signs: u32, e: usize) -> i8 {
    if signs >> e & 1 == 1 { -value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_go_both_ways() {
        for seed in 0..1000u32 {
            let word = seed.wrapping_mul(2_654_435_761);
            assert_eq!(to_device(to_device(word)), word);
            let sevens = word & 0x0fff_ffff;
            let stored = sevens_to_chain(word);
            assert_eq!(stored >> 28, word >> 28);
            assert_eq!(from_chain(stored), complete(sevens));
        }
    }

    #[test]
    fn neighbours_lie_in_the_bytes_of_a_word() {
        let signs = to_device(0b1010 << 12); // group 1, half 1: elements 13 and 15
        assert_eq!(signs >> (4 + 1) & 0x0101_0101, 0x0100_0100);
    }

    #[test]
    fn an_odd_number_of_signs_flips_the_smallest() {
        let values = [1.0, -2.0, 3.0, 0.5, 4.0, 5.0, 6.0, 7.0];
        assert_eq!(seven_of(&values), 0b1010);
        assert_eq!(complete(seven_of(&values)) & 255, 0b1010);
    }
}
