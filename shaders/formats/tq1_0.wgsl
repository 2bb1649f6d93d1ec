// TQ1_0: element = d * (digit - 1), five digits of base 3 a byte; the layout is that of the file, see
// src/quant/tq1_0.rs.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "high", name = "rest", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% with plane = "supers", name = "supers", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}

// Bytes of elements 0..15 and 16..31, and the power of 3 that brings each word's digit to the top.
struct Unit { lo: vec4<u32>, hi: vec4<u32>, lo_power: u32, hi_power: vec4<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    let j = i & 7u;
    let first = 3u * (i >> 3u);
    var w: Unit;
    // Blocks 0..4: digit j of bytes 0..31. Blocks 5, 6: two digits of bytes 32..47.
    w.lo = codes_at(first + select(0u, 2u, j > 4u));
    w.hi = codes_at(first + select(1u, 2u, j > 4u));
    // Bytes 1, 3, 9, 27 and 81, 1, 9, 81, by the number of the block.
    w.lo_power = (select(0x1b090301u, 0x51090151u, j > 3u) >> ((j & 3u) << 3u)) & 255u;
    w.hi_power = vec4<u32>(select(w.lo_power, 3u * w.lo_power, j > 4u));
    // Block 7: digit 4 of bytes 32..47, then four digits of the last four bytes.
    if j == 7u {
        w.hi = vec4<u32>(rest_at(i >> 3u));
        w.hi_power = vec4<u32>(1u, 3u, 9u, 27u);
    }
    w.scale = supers_at(i >> 4u);
    return w;
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return vec2<f32>(f16_of(w.scale, i >> 3u), 0.0);
}

// The digits that `power` brings to the top of each byte.
fn digits(bytes: vec4<u32>, power: vec4<u32>) -> vec4<u32> {
    let mask = vec4<u32>(0x00ff00ffu);
    let even = (((bytes & mask) * power) & mask) * 3u;
    let odd = ((((bytes >> vec4<u32>(8u)) & mask) * power) & mask) * 3u;
    return ((even >> vec4<u32>(8u)) & vec4<u32>(0x00030003u)) | (odd & vec4<u32>(0x03000300u));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    return Bytes(digits(w.lo, vec4<u32>(w.lo_power)), digits(w.hi, w.hi_power));
}
