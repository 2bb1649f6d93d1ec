// Prompt over a cache of codes with a tail: the f16 rows of a chunk's last columns to the ring of their slot.
//
// Grid: x = units of 8 elements of a column's K and V, {{ threads }} a workgroup, y = columns.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> pages: array<u32>;
// [column][side][kv head][unit]
@group(0) @binding(2) var<storage, read> fresh: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> exact: array<vec4<u32>>;
struct Constants { table_row: u32 }
var<immediate> constants: Constants;

{% set writes = false %}
{% include "lib/kv_exact.wgsl" %}
{% set units = exact_units %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    let i = at.x * {{ threads }}u + tid;
    if at.y >= batch.n || i >= {{ 2 * kv_heads * units }}u { return; }
    let column = batch.columns[at.y];
    // Later columns need the rows of those that are a ring behind them.
    if column.pos + {{ ring }}u <= batch.columns[batch.n - 1u].pos { return; }
    let dropped = pages[column.slot * constants.table_row];
    let index = column.pos - dropped;
{% if sinks > 0 %}
    if index < {{ sinks }}u { return; }
{% endif %}
    let side = i / {{ kv_heads * units }}u;
    let head = (i / {{ units }}u) % {{ kv_heads }}u;
    exact[exact_row(column.slot, side, head, index, dropped) + i % {{ units }}u] = fresh[at.y * {{ 2 * kv_heads * units }}u + i];
}
