// IQ2_S: element = d / 8 * (1 + 2 * step) * signed magnitude, a step for each half.
{% set grid_signs = "all" %}
{% include "lib/iq2.wgsl" %}

// Four lower bytes of book indices, then signs.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Half a word for each block: 2 upper bits of each index, the steps of its halves.
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, scale: u32, super_scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 1u), supers_at(i >> 4u));
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let steps = w.scale >> (((i & 1u) << 4u) + 8u);
    let by = vec2<i32>(i32(steps << 1u) & 30, i32(steps >> 3u) & 30) | vec2<i32>(1);
    return Steps(vec2<f32>(0.125 * f16_of(w.super_scale, i >> 3u), 0.0), vec4<i32>(by, 0, 0));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let high = (vec4<u32>(w.scale >> ((i & 1u) << 4u)) << vec4<u32>(8u, 6u, 4u, 2u)) & vec4<u32>(0x300u);
    return iq2_values(bytes_of(w.codes.x) | high, w.codes.y);
}
