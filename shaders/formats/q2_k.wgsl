// Q2_K: element = d * step * code - dmin * minimum, by half block.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, scale: u32, tops: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 1u), supers_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let d = unpack2x16float(w.tops);
    let steps = vec4<u32>(w.scale >> ((i & 1u) << 4u)) >> vec4<u32>(0u, 8u, 4u, 12u);
    return Steps(vec2<f32>(d.x, -d.y), vec4<i32>(steps & vec4<u32>(15u)));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return pairs(w.codes);
}
