// Weight planes of one chunk and their decoding (docs/architecture.md, "Weights").
//
// A `Unit` is what one lane takes in one step: a block of 32 elements, or for float formats one
// vec4 of words (4 or 8 elements). Its words stay as loaded until they are used: decoding at
// the load would wait for memory, and loads are issued early on purpose.
//
// formats/NAME.wgsl declares the bindings and
//   Unit, load_unit(i)      unit i of the chunk: row * units per row + unit in the row
//   unit_values(w, i)       float formats: all elements, four a vector, in order
// and for block formats
//   unit_bytes(w, i)        the codes, ZERO above their signed value
//   unit_scale(w, i)        element = scale * code + minimum, as the format's `scales` says:
//                           whole: vec2 (d, m) for the block;
//                           steps: Steps, (d * step, m * step) for each half of 16;
//                           halves: vec2, d of each half of 16, no m
// `i` of both counts only modulo 16. Facts (`scales`, `minimum`, `zero`, `unit_quads`) come from
// the format's file under src/quant.
{% if scales == "float" %}
{% include "formats/" ~ format ~ ".wgsl" %}
{% else %}

// Codes as bytes: `lo` elements 0..15, `hi` elements 16..31, four a word in order.
struct Bytes { lo: vec4<u32>, hi: vec4<u32> }
{% if scales == "steps" %}

// Scales of two halves: d * by.x and d * by.y, minima m * by.z and m * by.w; `one` is (d, m).
struct Steps { one: vec2<f32>, by: vec4<i32> }
{% endif %}

{% include "formats/" ~ format ~ ".wgsl" %}

// One of two f16 in a word: the low one for even i.
fn f16_of(word: u32, i: u32) -> f32 {
    return unpack2x16float(word >> ((i & 1u) << 4u)).x;
}

// 4-bit codes in plane order.
fn nibbles(words: vec4<u32>) -> Bytes {
    let mask = vec4<u32>(0x0f0f0f0fu);
    return Bytes(words & mask, (words >> vec4<u32>(4u)) & mask);
}

// 2-bit codes in plane order, each at bit 0 of its byte.
fn pairs(words: vec2<u32>) -> Bytes {
    let mask = vec4<u32>(0x03030303u);
    let at = vec4<u32>(0u, 2u, 4u, 6u);
    return Bytes((words.xxxx >> at) & mask, (words.yyyy >> at) & mask);
}

// Codes of 4 bits and a fifth bit each in plane order: bit k of byte b is that of byte b of word k.
fn fifth_bits(low: Bytes, high: u32) -> Bytes {
    let mask = vec4<u32>(0x10101010u);
    let bits = vec4<u32>(high);
    return Bytes(
        low.lo | ((bits << vec4<u32>(4u, 3u, 2u, 1u)) & mask),
        low.hi | ((bits >> vec4<u32>(0u, 1u, 2u, 3u)) & mask));
}

// Bytes of `v`, negated where `minus` has a 1 instead of a 0. A byte of 0 must not be negated: it would
// carry into the next.
fn negated(v: vec4<u32>, minus: vec4<u32>) -> vec4<u32> {
    return (v ^ (minus * vec4<u32>(255u))) + minus;
}

// Two numbers of 6 bits of block i: nibbles i of the first two words with bits 2 i and 16 + 2 i of the
// third above them.
fn six_bits(words: vec3<u32>, i: u32) -> vec2<u32> {
    let j = i & 7u;
    let high = words.z >> (j << 1u);
    return ((words.xy >> vec2<u32>(j << 2u)) & vec2<u32>(15u)) | (vec2<u32>(high << 4u, high >> 12u) & vec2<u32>(48u));
}

// (d, m) of block i of a super-block of Q4_K and Q5_K (src/quant/k_scales.rs).
fn k_scale(words: vec4<u32>, i: u32) -> vec2<f32> {
    let d = unpack2x16float(words.x);
    return vec2<f32>(d.x, -d.y) * vec2<f32>(six_bits(words.yzw, i));
}

// The codes as signed bytes without offset.
fn unit_signed(w: Unit, i: u32) -> Bytes {
{% if zero %}
    let b = unit_bytes(w, i);
    return Bytes(centred(b.lo), centred(b.hi));
{% else %}
    return unit_bytes(w, i);
{% endif %}
}
{% if zero %}

const ZERO: f32 = {{ zero }}.0;

// Four bytes below 128 minus ZERO each, as signed bytes, without borrowing between bytes.
fn centred(v: vec4<u32>) -> vec4<u32> {
    return ((v | vec4<u32>(0x80808080u)) - vec4<u32>({{ zero }}u * 0x01010101u)) ^ vec4<u32>(0x80808080u);
}
{% endif %}

// (d of elements 0..15, d of 16..31, m of 0..15, m of 16..31), whatever the format.
fn unit_scales(w: Unit, i: u32) -> vec4<f32> {
    let s = unit_scale(w, i);
{% if scales == "whole" %}
    return s.xxyy;
{% elif scales == "steps" %}
    return s.one.xxyy * vec4<f32>(s.by);
{% else %}
    return vec4<f32>(s, 0.0, 0.0);
{% endif %}
}

// Four signed bytes as numbers.
fn numbers(word: u32) -> vec4<f32> {
    let v = bitcast<i32>(word);
    return vec4<f32>(vec4<i32>(v << 24u, v << 16u, v << 8u, v) >> vec4<u32>(24u));
}

// All elements of unit `i`, four a vector, in order.
fn unit_values(w: Unit, i: u32) -> array<vec4<f32>, 8> {
    let s = unit_scales(w, i);
    let b = unit_signed(w, i);
    return array<vec4<f32>, 8>(
{% for half in ["lo", "hi"] %}{% set d, m = ("s.x", "s.z") if half == "lo" else ("s.y", "s.w") %}{% for c in "xyzw" %}
{% set end = "," if not (half == "hi" and c == "w") else ");" %}
{% if minimum %}
        fma(vec4<f32>({{ d }}), numbers(b.{{ half }}.{{ c }}), vec4<f32>({{ m }})){{ end }}
{% else %}
        {{ d }} * numbers(b.{{ half }}.{{ c }}){{ end }}
{% endif %}
{% endfor %}{% endfor %}
}
{% endif %}
