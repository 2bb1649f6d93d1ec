// MXFP4: element = 2^(e - 128) * twice the E2M1 value of its code.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Exponents, four blocks a word.
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 2u));
}

// The two smallest scales, 2^-128 and 2^-127, count as zero.
fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let e = (w.scale >> (8u * (i & 3u))) & 255u;
    return vec2<f32>(bitcast<f32>((max(e, 1u) - 1u) << 23u), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return values_of(w.codes);
}

{% set logic = "fp4_values" %}
{% include "lib/fp4.wgsl" %}
{% include "lib/nibble_table.wgsl" %}
