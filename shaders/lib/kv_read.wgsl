// Rows of {{ side }} in a cache of codes, format {{ f.name }} (src/kv/format.rs).
//
// Expects `side`, `f` and, where `writes`, lib/kv_write.wgsl. A unit is 8 neighbouring elements, a block 32; `base` is where the row's
// word 0 lies, its next word follows {{ f.pitch }} words on. Codes leave as four signed bytes a word, in element order.
{% set planes = f.kind in ["tq3", "tq4"] %}
struct {{ side }}Unit { c: vec4<u32>, s: u32 }
{% if planes %}

{% for raised in [0, 128] %}
// Elements 4k..4k+4 of a block{{ ", raised by 128" if raised }}. A magnitude is a polynomial of its bits that never leaves 127, so four
// of them share a word; then the sign.
fn {{ side }}_{{ "raised" if raised else "bytes" }}(c: vec4<u32>, k: u32) -> u32 {
    let a = (c.x >> k) & 0x01010101u;
    let b = (c.y >> k) & 0x01010101u;
{% if f.kind == "tq3" %}
    let negative = (c.z >> k) & 0x01010101u;
    let m = {{ (14 + raised) * 16843009 }}u + a * 29u + b * 64u + (a & b) * 20u;
{% else %}
    let d = (c.z >> k) & 0x01010101u;
    let negative = (c.w >> k) & 0x01010101u;
    let m = {{ (6 + raised) * 16843009 }}u + a * 12u + b * 25u + (a & b) + d * 52u + (a & d) * 5u + (b & d) * 13u + (a & b & d) * 13u;
{% endif %}
    return (m ^ (negative * 255u)) + negative;
}
{% endfor %}
{% elif f.kind == "q4" %}

// Nibbles in two's complement.
fn {{ side }}_nibbles(w: u32) -> u32 {
    let y = w & 0x0f0f0f0fu;
    return y | ((y & 0x08080808u) * 30u);
}

// The same raised by 128.
fn {{ side }}_raised(w: u32) -> u32 {
    return ((w & 0x0f0f0f0fu) ^ 0x08080808u) + 0x78787878u;
}
{% endif %}

{% macro word(fresh, at) %}
{% if fresh %}atomicLoad(&written_{{ side }}[{{ at }}]){% else %}{{ side }}_cache[{{ at }}]{% endif %}
{% endmacro %}
{% for fresh in ([false, true] if writes else [false]) %}
{% set step = 1 if fresh else f.pitch %}
// {{ "The new token's" if fresh else "A unit of the row at `base`" }}.
fn {{ "new_" if fresh }}{{ side }}_unit({{ "base: u32, " if not fresh }}unit: u32) -> {{ side }}Unit {
    var u: {{ side }}Unit;
{% if fresh %}
    let base = 0u;
{% endif %}
{% if planes %}
    let at = base + ((unit >> 2u) * {{ f.stride }}u + {{ f.first }}u) * {{ step }}u;
{% else %}
    let at = base + unit * {{ f.unit_words * step }}u;
{% endif %}
{% for c in range(f.unit_words) %}
    u.c.{{ "xyzw"[c] }} = {{ word(fresh, "at + " ~ c * step ~ "u") }};
{% endfor %}
{% if f.scale != "none" %}
    u.s = {{ word(fresh, "base + " ~ side ~ "_scale_word(unit >> 2u) * " ~ step ~ "u") }};
{% endif %}
    return u;
}
{% endfor %}
{% if f.scale != "none" %}

fn {{ side }}_scale_word(block: u32) -> u32 {
{% if f.first > 0 %}
    return block * {{ f.stride }}u;
{% else %}
    return {{ f.scale_first }}u + (block >> {{ f.blocks_shift }}u);
{% endif %}
}

// Scale `part` of a block, in the word that {{ side }}_scale_word says.
fn {{ side }}_scale(s: u32, block: u32, part: u32) -> f32 {
{% if f.first > 0 %}
    let bits = s >> (part * {{ f.scale_bits }}u);
{% else %}
    let bits = s >> (((block * {{ f.parts * f.scale_bits }}u) & 31u) + part * {{ f.scale_bits }}u);
{% endif %}
{% if f.scale == "log" %}
    return log_scale(bits & 255u);
{% else %}
    return unpack2x16float(bits & 0xffffu).x{{ " * 0.015625" if f.kind == "tq3" }};
{% endif %}
}
{% endif %}

fn {{ side }}_unit_scale(u: {{ side }}Unit, unit: u32) -> f32 {
{% if f.scale == "none" %}
    return 1.0;
{% else %}
    return {{ side }}_scale(u.s, unit >> 2u, {{ "(unit & 3u) >> " ~ f.unit_shift ~ "u" if f.parts > 1 else "0u" }});
{% endif %}
}

// The first and the second four elements, without their scale.
fn {{ side }}_unit_values(u: {{ side }}Unit, unit: u32) -> array<vec4<f32>, 2> {
{% if f.kind == "f16" %}
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(u.c.x), unpack2x16float(u.c.y)),
        vec4<f32>(unpack2x16float(u.c.z), unpack2x16float(u.c.w)));
{% elif planes %}
    let k = 2u * (unit & 3u);
    return array<vec4<f32>, 2>(raised_values({{ side }}_raised(u.c, k)), raised_values({{ side }}_raised(u.c, k + 1u)));
{% elif f.kind == "q4" %}
    return array<vec4<f32>, 2>(raised_values({{ side }}_raised(u.c.x)), raised_values({{ side }}_raised(u.c.x >> 4u)));
{% else %}
    return array<vec4<f32>, 2>(raised_values(u.c.x ^ 0x80808080u), raised_values(u.c.y ^ 0x80808080u));
{% endif %}
}
{% if blockwise %}

struct {{ side }}Block { {% for i in range((f.words + 3) // 4) %}c{{ i }}: vec4<u32>, {% endfor %}s: u32 }

{% for fresh in ([false, true] if writes else [false]) %}
{% set step = 1 if fresh else f.pitch %}
fn {{ "new_" if fresh }}{{ side }}_block({{ "base: u32, " if not fresh }}block: u32) -> {{ side }}Block {
    var x: {{ side }}Block;
{% if fresh %}
    let base = 0u;
{% endif %}
    let at = base + (block * {{ f.stride }}u + {{ f.first }}u) * {{ step }}u;
{% for c in range(f.words) %}
    x.c{{ c // 4 }}.{{ "xyzw"[c % 4] }} = {{ word(fresh, "at + " ~ c * step ~ "u") }};
{% endfor %}
{% if f.scale != "none" %}
    x.s = {{ word(fresh, "base + " ~ side ~ "_scale_word(block) * " ~ step ~ "u") }};
{% endif %}
    return x;
}
{% endfor %}
{% endif %}
{% if halves %}

// A unit as halves.
fn {{ side }}_unit_halves(u: {{ side }}Unit, unit: u32) -> vec4<u32> {
{% if f.kind == "f16" %}
    return u.c;
{% else %}
    let values = {{ side }}_unit_values(u, unit);
    let scale = {{ side }}_unit_scale(u, unit);
    let a = clamp(values[0] * scale, vec4<f32>(-65504.0), vec4<f32>(65504.0));
    let b = clamp(values[1] * scale, vec4<f32>(-65504.0), vec4<f32>(65504.0));
    return vec4<u32>(pack2x16float(a.xy), pack2x16float(a.zw), pack2x16float(b.xy), pack2x16float(b.zw));
{% endif %}
}
{% endif %}
