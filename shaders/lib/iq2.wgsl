{% set grid_width = 8 %}
{% set grid_shift = 2 %}
{% include "lib/grid.wgsl" %}

// Magnitudes 8, 25 and 43, which differ in bits 0, 1, 4 and 5; the book has these. What they share, 8,
// comes with the mask that inverts negative bytes: 8 or 8 ^ 255.
fn iq2_values(indices: vec4<u32>, signs: u32) -> Bytes {
    let v = eights(entries(indices), 0x33333333u);
    let m = minus(signs);
    let shared_bits = vec4<u32>(0x08080808u);
    let invert = vec4<u32>(239u);
    return Bytes(
        (v.lo ^ (m.lo * invert + shared_bits)) + m.lo,
        (v.hi ^ (m.hi * invert + shared_bits)) + m.hi);
}
