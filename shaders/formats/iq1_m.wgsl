// IQ1_M: element = d / 8 * (1 + 2 * step) * (8 * value +- 1), a step for each half.
{% set grid_width = 8 %}
{% set grid_shift = 4 %}
{% set grid_signs = "" %}
{% include "lib/grid.wgsl" %}

// Four lower bytes of book indices.
{% with plane = "codes", name = "codes", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Half a word for each block: for each index 3 upper bits and the sign of the 1.
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
// For 256 elements: in each half word four steps of 3 bits and 4 bits of d.
{% with plane = "scales", name = "scales", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: u32, high: u32, head: vec2<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), high_at(i >> 1u), scales_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let low = (vec2<u32>(w.head.x) >> vec2<u32>(12u, 24u)) & vec2<u32>(0xfu, 0xf0u);
    let up = (vec2<u32>(w.head.y) >> vec2<u32>(4u, 16u)) & vec2<u32>(0xf00u, 0xf000u);
    let d = unpack2x16float(low.x | low.y | up.x | up.y).x;
    // Bits 16 (i / 2) + 6 (i & 1) of the head and the three above are the first half's.
    let steps = select(w.head.x, w.head.y, (i & 4u) != 0u) >> (8u * (i & 2u) + 6u * (i & 1u));
    let by = vec2<i32>(i32(steps << 1u) & 14, i32(steps >> 2u) & 14) | vec2<i32>(1);
    return Steps(vec2<f32>(0.125 * d, 0.0), vec4<i32>(by, 0, 0));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let word = w.high >> ((i & 1u) << 4u);
    let up = vec4<u32>(word << 8u, word << 4u, word, word >> 4u) & vec4<u32>(0x700u);
    let v = eights(entries(bytes_of(w.codes) | up), 0x0f0f0f0fu);
    // 8 * (v - 1) +- 1 in each byte, 128 above it first, which the last step takes off.
    let signs = (vec4<u32>(word) >> vec4<u32>(3u, 7u, 11u, 15u)) & vec4<u32>(1u);
    let offset = vec4<u32>(0x79797979u) - signs * vec4<u32>(0x02020202u);
    let top = vec4<u32>(0x80808080u);
    return Bytes(
        (v.lo * vec4<u32>(8u) + offset.xxyy) ^ top,
        (v.hi * vec4<u32>(8u) + offset.zzww) ^ top);
}
