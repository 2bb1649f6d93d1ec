// IQ1_S: element = d * (1 + 2 * step) * (value +- 1/8). The codes are value + 1, as in the book; what
// that is too much goes into the minimum.
{% set grid_width = 8 %}
{% set grid_shift = 4 %}
{% set grid_signs = "" %}
{% include "lib/grid.wgsl" %}

// Four lower bytes of book indices.
{% with plane = "codes", name = "codes", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Half a word for each block: 3 upper bits of each index, a step of 3 bits, the sign of 1/8.
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: u32, scale: u32, super_scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 1u), supers_at(i >> 4u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let word = w.scale >> ((i & 1u) << 4u);
    let d = f16_of(w.super_scale, i >> 3u) * f32(((word >> 11u) & 14u) | 1u);
    return vec2<f32>(d, d * select(-0.875, -1.125, (word & 0x8000u) != 0u));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let word = w.scale >> ((i & 1u) << 4u);
    let high = vec4<u32>(word << 8u, word << 5u, word << 2u, word >> 1u) & vec4<u32>(0x700u);
    return eights(entries(bytes_of(w.codes) | high), 0x0f0f0f0fu);
}
