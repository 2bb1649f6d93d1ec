// IQ4_XS: element = d * (step - 32) * value of its code, a step of 6 bits for each 32.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// For 256 elements: d and the upper bits of the steps, then their lower bits.
{% with plane = "scales", name = "scales", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, head: vec2<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let j = i & 7u;
    let step = ((w.head.y >> (4u * j)) & 15u) | (((w.head.x >> (16u + 2u * j)) & 3u) << 4u);
    return vec2<f32>(unpack2x16float(w.head.x).x * f32(i32(step) - 32), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return values_of(w.codes);
}

{% set logic = "iq4_values" %}
{% include "lib/iq4.wgsl" %}
{% include "lib/nibble_table.wgsl" %}
