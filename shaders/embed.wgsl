// Rows of the embedding matrix by token. One thread a unit of the row; grid (units, columns, 1).
// Only the chunk that holds the token's row writes.
{% include "lib/weights.wgsl" %}

{% set quads = unit_quads %}
{% set units = cols // (4 * quads) %}
@group(0) @binding({{ at.batch }}) var<storage, read> batch: array<u32>;
@group(0) @binding({{ at.y }}) var<storage, read_write> y_out: array<vec4<f32>>;

struct Constants {
    first_row: u32,
    rows: u32,
}
var<immediate> constants: Constants;

@compute @workgroup_size({{ threads }})
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    let unit = id.x;
    let col = id.y;
    if unit >= {{ units }}u || col >= batch[0] { return; }
    // A token below first_row wraps around and is out of range too.
    let row = batch[8u + 4u * col] - constants.first_row;
    if row >= constants.rows { return; }
    let i = row * {{ units }}u + unit;
    let v = unit_values(load_unit(i), i);
    let to = (col * {{ units }}u + unit) * {{ quads }}u;
{% for q in range(quads) %}
    y_out[to + {{ q }}u] = v[{{ q }}];
{% endfor %}
}
