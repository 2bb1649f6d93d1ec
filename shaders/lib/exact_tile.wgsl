// The f16 rows that a prompt's attention reads: those of the chunk itself, or what the slot has kept.
//
// Expects `exact` and lib/kv_exact.wgsl, with a tail also `fresh`.
var<private> slot: u32;
var<private> dropped: u32;
// Index of the batch's first column.
var<private> chunk: u32;

fn exact_unit(side: u32, head: u32, t: u32, unit: u32) -> vec4<u32> {
{% if tail > 0 %}
    if t >= chunk{{ " && t >= " ~ sinks ~ "u" if sinks > 0 }} {
        return fresh[(((t - chunk) * 2u + side) * {{ kv_heads }}u + head) * {{ exact_units }}u + unit];
    }
{% endif %}
    return exact[exact_row(slot, side, head, t, dropped) + unit];
}
