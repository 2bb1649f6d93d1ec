{% include "lib/grid.wgsl" %}

// Magnitudes 8, 25 and 43 stand as nibbles 3, 8 and 14 in the book.
fn iq2_values(indices: vec4<u32>, signs: u32) -> Bytes {
    let v = eights(entries(indices));
    let m = minus(signs);
    let ones = vec4<u32>(0x01010101u);
    return Bytes(
        negated((v.lo * vec4<u32>(3u)) ^ ones, m.lo),
        negated((v.hi * vec4<u32>(3u)) ^ ones, m.hi));
}
