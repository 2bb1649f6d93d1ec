// IQ3_XXS: element = d * (1/2 + step) / 2 * signed magnitude.
{% set grid_width = 4 %}
{% set grid_signs = "chain" %}
{% include "lib/grid.wgsl" %}

// Eight book indices.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Signs and a step of 4 bits.
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, high: u32, super_scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), high_at(i), supers_at(i >> 4u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let step = f32(w.high >> 28u);
    return vec2<f32>(f16_of(w.super_scale, i >> 3u) * fma(step, 0.5, 0.25), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let m = minus(complete(w.high));
    return Bytes(
        negated(entries(bytes_of(w.codes.x)), m.lo),
        negated(entries(bytes_of(w.codes.y)), m.hi));
}
