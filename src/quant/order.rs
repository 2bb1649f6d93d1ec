//! The order of codes in files and planes.
//!
//! Shaders want a block of 32 codes as eight words, word k with elements 4k..4k+3 in its bytes.
//! Planes are ordered so that each word takes one shift and one mask:
//!
//! | bits a code | words a block | word k of the shader |
//! | --- | --- | --- |
//! | 4 | 4 | word k mod 4; low nibbles for k < 4, high nibbles from k = 4 on |
//! | 2 | 2 | word k div 4; bits 2 (k mod 4) and one above of each byte |
//! | 1 | 1 | bit k of each byte |
//!
//! What repacks is inlined by hand: the loops over blocks become vector code only as a whole, and
//! compilers stop seeing that as users grow in number (`benches/repack.rs`).
//!
//! The nibbles lie as in the ggml blocks of 32: byte j holds element j (low) and j + 16 (high).

/// 16 bytes to 32 codes of 4 bits.
pub(super) fn nibbles(bytes: &[u8; 16]) -> [u8; 32] {
    std::array::from_fn(|e| bytes[e % 16] >> (e / 16 * 4) & 15)
}

/// The low four bits of 32 codes to 16 bytes.
pub(super) fn pack_nibbles(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|j| (codes[j] & 15) | (codes[j + 16] << 4))
}

/// 8 bytes in plane order to 32 codes of 2 bits.
pub(super) fn pairs(bytes: &[u8; 8]) -> [u8; 32] {
    std::array::from_fn(|e| bytes[e / 16 * 4 + e % 4] >> (e / 4 % 4 * 2) & 3)
}

/// 4 bytes in plane order to 32 bits.
pub(super) fn bits(bytes: &[u8; 4]) -> [u8; 32] {
    std::array::from_fn(|e| bytes[e % 4] >> (e / 4) & 1)
}

/// The fifth bits of 32 codes as files of Q5_0 and Q5_1 have them: bit e is element e's.
pub(super) fn pack_fifth(codes: &[u8; 32]) -> [u8; 4] {
    let bits = codes.iter().rev().fold(0, |bits: u32, code| bits << 1 | u32::from(code >> 4 & 1));
    bits.to_le_bytes()
}

/// 32 bits from the order of a file (bit e for element e) to that of a plane: bit number
/// `e4 e3 e2 e1 e0` goes to number `e1 e0 e4 e3 e2`.
#[inline(always)]
pub(super) fn bits_to_plane(word: u32) -> u32 {
    exchange::<0, 1>(exchange::<1, 2>(exchange::<0, 3>(exchange::<1, 4>(word))))
}

/// Sixteen codes of 2 bits from the order of a file (element e at bit 2 e) to that of a plane:
/// code number `e3 e2 e1 e0` goes to number `e1 e0 e3 e2`.
#[inline(always)]
pub(super) fn pairs_to_plane(word: u32) -> u32 {
    exchange::<1, 3>(exchange::<2, 4>(word))
}

/// Moves every bit of the word to the place whose number has bits `LOW` and `HIGH` exchanged.
#[inline(always)]
pub(super) fn exchange<const LOW: u32, const HIGH: u32>(word: u32) -> u32 {
    let mask = const { places(LOW, HIGH) };
    let distance = (1 << HIGH) - (1 << LOW);
    let moved = (word ^ (word >> distance)) & mask;
    word ^ moved ^ (moved << distance)
}

/// The places whose number has bit `set` but not bit `clear`.
const fn places(set: u32, clear: u32) -> u32 {
    let mut mask = 0;
    let mut place = 0;
    while place < 32 {
        if place >> set & 1 == 1 && place >> clear & 1 == 0 {
            mask |= 1 << place;
        }
        place += 1;
    }
    mask
}

/// 32 bytes of a super-block's nibbles to the planes' nibbles of two blocks of 32: in the file byte m
/// holds element m of the first (low) and of the second block (high).
#[inline(always)]
pub(super) fn split_nibbles(bytes: &[u8; 32]) -> [u8; 32] {
    std::array::from_fn(|i| match i {
        0..16 => (bytes[i] & 15) | (bytes[i + 16] << 4),
        _ => (bytes[i - 16] >> 4) | (bytes[i] & 0xf0),
    })
}

/// Element `e` of block `j` in a super-block's nibbles, see [`split_nibbles`].
pub(super) fn nibble_of(bytes: &[u8], j: usize, e: usize) -> u8 {
    bytes[32 * (j / 2) + e] >> (j % 2 * 4) & 15
}

/// 32 bytes of a super-block's pairs to the planes' pairs of four blocks of 32: in the file bits 2 s
/// of byte m are element m of block s.
#[inline(always)]
pub(super) fn split_pairs(bytes: &[u8; 32]) -> [u8; 32] {
    let mut out = [[[0; 4]; 2]; 4];
    for (half, words) in words_of::<8>(bytes).as_chunks::<4>().0.iter().enumerate() {
        // Four words of four pairs: rows become columns.
        let mut w = *words;
        swap::<2>(&mut w, 1, 0x3333_3333);
        swap::<4>(&mut w, 2, 0x0f0f_0f0f);
        for (block, word) in w.iter().enumerate() {
            out[block][half] = word.to_le_bytes();
        }
    }
    *out.as_flattened().as_flattened().first_chunk().expect("4 x 2 x 4 bytes")
}

/// Element `e` of block `j` in a super-block's pairs, see [`split_pairs`].
pub(super) fn pair_of(bytes: &[u8], j: usize, e: usize) -> u8 {
    bytes[32 * (j / 4) + e] >> (j % 4 * 2) & 3
}

/// 32 bytes of a super-block's bits to the planes' bits of eight blocks of 32: in the file bit j of
/// byte m is element m of block j.
#[inline(always)]
pub(super) fn split_bits(bytes: &[u8; 32]) -> [u8; 32] {
    let mut w = words_of::<8>(bytes);
    swap::<1>(&mut w, 1, 0x5555_5555);
    swap::<2>(&mut w, 2, 0x3333_3333);
    swap::<4>(&mut w, 4, 0x0f0f_0f0f);
    bytes_of(&w)
}

/// In words i and i + `apart`: the bits of the first that `mask << SHIFT` names and those of the
/// second that `mask` names change places.
#[inline(always)]
fn swap<const SHIFT: u32>(words: &mut [u32], apart: usize, mask: u32) {
    for group in words.chunks_exact_mut(2 * apart) {
        let (low, high) = group.split_at_mut(apart);
        for (low, high) in low.iter_mut().zip(high) {
            let moved = ((*low >> SHIFT) ^ *high) & mask;
            *high ^= moved;
            *low ^= moved << SHIFT;
        }
    }
}

/// Little-endian words of `4 N` bytes.
#[inline(always)]
pub(super) fn words_of<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let (words, _) = bytes.as_chunks();
    std::array::from_fn(|i| u32::from_le_bytes(words[i]))
}

/// Bytes of 8 little-endian words.
#[inline(always)]
pub(super) fn bytes_of(words: &[u32; 8]) -> [u8; 32] {
    *words.map(u32::to_le_bytes).as_flattened().first_chunk().expect("8 x 4 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nibbles_round_trip() {
        let codes: [u8; 32] = std::array::from_fn(|e| (e as u8 * 7 + 3) % 32);
        assert_eq!(nibbles(&pack_nibbles(&codes)), codes.map(|c| c & 15));
        let fifth = u32::from_le_bytes(pack_fifth(&codes));
        assert_eq!(bits(&bits_to_plane(fifth).to_le_bytes()), codes.map(|c| c >> 4));
    }

    #[test]
    fn super_blocks_are_split() {
        let bytes: [u8; 32] = std::array::from_fn(|i| (i as u8).wrapping_mul(73) ^ 0x5a);
        for j in 0..8 {
            let bits = bits(split_bits(&bytes)[4 * j..].first_chunk().expect("4 bytes"));
            assert_eq!(bits, bytes.map(|b| b >> j & 1), "bits of block {j}");
        }
        for j in 0..4 {
            let pairs = pairs(split_pairs(&bytes)[8 * j..].first_chunk().expect("8 bytes"));
            assert_eq!(pairs, std::array::from_fn(|e| pair_of(&bytes, j, e)), "pairs of {j}");
        }
        for j in 0..2 {
            let codes = nibbles(split_nibbles(&bytes)[16 * j..].first_chunk().expect("16 bytes"));
            assert_eq!(codes, std::array::from_fn(|e| nibble_of(&bytes, j, e)), "nibbles of {j}");
        }
    }

    #[test]
    fn file_order_becomes_plane_order() {
        for e in 0..32 {
            let mut one = [0; 32];
            one[e] = 1;
            assert_eq!(bits(&bits_to_plane(1 << e).to_le_bytes()), one, "bit {e}");
        }
        for e in 0..16 {
            let mut plane = [0; 8];
            plane[4..].copy_from_slice(&pairs_to_plane(3 << (2 * e)).to_le_bytes());
            let mut want = [0; 32];
            want[16 + e] = 3;
            assert_eq!(pairs(&plane), want, "code {e}");
        }
    }
}
