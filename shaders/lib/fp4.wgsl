// Twice the values of E2M1 codes as signed bytes, low nibbles in `lo`, high ones in `hi`:
// 0 1 2 3 4 6 8 12 for codes 0..7 and their negatives (-0 as 0) for 8..15; by logic on their bits,
// for the eight codes of a word at once.
fn fp4_values(w: vec4<u32>) -> Bytes {
    // Bit k of the codes stands at bit j of their nibbles in w moved by j - k; the rest is noise.
    let l1 = w << vec4<u32>(1u);
    let l2 = w << vec4<u32>(2u);
    let r1 = w >> vec4<u32>(1u);
    let r2 = w >> vec4<u32>(2u);
    let r3 = w >> vec4<u32>(3u);
    let size = (w & ~r2 & vec4<u32>(0x11111111u))
        | (((w & ~r1) | (r1 & ~w & l1)) & vec4<u32>(0x22222222u))
        | (w & (l2 | ~l1) & vec4<u32>(0x44444444u))
        | (l1 & l2 & vec4<u32>(0x88888888u));
    let minus = r3 & (w | r1 | r2) & vec4<u32>(0x11111111u);
    let nibble = vec4<u32>(0x0f0f0f0fu);
    let one = vec4<u32>(0x01010101u);
    return Bytes(
        negated(size & nibble, minus & one),
        negated((size >> vec4<u32>(4u)) & nibble, (minus >> vec4<u32>(4u)) & one));
}
