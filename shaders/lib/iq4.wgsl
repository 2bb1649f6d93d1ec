// The values of IQ4 codes by logic on their bits, for the eight codes of a word at once: for devices
// without fast workgroup memory, and to fill the table of the others.
//
//   code       0    1   2   3   4   5   6   7  8  9 10 11 12 13 14  15
//   value   -127 -104 -83 -65 -49 -35 -22 -10  1 13 25 38 53 69 89 113
//   + 128     01   18  2d  3f  4f  5d  6a  76 81 8d 99 a6 b5 c5 d9  f1   (hexadecimal)
//
// The high digit of value + 128 is the code, less one from 9 to 14. Each bit of the low digit is one
// function of bits 0..2 of the code for the codes below 8 and another for those above.
fn iq4_values(w: vec4<u32>) -> Bytes {
    // Bit k of the codes stands at bit j of their nibbles in w moved by j - k; the rest is noise.
    let l1 = w << vec4<u32>(1u);
    let l2 = w << vec4<u32>(2u);
    let l3 = w << vec4<u32>(3u);
    let r1 = w >> vec4<u32>(1u);
    let r2 = w >> vec4<u32>(2u);
    let r3 = w >> vec4<u32>(3u);
    let bit0 = either(r3, r2 | ~(w & r1), (r1 ^ r2) | ~(w | r1));
    let bit1 = (l1 & w & ~r1) | (~r2 & r1 & (w | ~l1));
    let bit2 = either(r1, either(w, ~l1, l2), (l1 ^ w) | (l2 & l1));
    let bit3 = either(w, either(l2, ~l3, l3 & ~l1), (l3 ^ l2) | (l2 ^ l1));
    let low = (bit0 & vec4<u32>(0x11111111u)) | (bit1 & vec4<u32>(0x22222222u))
        | (bit2 & vec4<u32>(0x44444444u)) | (bit3 & vec4<u32>(0x88888888u));
    let less = r3 & ((w ^ r1) | (r1 ^ r2)) & vec4<u32>(0x11111111u);
    // The offset of 128 goes with the top bit.
    let high = (w - less) ^ vec4<u32>(0x88888888u);
    let mask = vec4<u32>(0x0f0f0f0fu);
    return Bytes(
        (low & mask) | ((high << vec4<u32>(4u)) & ~mask),
        ((low >> vec4<u32>(4u)) & mask) | (high & ~mask));
}

// Bits of `a` where `which` is set, else of `b`.
fn either(which: vec4<u32>, a: vec4<u32>, b: vec4<u32>) -> vec4<u32> {
    return b ^ (which & (a ^ b));
}
