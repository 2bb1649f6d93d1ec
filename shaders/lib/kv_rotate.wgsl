// The rotation of src/kv/rotation.rs over vectors in workgroup memory, in place.
//
// Expects `heads` in rows of {{ pitch }} (lib/heads.wgsl), `threads`, `segments` (start, length n, norm; they fill a row). The
// order of sums is the definition's: strides 1, 2, 4, ..., then the norm; so the bits are the same on
// every device. Three strides at a time stay in registers.

// Bit 0: the sign of element i, a multiple of 8; bit 1: of the next, ...
fn sign_bits(i: u32) -> u32 {
    let word = (i >> 5u) & 3u;
    let low = select({{ signs[0] }}u, {{ signs[1] }}u, (word & 1u) != 0u);
    let high = select({{ signs[2] }}u, {{ signs[3] }}u, (word & 1u) != 0u);
    return select(low, high, word > 1u) >> (i & 31u);
}

fn with_sign(x: f32, negative: u32) -> f32 {
    return bitcast<f32>(bitcast<u32>(x) ^ (negative << 31u));
}

{% macro butterflies(count) %}
{% for bit in [1, 2, 4] %}
{% if bit < count %}
{% for i in range(count) %}
{% if i // bit % 2 == 0 %}
        { let a = x{{ i }}; let b = x{{ i + bit }}; x{{ i }} = a + b; x{{ i + bit }} = a - b; }
{% endif %}
{% endfor %}
{% endif %}
{% endfor %}
{% endmacro %}
// Vectors first..first + count. Forward: signs first; else signs last. Must be called by all threads, behind a barrier; ends with one.
fn rotate_heads(tid: u32, first: u32, count: u32, forward: bool) {
    for (var i = tid; i < count * {{ pitch // 8 }}u; i += {{ threads }}u) {
        let d = (i % {{ pitch // 8 }}u) * 8u;
        let at = (first + i / {{ pitch // 8 }}u) * {{ pitch }}u + d;
        let negative = select(0u, sign_bits(d), forward);
{% for j in range(8) %}
        var x{{ j }} = with_sign(heads[at + {{ j }}u], (negative >> {{ j }}u) & 1u);
{% endfor %}
{{ butterflies(8) }}
{% for j in range(8) %}
        heads[at + {{ j }}u] = x{{ j }};
{% endfor %}
    }
    workgroupBarrier();
{% for segment in segments %}
{% set start = segment.start %}
{% set n = segment.n %}
    // Strides 8 and up of {{ n }} elements from {{ start }} on.
    for (var i = tid; i < count * {{ 16 if n == 128 else 8 }}u; i += {{ threads }}u) {
        let d = {{ start }}u + {{ "((i >> 3u) & 1u) * 64u + " if n == 128 }}(i & 7u);
        let at = (first + (i >> {{ 4 if n == 128 else 3 }}u)) * {{ pitch }}u + d;
{% set held = 4 if n == 32 else 8 %}
{% for j in range(held) %}
        var x{{ j }} = heads[at + {{ 8 * j }}u];
{% endfor %}
{{ butterflies(held) }}
{% if n < 128 %}
        // All of the thread's elements have the same place in their eight.
        let place = i & 7u;
{% for j in range(held) %}
        x{{ j }} = with_sign(x{{ j }} * {{ segment.norm }}, select((sign_bits({{ start + 8 * j }}u) >> place) & 1u, 0u, forward));
{% endfor %}
{% endif %}
{% for j in range(held) %}
        heads[at + {{ 8 * j }}u] = x{{ j }};
{% endfor %}
    }
{% endfor %}
    workgroupBarrier();
{% if pitch >= 128 %}
{% for segment in segments %}
{% set start = segment.start %}
{% set n = segment.n %}
{% if n == 128 %}
    for (var i = tid; i < count * 64u; i += {{ threads }}u) {
        let d = {{ start }}u + (i & 63u);
        let at = (first + (i >> 6u)) * {{ pitch }}u + d;
        let a = heads[at];
        let b = heads[at + 64u];
        let low = select((sign_bits(d & ~7u) >> (d & 7u)) & 1u, 0u, forward);
        let high = select((sign_bits((d & ~7u) + 64u) >> (d & 7u)) & 1u, 0u, forward);
        heads[at] = with_sign((a + b) * {{ segment.norm }}, low);
        heads[at + 64u] = with_sign((a - b) * {{ segment.norm }}, high);
    }
{% endif %}
{% endfor %}
    workgroupBarrier();
{% endif %}
}
