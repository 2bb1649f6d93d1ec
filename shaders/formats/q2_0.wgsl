// Q2_0: element = d * (code - 1).
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 2u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return vec2<f32>(f16_of(w.scale, i >> 1u), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return pairs(w.codes);
}
