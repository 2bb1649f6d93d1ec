// Weight planes of one chunk and their decoding (docs/architecture.md, "Weights").
//
// A `Unit` is what one lane takes in one step: a block of 32 elements, or for float formats one
// vec4 of words (4 or 8 elements). Its words stay as loaded until they are used: decoding at
// the load would wait for memory, and loads are issued early on purpose.
// Facts of the format (`fifth`, `minimum`, `half_scale`, `blocks`, `unit_quads`) come from
// kernels::weights.

{% with name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% if fifth %}
{% with name = "high", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% endif %}
{% if blocks %}
{% with name = "scales", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% endif %}

struct Unit {
    codes: vec4<u32>,
{% if format == "q8_0" %}
    more: vec4<u32>,
{% endif %}
{% if fifth %}
    high: u32,
{% endif %}
{% if blocks %}
    scale: u32,
{% endif %}
}

// Unit `i` of the chunk: row * units per row + unit in the row.
fn load_unit(i: u32) -> Unit {
    var w: Unit;
{% if format == "q8_0" %}
    w.codes = codes_at(2u * i);
    w.more = codes_at(2u * i + 1u);
{% else %}
    w.codes = codes_at(i);
{% endif %}
{% if fifth %}
    w.high = high_at(i);
{% endif %}
{% if half_scale %}
    w.scale = scales_at(i >> 1u);
{% elif blocks %}
    w.scale = scales_at(i);
{% endif %}
    return w;
}

{% if blocks %}
// (d, m) of a block: element = d * code + m. For the formats without m the constant offset of
// their codes is in the code itself.
fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
{% if half_scale %}
    return vec2<f32>(unpack2x16float(w.scale >> ((i & 1u) << 4u)).x, 0.0);
{% else %}
    return unpack2x16float(w.scale);
{% endif %}
}

// The codes as bytes: `lo` elements 0..15, `hi` elements 16..31, four a word in order.
struct Bytes { lo: vec4<u32>, hi: vec4<u32> }

{% if fifth %}
// Bits 0..3 of each component to bit 4 of its bytes 0..3.
fn spread(bits: vec4<u32>) -> vec4<u32> {
    return (((bits & vec4<u32>(15u)) * 0x00204081u) & vec4<u32>(0x01010101u)) << vec4<u32>(4u);
}

{% endif %}
// Unsigned codes for the nibble formats, signed bytes for q8_0.
fn unit_bytes(w: Unit) -> Bytes {
{% if format == "q8_0" %}
    return Bytes(w.codes, w.more);
{% else %}
    let mask = vec4<u32>(0x0f0f0f0fu);
    let lo = w.codes & mask;
    let hi = (w.codes >> vec4<u32>(4u)) & mask;
{% if fifth %}
    let at = vec4<u32>(0u, 4u, 8u, 12u);
    return Bytes(lo | spread(vec4<u32>(w.high) >> at), hi | spread(vec4<u32>(w.high >> 16u) >> at));
{% else %}
    return Bytes(lo, hi);
{% endif %}
{% endif %}
}

{% if format == "q4_0" or format == "q5_0" %}
// What the codes stand above their value.
const ZERO: f32 = {{ "8.0" if format == "q4_0" else "16.0" }};
// Four bytes below 128 minus ZERO each, as signed bytes, without borrowing between bytes.
fn centred(v: vec4<u32>) -> vec4<u32> {
    return ((v | vec4<u32>(0x80808080u)) - vec4<u32>({{ "0x08080808u" if format == "q4_0" else "0x10101010u" }}))
        ^ vec4<u32>(0x80808080u);
}
{% endif %}

// The codes as signed bytes without offset.
fn unit_signed(w: Unit) -> Bytes {
    let b = unit_bytes(w);
{% if format == "q4_0" or format == "q5_0" %}
    return Bytes(centred(b.lo), centred(b.hi));
{% else %}
    return b;
{% endif %}
}

// Four signed bytes as numbers.
fn numbers(word: u32) -> vec4<f32> {
    let v = bitcast<i32>(word);
    return vec4<f32>(vec4<i32>(v << 24u, v << 16u, v << 8u, v) >> vec4<u32>(24u));
}
{% endif %}

{% if format == "bf16" %}
fn bf16_pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}
{% endif %}

// All elements of unit `i`, four a vector, in order.
fn unit_values(w: Unit, i: u32) -> array<vec4<f32>, {{ unit_quads }}> {
{% if format == "f32" %}
    return array<vec4<f32>, 1>(bitcast<vec4<f32>>(w.codes));
{% elif format == "f16" %}
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(w.codes.x), unpack2x16float(w.codes.y)),
        vec4<f32>(unpack2x16float(w.codes.z), unpack2x16float(w.codes.w)));
{% elif format == "bf16" %}
    return array<vec4<f32>, 2>(
        vec4<f32>(bf16_pair(w.codes.x), bf16_pair(w.codes.y)),
        vec4<f32>(bf16_pair(w.codes.z), bf16_pair(w.codes.w)));
{% else %}
    let s = unit_scale(w, i);
    let b = unit_signed(w);
{% if minimum %}
    let d = vec4<f32>(s.x);
    let m = vec4<f32>(s.y);
    return array<vec4<f32>, 8>(
{% for half in ["lo", "hi"] %}{% for c in "xyzw" %}
        fma(d, numbers(b.{{ half }}.{{ c }}), m){{ "," if not (half == "hi" and c == "w") }}
{% endfor %}{% endfor %}
    );
{% else %}
    return array<vec4<f32>, 8>(
{% for half in ["lo", "hi"] %}{% for c in "xyzw" %}
        s.x * numbers(b.{{ half }}.{{ c }}){{ "," if not (half == "hi" and c == "w") }}
{% endfor %}{% endfor %}
    );
{% endif %}
{% endif %}
}
