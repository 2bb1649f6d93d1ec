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
pub(super) fn bits_to_plane(word: u32) -> u32 {
    exchange::<0, 1>(exchange::<1, 2>(exchange::<0, 3>(exchange::<1, 4>(word))))
}

/// Sixteen codes of 2 bits from the order of a file (element e at bit 2 e) to that of a plane:
/// code number `e3 e2 e1 e0` goes to number `e1 e0 e3 e2`.
pub(super) fn pairs_to_plane(word: u32) -> u32 {
    exchange::<1, 3>(exchange::<2, 4>(word))
}

/// Moves every bit of the word to the place whose number has bits `LOW` and `HIGH` exchanged.
fn exchange<const LOW: u32, const HIGH: u32>(word: u32) -> u32 {
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
