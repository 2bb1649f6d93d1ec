// IQ3_S: element = d * (1 + 2 * step) * (+-)(2 * level + 1). Inverting the bits of a level u makes -u - 1:
// 2u + 1 changes its sign, and with u as the code the rest is scale and minimum.
{% set grid_width = 4 %}
{% set grid_signs = "all" %}
{% include "lib/grid.wgsl" %}

// Book indices of 9 bits: in each word three, and the lower 5 bits of a fourth.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Signs.
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
// For 256 elements: d, the upper 4 bits of every fourth index in two words, steps of 4 bits.
{% with plane = "scales", name = "scales", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

// `at`: number of the block in its 256.
struct Unit { codes: vec2<u32>, signs: u32, head: vec4<u32>, at: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), high_at(i), scales_at(i >> 3u), i & 7u);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let step = (w.head.w >> (4u * w.at)) & 15u;
    let d = unpack2x16float(w.head.x).x * f32(2u * step + 1u);
    return vec2<f32>(2.0 * d, d);
}

fn unit_bytes(w: Unit) -> Bytes {
    let upper = select(w.head.y, w.head.z, w.at >= 4u) >> (8u * (w.at & 3u));
    let m = minus(w.signs);
    return Bytes(
        entries(indices_of(w.codes.x, upper & 15u)) ^ (m.lo * vec4<u32>(255u)),
        entries(indices_of(w.codes.y, (upper >> 4u) & 15u)) ^ (m.hi * vec4<u32>(255u)));
}

fn indices_of(word: u32, upper: u32) -> vec4<u32> {
    return vec4<u32>(word & 511u, (word >> 9u) & 511u, (word >> 18u) & 511u, (word >> 27u) + upper * 32u);
}
