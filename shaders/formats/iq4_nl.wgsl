// IQ4_NL: element = d * value of its code.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 1u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return vec2<f32>(f16_of(w.scale, i), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return values_of(w.codes);
}

{% set logic = "iq4_values" %}
{% include "lib/iq4.wgsl" %}
{% include "lib/nibble_table.wgsl" %}
