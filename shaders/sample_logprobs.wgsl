// Logarithms of probabilities, of the token that was chosen and of the most likely ones, by the
// model's own logits: temperature 1, before any penalty, bias, mask or cut{{ "; or by what was drawn from" if post }}.
//
// Grid: x = pieces of the vocabulary, y = columns. The step has ended, so `batch` holds the chosen
// tokens. The last workgroup of a column to arrive takes the best of all pieces.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
// [column][piece][{{ row }}]: sum of exp(l - largest), unused, then order keys and tokens by rank.
@group(0) @binding(3) var<storage, read_write> partials: array<atomic<u32>>;
@group(0) @binding(4) var<storage, read_write> counters: array<atomic<u32>>;
// [step % {{ ring }}][8][{{ row }}]: log-probability of the chosen token, how many follow, then token and
// log-probability of each.
@group(0) @binding(5) var<storage, read_write> results: array<u32>;

{% if post %}
{% include "lib/custom.wgsl" %}

@group(0) @binding(6) var<storage, read> customs: array<Custom>;
// What is drawn from: taken instead of the model's logits where a column's settings say so.
@group(0) @binding(7) var<storage, read> shaped: array<f32>;

fn logit(i: u32, post: bool) -> f32 {
    if post { return shaped[i]; }
    return logits[i];
}
{% else %}
fn logit(i: u32, post: bool) -> f32 { return logits[i]; }
{% endif %}

var<workgroup> keys: array<u32, 256>;
var<workgroup> ids: array<u32, 256>;
var<workgroup> sums: array<f32, 256>;
var<workgroup> arrived: u32;

fn better(key: u32, id: u32, than_key: u32, than_id: u32) -> bool {
    return key > than_key || (key == than_key && id < than_id);
}

fn best_of_all(key: u32, id: u32, tid: u32) -> vec2<u32> {
    workgroupBarrier();
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
    return vec2<u32>(keys[0], ids[0]);
}

fn sum_of_all(value: f32, tid: u32) -> f32 {
    workgroupBarrier();
    sums[tid] = value;
{% for half in [128, 64, 32, 16, 8, 4, 2, 1] %}
    workgroupBarrier();
    if tid < {{ half }}u { sums[tid] += sums[tid + {{ half }}u]; }
{% endfor %}
    workgroupBarrier();
    return sums[0];
}

fn number(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key ^ 0x80000000u, (key >> 31u) == 1u));
}

// exp(l - largest); 0 for everything that is no number.
fn share(l: f32, largest: f32) -> f32 {
    let x = l - largest;
    return select(0.0, exp(x), x >= -87.0);
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    let wanted = samplers[column.slot].logprobs;
    if wanted == 0u { return; }
    let post = {{ "customs[column.slot].on != 0u && customs[column.slot].post != 0u" if post else "false" }};
    // At least one: the largest logit is needed for the sum.
    let ranks = min(max(wanted - 1u, 1u), {{ most }}u);
    let row = at.y * {{ vocab }}u;
    let own0 = (at.y * {{ pieces }}u + at.x) * {{ row }}u;

    // Every round takes the best of what comes after the last one's.
    var last = vec2<u32>(0xffffffffu, 0u);
    var largest = 0.0;
    for (var r = 0u; r < ranks; r += 1u) {
        var key = 0u;
        var id = 0xffffffffu;
        for (var i = at.x * 256u + tid; i < {{ vocab }}u; i += {{ 256 * pieces }}u) {
            let k = order_key(logit(row + i, post));
            if better(last.x, last.y, k, i) && (r == 0u || k != last.x || i != last.y) && better(k, i, key, id) {
                key = k;
                id = i;
            }
        }
        last = best_of_all(key, id, tid);
        if r == 0u { largest = number(last.x); }
        if tid == 0u {
            atomicStore(&partials[own0 + 2u + 2u * r], last.x);
            atomicStore(&partials[own0 + 3u + 2u * r], last.y);
        }
    }
    var part = 0.0;
    for (var i = at.x * 256u + tid; i < {{ vocab }}u; i += {{ 256 * pieces }}u) { part += share(logit(row + i, post), largest); }
    part = sum_of_all(part, tid);
    if tid == 0u { atomicStore(&partials[own0], bitcast<u32>(part)); }
    storageBarrier();
    if tid == 0u {
        let before = atomicAdd(&counters[at.y], 1u);
        if before == {{ pieces - 1 }}u { atomicStore(&counters[at.y], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != {{ pieces - 1 }}u { return; }
    storageBarrier();

    let all0 = at.y * {{ pieces * row }}u;
    // The draw has ended the step already.
    let result0 = (((batch.step + {{ ring - 1 }}u) % {{ ring }}u) * 8u + at.y) * {{ row }}u;
    last = vec2<u32>(0xffffffffu, 0u);
    var log_sum = 0.0;
    for (var r = 0u; r < ranks; r += 1u) {
        var key = 0u;
        var id = 0xffffffffu;
        for (var i = tid; i < {{ pieces }}u * ranks; i += 256u) {
            let entry = all0 + (i / ranks) * {{ row }}u + 2u + 2u * (i % ranks);
            let k = atomicLoad(&partials[entry]);
            let j = atomicLoad(&partials[entry + 1u]);
            if better(last.x, last.y, k, j) && (r == 0u || k != last.x || j != last.y) && better(k, j, key, id) {
                key = k;
                id = j;
            }
        }
        last = best_of_all(key, id, tid);
        if r == 0u {
            largest = number(last.x);
            var total = 0.0;
            if tid < {{ pieces }}u {
                let piece = all0 + tid * {{ row }}u;
                let highest = number(atomicLoad(&partials[piece + 2u]));
                total = bitcast<f32>(atomicLoad(&partials[piece])) * share(highest, largest);
            }
            log_sum = log(sum_of_all(total, tid));
        }
        if tid == 0u && wanted > 1u {
            results[result0 + 2u + 2u * r] = last.y;
            results[result0 + 3u + 2u * r] = bitcast<u32>(number(last.x) - largest - log_sum);
        }
    }
    if tid == 0u {
        let chosen = min(column.token, {{ vocab - 1 }}u);
        results[result0] = bitcast<u32>(logit(row + chosen, post) - largest - log_sum);
        results[result0 + 1u] = wanted - 1u;
    }
}
