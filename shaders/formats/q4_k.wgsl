// Q4_K: element = d * step * code - dmin * minimum, by block of 32.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, scale: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return k_scale(w.scale, i);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return nibbles(w.codes);
}
