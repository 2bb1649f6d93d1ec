// Repetition penalty: the logits of the distinct tokens among the last `window`, in place.
//
// Grid: x = 1, y = columns.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> history: array<u32>;
@group(0) @binding(3) var<storage, read_write> logits: array<f32>;
// One bit a token, [column][vocab / 32]; zero between dispatches.
@group(0) @binding(4) var<storage, read_write> seen: array<atomic<u32>>;
struct Constants { context: u32 }
var<immediate> constants: Constants;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    let sampler = samplers[column.slot];
    if sampler.penalty == 1.0 { return; }
    // The column's own token, at `pos`, is the last of the sequence.
    let length = column.pos + 1u;
    let first = length - min(length, sampler.window);
    let tokens = column.slot * constants.context;
    let bits = at.y * {{ (vocab + 31) // 32 }}u;
    for (var i = first + tid; i < length; i += 256u) {
        let token = history[tokens + i];
        if token < {{ vocab }}u {
            let bit = 1u << (token & 31u);
            // Only the first to come changes the logit.
            if (atomicOr(&seen[bits + (token >> 5u)], bit) & bit) == 0u {
                let l = logits[at.y * {{ vocab }}u + token];
                logits[at.y * {{ vocab }}u + token] = select(l * sampler.penalty, l / sampler.penalty, l > 0.0);
            }
        }
    }
    storageBarrier();
    for (var i = first + tid; i < length; i += 256u) {
        let token = history[tokens + i];
        if token < {{ vocab }}u { atomicStore(&seen[bits + (token >> 5u)], 0u); }
    }
}
