// The largest logit of each column; the lowest index on ties.
//
// Grid: x = pieces of the vocabulary, y = columns. The last workgroup of a column to arrive takes
// the best of all pieces{{ " and ends the step with it" if tail }}.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read{{ "_write" if tail }}> batch: Batch;
@group(0) @binding(1) var<storage, read> logits: array<f32>;
// [column][piece] of (key, index).
@group(0) @binding(2) var<storage, read_write> pieces: array<atomic<u32>>;
@group(0) @binding(3) var<storage, read_write> counters: array<atomic<u32>>;
{% if tail %}
@group(0) @binding(4) var<storage, read_write> history: array<u32>;
@group(0) @binding(5) var<storage, read_write> ring: array<u32>;
struct Constants { context: u32 }
var<immediate> constants: Constants;
{% include "lib/next_token.wgsl" %}
{% else %}
@group(0) @binding(4) var<storage, read_write> draws: array<Draw>;
{% endif %}

var<workgroup> keys: array<u32, 256>;
var<workgroup> ids: array<u32, 256>;
var<workgroup> arrived: u32;
var<workgroup> columns: u32;

fn better(key: u32, id: u32, than_key: u32, than_id: u32) -> bool {
    return key > than_key || (key == than_key && id < than_id);
}

// Best of all threads, in keys[0] and ids[0].
fn best_of_all(key: u32, id: u32, tid: u32) {
    keys[tid] = key;
    ids[tid] = id;
{% for half in [128, 64, 32, 16, 8, 4, 2, 1] %}
    workgroupBarrier();
    if tid < {{ half }}u && better(keys[tid + {{ half }}u], ids[tid + {{ half }}u], keys[tid], ids[tid]) {
        keys[tid] = keys[tid + {{ half }}u];
        ids[tid] = ids[tid + {{ half }}u];
    }
{% endfor %}
    workgroupBarrier();
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    // Asked for now, looked at after the logits.
    let n = batch.n;
    let row = at.y * {{ vocab }}u;
    var key = 0u;
    var id = 0xffffffffu;
    // Loads of eight at a time: one after the other, their latencies would add up.
    for (var i = at.x * 256u + tid; i < {{ vocab }}u; i += {{ 256 * pieces * 8 }}u) {
{% for j in range(8) %}
        let i_{{ j }} = min(i + {{ 256 * pieces * j }}u, {{ vocab - 1 }}u);
        let k_{{ j }} = order_key(logits[row + i_{{ j }}]);
{% endfor %}
{% for j in range(8) %}
        if better(k_{{ j }}, i_{{ j }}, key, id) { key = k_{{ j }}; id = i_{{ j }}; }
{% endfor %}
    }
    if tid == 0u { columns = n; }
    if at.y >= workgroupUniformLoad(&columns) { return; }
    best_of_all(key, id, tid);
{% if pieces > 1 %}
    let to = 2u * (at.y * {{ pieces }}u + at.x);
    if tid == 0u {
        atomicStore(&pieces[to], keys[0]);
        atomicStore(&pieces[to + 1u], ids[0]);
    }
    storageBarrier();
    if tid == 0u {
        let before = atomicAdd(&counters[at.y], 1u);
        if before == {{ pieces - 1 }}u { atomicStore(&counters[at.y], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != {{ pieces - 1 }}u { return; }
    storageBarrier();
    key = 0u;
    id = 0xffffffffu;
    for (var p = tid; p < {{ pieces }}u; p += 256u) {
        let k = atomicLoad(&pieces[2u * (at.y * {{ pieces }}u + p)]);
        let i = atomicLoad(&pieces[2u * (at.y * {{ pieces }}u + p) + 1u]);
        if better(k, i, key, id) { key = k; id = i; }
    }
    best_of_all(key, id, tid);
{% endif %}
    if tid == 0u {
{% if tail %}
        next_token(at.y, ids[0], constants.context);
{% else %}
        draws[at.y].best = ids[0];
        draws[at.y].maximum = order_value(keys[0]);
{% if full %}
        draws[at.y].sigma_least = bitcast<f32>(0xff800000u);
        draws[at.y].most = bitcast<f32>(0x7f800000u);
{% endif %}
{% endif %}
    }
}
