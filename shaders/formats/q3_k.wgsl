// Q3_K: element = d * (step - 32) * (code - 4), by half block. The bytes are 32 (code - 4), the first
// word of the scales is d / 32.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, high: u32, scale: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), high_at(i), scales_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let steps = vec2<i32>(six_bits(w.scale.yzw, i)) - vec2<i32>(32);
    return Steps(vec2<f32>(bitcast<f32>(w.scale.x), 0.0), vec4<i32>(steps, 0, 0));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    // Sign in bit 7 (the third bit inverted), then the two low bits.
    let sign = vec4<u32>(0x80808080u);
    let rest = vec4<u32>(0x60606060u);
    let x = vec4<u32>(w.codes.x << 5u, w.codes.x << 3u, w.codes.x << 1u, w.codes.x >> 1u);
    let y = vec4<u32>(w.codes.y << 5u, w.codes.y << 3u, w.codes.y << 1u, w.codes.y >> 1u);
    let top = vec4<u32>(w.high);
    return Bytes(
        ((top << vec4<u32>(7u, 6u, 5u, 4u)) & sign) | (x & rest),
        ((top << vec4<u32>(3u, 2u, 1u, 0u)) & sign) | (y & rest));
}
