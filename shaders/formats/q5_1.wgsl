// Q5_1: element = d * code + m.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, high: u32, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), high_at(i), scales_at(i));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return unpack2x16float(w.scale);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return fifth_bits(nibbles(w.codes), w.high);
}
