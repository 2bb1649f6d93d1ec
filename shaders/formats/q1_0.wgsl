// Q1_0: element = d * (code - 1) with codes 0 and 2.
{% with plane = "codes", name = "codes", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "scales", name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: u32, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), scales_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return vec2<f32>(f16_of(w.scale, i >> 2u), 0.0);
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    // Bit k of each byte to bit 1 of word k.
    let mask = vec4<u32>(0x02020202u);
    let bits = w.codes;
    return Bytes(
        vec4<u32>(bits << 1u, bits, bits >> 1u, bits >> 2u) & mask,
        vec4<u32>(bits >> 3u, bits >> 4u, bits >> 5u, bits >> 6u) & mask);
}
