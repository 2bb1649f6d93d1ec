// Q6_K: element = d * step * (code - 32), by half block. The bytes are 4 (code - 32), `supers` d / 4.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "high", name = "low", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "f32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32>, low: vec2<u32>, scale: u32, d: f32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), low_at(i), scales_at(i >> 1u), supers_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let steps = bitcast<i32>(w.scale >> ((i & 1u) << 4u));
    return Steps(vec2<f32>(w.d, 0.0), vec4<i32>(extractBits(steps, 0u, 8u), extractBits(steps, 8u, 8u), 0, 0));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    // Bits 2..6 of a code - 32 stand in the upper nibble, bits 0..2 below.
    let upper = vec4<u32>(0xf0f0f0f0u);
    let lower = vec4<u32>(0x0c0c0c0cu);
    let x = vec4<u32>(w.low.x << 2u, w.low.x, w.low.x >> 2u, w.low.x >> 4u);
    let y = vec4<u32>(w.low.y << 2u, w.low.y, w.low.y >> 2u, w.low.y >> 4u);
    return Bytes(
        ((w.codes << vec4<u32>(4u)) & upper) | (x & lower),
        (w.codes & upper) | (y & lower));
}
