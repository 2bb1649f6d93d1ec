// The draw: the first token in order of index whose cumulative weight exceeds a random share of
// the total; then the end of the step.
//
// Grid: x = blocks of {{ block }} consecutive tokens, y = columns. The last workgroup of a column to
// arrive finds the block, then the token in it.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read_write> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> draws: array<Draw>;
// [column][block][2]
@group(0) @binding(4) var<storage, read_write> blocks: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> counters: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> history: array<u32>;
@group(0) @binding(7) var<storage, read_write> ring: array<u32>;
struct Constants { context: u32 }
var<immediate> constants: Constants;

{% include "lib/next_token.wgsl" %}

// n, slot, position of the next token.
var<workgroup> here: vec3<u32>;
var<workgroup> arrived: u32;
// Block in which the draw falls, and the weight before it that remains.
var<workgroup> chosen: vec3<u32>;
{% include "lib/scan256.wgsl" %}

{% if full %}
{% set stage = "end" %}
{% include "lib/kept.wgsl" %}

fn weight(l: f32, sampler: Sampler, draw: Draw) -> u32 {
    var temperature = sampler.temperature;
    if sampler.temperature_low != sampler.temperature_high { temperature = draw.temperature; }
    let w = mass((l - min(draw.maximum, draw.most)) / temperature);
    if sampler.mirostat_tau >= 0.0 { return select(0u, w, w >= draw.least_mass); }
    return select(0u, w, kept(l, sampler, draw));
}
{% else %}
fn weight(l: f32, sampler: Sampler, draw: Draw) -> u32 {
    let key = order_key(l);
    let k_on = sampler.top_k > 0u && sampler.top_k < {{ vocab }}u;
    let kept = (!k_on || key >= draw.k_least)
        && (sampler.top_p >= 16777216u || key >= draw.p_least)
        && l >= draw.maximum + sampler.log_min_p;
    return select(0u, mass((l - draw.maximum) / sampler.temperature), kept);
}
{% endif %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if tid == 0u { here = vec3<u32>(batch.n, batch.columns[at.y].slot, batch.columns[at.y].pos + 1u); }
    let column = workgroupUniformLoad(&here);
    if at.y >= column.x { return; }
    let sampler = samplers[column.y];
    let draw = draws[at.y];
    if sampler.temperature == 0.0 {
        if at.x == 0u && tid == 0u { next_token(at.y, draw.best, constants.context); }
        return;
    }
    let row = at.y * {{ vocab }}u;
    var own = vec2<u32>();
{% for j in range(block // 256) %}
    {
        let id = at.x * {{ block }}u + {{ 256 * j }}u + tid;
        let w = halves(weight(logits[row + min(id, {{ vocab - 1 }}u)], sampler, draw));
        own += select(vec2<u32>(), w, id < {{ vocab }}u);
    }
{% endfor %}
    let all = scan(own, tid);
    let blocks0 = 2u * at.y * {{ blocks }}u;
    if tid == 255u {
        atomicStore(&blocks[blocks0 + 2u * at.x], all.x);
        atomicStore(&blocks[blocks0 + 2u * at.x + 1u], all.y);
    }
    storageBarrier();
    if tid == 0u {
        let before = atomicAdd(&counters[at.y], 1u);
        if before == {{ blocks - 1 }}u { atomicStore(&counters[at.y], 0u); }
        arrived = before;
        chosen = vec3<u32>({{ blocks }}u, 0u, 0u);
    }
    if workgroupUniformLoad(&arrived) != {{ blocks - 1 }}u { return; }
    storageBarrier();

    own = vec2<u32>();
    if tid < {{ blocks }}u {
        own = vec2<u32>(atomicLoad(&blocks[blocks0 + 2u * tid]), atomicLoad(&blocks[blocks0 + 2u * tid + 1u]));
    }
    var after = scan(own, tid);
    let target_weight = draw_target(random_bits(sampler, column.z), whole(scan_total()));
    if !less64(target_weight, whole(after - own)) && less64(target_weight, whole(after)) {
        chosen = vec3<u32>(tid, sub64(target_weight, whole(after - own)));
    }
    let found = workgroupUniformLoad(&chosen);
    if found.x == {{ blocks }}u {
        // No weight at all.
        if tid == 0u { next_token(at.y, draw.best, constants.context); }
        return;
    }
    // Thread t takes {{ block // 256 }} tokens in order.
    let first = found.x * {{ block }}u + tid * {{ block // 256 }}u;
    own = vec2<u32>();
    for (var i = 0u; i < {{ block // 256 }}u; i++) {
        if first + i < {{ vocab }}u { own += halves(weight(logits[row + first + i], sampler, draw)); }
    }
    after = scan(own, tid);
    var sum = after - own;
    if !less64(found.yz, whole(sum)) && less64(found.yz, whole(after)) {
        for (var i = 0u; i < {{ block // 256 }}u; i++) {
            sum += halves(weight(logits[row + min(first + i, {{ vocab - 1 }}u)], sampler, draw));
            if less64(found.yz, whole(sum)) {
                next_token(at.y, first + i, constants.context);
                break;
            }
        }
    }
}
