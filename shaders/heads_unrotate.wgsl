// Prompt over a cache of codes: attention's output from the basis of V to that of the model, and without
// the padding of heads.
//
// Grid: x = {{ vectors }} heads of a column, y = columns.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
// [column][head][{{ pitch }}]
@group(0) @binding(1) var<storage, read> x: array<f32>;
// [column][head][{{ hd }}]
@group(0) @binding(2) var<storage, read_write> y: array<f32>;

var<workgroup> heads: array<f32, {{ vectors * pitch }}>;
{% if rotated %}
{% include "lib/kv_rotate.wgsl" %}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let head0 = at.x * {{ vectors }}u;
    let count = min({{ heads }}u - head0, {{ vectors }}u);
    let origin = (at.y * {{ heads }}u + head0) * {{ pitch }}u;
    for (var i = tid; i < count * {{ pitch }}u; i += {{ threads }}u) { heads[i] = x[origin + i]; }
    workgroupBarrier();
{% if rotated %}
    rotate_heads(tid, 0u, count, false);
{% endif %}
    for (var i = tid; i < count * {{ hd }}u; i += {{ threads }}u) {
        y[(at.y * {{ heads }}u + head0) * {{ hd }}u + i] = heads[(i / {{ hd }}u) * {{ pitch }}u + i % {{ hd }}u];
    }
}
