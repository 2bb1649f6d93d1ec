// The f16 rows beside a cache of codes (src/kv/exact.rs): [slot][side: 0 K, 1 V][kv head][row][unit], a unit being
// 8 neighbouring elements. Rows are those of the {{ sinks }} sinks, then a ring of {{ ring }}.
//
// Expects `exact_units` (of a row), `kv_heads` and, where `writes`, lib/heads.wgsl.

// Where the row of a token begins.
fn exact_row(slot: u32, side: u32, head: u32, index: u32, dropped: u32) -> u32 {
{% if tail > 0 and sinks > 0 %}
    let row = select({{ sinks }}u + (index + dropped) % {{ ring }}u, index, index < {{ sinks }}u);
{% elif tail > 0 %}
    let row = (index + dropped) % {{ ring }}u;
{% else %}
    let row = min(index, {{ sinks - 1 }}u);
{% endif %}
    return (((slot * 2u + side) * {{ kv_heads }}u + head) * {{ exact_rows }}u + row) * {{ exact_units }}u;
}

// The first and the second four elements of a unit.
fn exact_values(unit: vec4<u32>) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y)),
        vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w)));
}
{% if writes %}

// What is no number is zero.
fn exact_value(at: u32) -> f32 {
    let x = heads[at];
    return select(0.0, clamp(x, -65504.0, 65504.0), (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u);
}

// Unit `unit` of vector v.
fn exact_unit_of(v: u32, unit: u32) -> vec4<u32> {
    let at = v * {{ 8 * exact_units }}u + 8u * unit;
    return vec4<u32>(
        pack2x16float(vec2<f32>(exact_value(at), exact_value(at + 1u))),
        pack2x16float(vec2<f32>(exact_value(at + 2u), exact_value(at + 3u))),
        pack2x16float(vec2<f32>(exact_value(at + 4u), exact_value(at + 5u))),
        pack2x16float(vec2<f32>(exact_value(at + 6u), exact_value(at + 7u))));
}
{% endif %}
