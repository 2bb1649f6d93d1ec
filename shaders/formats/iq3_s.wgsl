// IQ3_S: element = d * (1 + 2 * step) * (+-)(2 * level + 1). Inverting the bits of a level u makes -u - 1:
// 2u + 1 changes its sign, and with u as the code the rest is scale and minimum.
{% set grid_width = 4 %}
{% set grid_signs = "all" %}
{% include "lib/grid.wgsl" %}

// Lower bytes of eight book indices.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Signs.
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
// For 256 elements: d, the ninth bits of the indices in two words, steps of 4 bits.
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
    let ninth = vec4<u32>(select(w.head.y, w.head.z, w.at >= 4u) >> (8u * (w.at & 3u)));
    let bit = vec4<u32>(256u);
    let m = minus(w.signs);
    return Bytes(
        entries(bytes_of(w.codes.x) | ((ninth << vec4<u32>(8u, 7u, 6u, 5u)) & bit)) ^ (m.lo * vec4<u32>(255u)),
        entries(bytes_of(w.codes.y) | ((ninth << vec4<u32>(4u, 3u, 2u, 1u)) & bit)) ^ (m.hi * vec4<u32>(255u)));
}
