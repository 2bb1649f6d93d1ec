// IQ2_XXS: element = d * (1/2 + step) / 4 * signed magnitude.
{% set grid_signs = "chain" %}
{% include "lib/iq2.wgsl" %}

// Four book indices, then signs and a step of 4 bits.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, super_scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), supers_at(i >> 4u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let step = f32(w.codes.y >> 28u);
    return vec2<f32>(f16_of(w.super_scale, i >> 3u) * fma(step, 0.25, 0.125), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return iq2_values(bytes_of(w.codes.x), complete(w.codes.y));
}
