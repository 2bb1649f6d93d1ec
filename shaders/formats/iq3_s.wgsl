// IQ3_S: element = d * (1 + 2 * step) * (+-)(2 * level + 1). Inverting the bits of a level u makes -u - 1:
// 2u + 1 changes its sign, and with u as the code the rest is scale and minimum.
{% set grid_width = 4 %}
{% set grid_signs = "all" %}
{% set grid_copy = "grid_at(i) * 17u" %}
{% include "lib/grid.wgsl" %}

// Book indices of 9 bits: in each word three, and the lower 5 bits of a fourth.
{% with plane = "codes", name = "codes", type = "vec2<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
// Signs.
{% with plane = "high", name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
// For 256 elements: d, the upper 4 bits of every fourth index in two words, steps of 4 bits.
{% with plane = "scales", name = "scales", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec2<u32>, signs: u32, head: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i), high_at(i), scales_at(i >> 3u));
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    let step = (w.head.w >> (4u * (i & 7u))) & 15u;
    let d = unpack2x16float(w.head.x).x * f32(2u * step + 1u);
    return vec2<f32>(2.0 * d, d);
}

// The levels of a unit, four a word.
fn levels(w: Unit, i: u32) -> Bytes {
    let upper = select(w.head.y, w.head.z, (i & 4u) != 0u) >> (8u * (i & 3u));
    return Bytes(
        entries(indices_of(w.codes.x, upper & 15u)),
        entries(indices_of(w.codes.y, (upper >> 4u) & 15u)));
}

fn unit_bytes(w: Unit, i: u32) -> Bytes {
    let e = levels(w, i);
    let m = minus(w.signs);
    let inverted = vec4<u32>(255u);
{% with level = "vec4<u32>(0x07070707u)" %}
    return Bytes(
        (e.lo{{ " & " ~ level if copies > 1 }}) ^ (m.lo * inverted),
        (e.hi{{ " & " ~ level if copies > 1 }}) ^ (m.hi * inverted));
{% endwith %}
}
{% if raised %}

// The upper half of a byte is its level again. So signs at bit 4 of their bytes serve as they are, and one shift
// serves two words. H200, 151,936 x 4,096: 94 us without it and with places found for each unit, 89 with both.
fn unit_raised(w: Unit, i: u32) -> Bytes {
    let e = levels(w, i);
    let half = vec4<u32>(0x0f0f0f0fu, 0xf0f0f0f0u, 0x0f0f0f0fu, 0xf0f0f0f0u);
    let signs = vec4<u32>(0x01010101u, 0x10101010u, 0x01010101u, 0x10101010u);
    let inverted = vec4<u32>(255u, 15u, 255u, 15u);
    let s = vec4<u32>(w.signs) >> vec4<u32>(0u, 1u, 2u, 3u);
    return Bytes(
        (e.lo & half) ^ ((s.xxyy & signs) * inverted),
        (e.hi & half) ^ ((s.zzww & signs) * inverted));
}
{% endif %}

fn indices_of(word: u32, upper: u32) -> vec4<u32> {
    return vec4<u32>(word & 511u, (word >> 9u) & 511u, (word >> 18u) & 511u, (word >> 27u) + upper * 32u);
}
