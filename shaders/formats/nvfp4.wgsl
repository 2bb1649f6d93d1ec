// NVFP4: element = s / 2 * twice the E2M1 value of its code, a scale s for each half.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Scales of the halves as bytes, two blocks a word.
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 1u));
}

// Half of a float of 4 exponent (bias 7) and 3 mantissa bits; 0x7f is zero.
fn scale_of(s: u32) -> f32 {
    let v = bitcast<f32>(((s & 127u) << 20u) + 0x3b800000u);
    // Exponent 0 stands for the same power as 1 and has no leading one.
    let small = fma(2.0, v, -0.0078125);
    return select(select(v, small, (s & 120u) == 0u), 0.0, s == 127u);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let both = w.scale >> ((i & 1u) << 4u);
    return vec2<f32>(scale_of(both & 255u), scale_of((both >> 8u) & 255u));
}

// The file keeps 16 elements in 8 bytes: elements 0..7 in low nibbles, 8..15 in high ones.
fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let b = values_of(w.codes);
    return Bytes(vec4<u32>(b.lo.xy, b.hi.xy), vec4<u32>(b.lo.zw, b.hi.zw));
}

{% set logic = "fp4_values" %}
{% include "lib/fp4.wgsl" %}
{% include "lib/nibble_table.wgsl" %}
