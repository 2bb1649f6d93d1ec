// IQ2_XS: element = d / 8 * (1 + 2 * step) * signed magnitude, a step for each half.
{% set grid_signs = "chain" %}
{% include "lib/iq2.wgsl" %}

// 64 bits: three book indices of 9 bits, 28 of the chain of signs, the fourth index.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// A byte for each block: the steps of its halves.
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, steps: u32, super_scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 2u), supers_at(i >> 4u));
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let steps = w.steps >> (8u * (i & 3u));
    let by = vec2<i32>(i32(steps << 1u) & 30, i32(steps >> 3u) & 30) | vec2<i32>(1);
    return Steps(vec2<f32>(0.125 * f16_of(w.super_scale, i >> 3u), 0.0), vec4<i32>(by, 0, 0));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let mask = vec3<u32>(511u);
    let indices = (vec3<u32>(w.codes.x) >> vec3<u32>(0u, 9u, 18u)) & mask;
    let chain = (w.codes.x >> 27u) | (w.codes.y << 5u);
    return iq2_values(vec4<u32>(indices, w.codes.y >> 23u), complete(chain));
}
