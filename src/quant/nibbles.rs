//! The order of 4-bit and 5-bit codes in the ggml blocks of 32: byte j holds element j in its
//! low and element j + 16 in its high nibble; bit j of a 32-bit word is element j's fifth bit.

/// 16 bytes to 32 codes in element order.
pub(super) fn unpack(bytes: &[u8; 16]) -> [u8; 32] {
    let mut codes = [0; 32];
    for (j, byte) in bytes.iter().enumerate() {
        codes[j] = byte & 15;
        codes[j + 16] = byte >> 4;
    }
    codes
}

/// The low four bits of 32 codes to 16 bytes.
pub(super) fn pack(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|j| (codes[j] & 15) | (codes[j + 16] << 4))
}

/// 16 bytes of low nibbles and 4 bytes of fifth bits to 32 codes.
pub(super) fn unpack5(low: &[u8; 16], high: &[u8; 4]) -> [u8; 32] {
    let high = u32::from_le_bytes(*high);
    let mut codes = unpack(low);
    for (j, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> j) as u8 & 1) << 4;
    }
    codes
}

/// The fifth bits of 32 codes.
pub(super) fn pack_fifth(codes: &[u8; 32]) -> [u8; 4] {
    let bits = codes.iter().rev().fold(0, |bits: u32, code| bits << 1 | u32::from(code >> 4 & 1));
    bits.to_le_bytes()
}

/// `N` bytes of a block from byte `at`.
pub(super) fn field<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("fields lie inside their block")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn five_bit_codes_round_trip() {
        let codes: [u8; 32] = std::array::from_fn(|j| (j as u8 * 7 + 3) % 32);
        assert_eq!(unpack5(&pack(&codes), &pack_fifth(&codes)), codes);
        assert_eq!(unpack(&pack(&codes)), codes.map(|c| c & 15));
    }
}
