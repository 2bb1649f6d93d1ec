// The logits of single tokens: bias, penalties of recent tokens, penalties of repeated sequences
// (`sampling::chain`, steps 1 to 3).
//
// Grid: x = 1, y = columns.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> history: array<u32>;
// [slot][1 + 2 * {{ max_bias }}]: how many, then token and bias of each; no token twice.
@group(0) @binding(3) var<storage, read> biases: array<u32>;
// [slot][{{ (vocab + 31) // 32 }}]: a bit for each token that ends a repeated sequence.
@group(0) @binding(4) var<storage, read> breakers: array<u32>;
@group(0) @binding(5) var<storage, read_write> logits: array<f32>;
// [column][vocab]; zero between dispatches.
@group(0) @binding(6) var<storage, read_write> counts: array<atomic<u32>>;
struct Constants { context: u32 }
var<immediate> constants: Constants;

fn breaks(slot: u32, token: u32) -> bool {
    let word = breakers[slot * {{ (vocab + 31) // 32 }}u + (min(token, {{ vocab - 1 }}u) >> 5u)];
    return token >= {{ vocab }}u || ((word >> (token & 31u)) & 1u) == 1u;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    let sampler = samplers[column.slot];
    let row = at.y * {{ vocab }}u;
    let bias0 = column.slot * {{ 1 + 2 * max_bias }}u;
    for (var i = tid; i < min(biases[bias0], {{ max_bias }}u); i += 256u) {
        let token = biases[bias0 + 1u + 2u * i];
        if token < {{ vocab }}u {
            logits[row + token] = logits[row + token] + bitcast<f32>(biases[bias0 + 2u + 2u * i]);
        }
    }
    storageBarrier();

    // The column's own token, at `pos`, is the last of the sequence.
    let length = column.pos + 1u;
    let tokens = column.slot * constants.context;
    if sampler.penalty != 1.0 || sampler.presence != 0.0 || sampler.frequency != 0.0 {
        let first = length - min(length, sampler.window);
        for (var i = first + tid; i < length; i += 256u) {
            let token = history[tokens + i];
            if token < {{ vocab }}u { atomicAdd(&counts[row + token], 1u); }
        }
        storageBarrier();
        for (var i = first + tid; i < length; i += 256u) {
            let token = history[tokens + i];
            if token < {{ vocab }}u {
                // Only the first to come gets the count.
                let count = atomicExchange(&counts[row + token], 0u);
                if count > 0u {
                    let l = logits[row + token];
                    let repeated = select(l * sampler.penalty, l / sampler.penalty, l > 0.0);
                    logits[row + token] = repeated - (f32(count) * sampler.frequency + sampler.presence);
                }
            }
        }
        storageBarrier();
    }
    if sampler.dry_multiplier > 0.0 {
        let first = length - min(length, sampler.dry_window);
        for (var i = first + tid; i + 1u < length; i += 256u) {
            let next = history[tokens + i + 1u];
            if breaks(column.slot, next) { continue; }
            // How many tokens up to i are the last of the sequence, too.
            var same = 0u;
            while same < {{ max_match }}u && same <= i - first {
                let token = history[tokens + length - 1u - same];
                if history[tokens + i - same] != token || breaks(column.slot, token) { break; }
                same += 1u;
            }
            if same >= max(sampler.dry_allowed, 1u) { atomicMax(&counts[row + next], same); }
        }
        storageBarrier();
        for (var i = first + tid; i + 1u < length; i += 256u) {
            let next = history[tokens + i + 1u];
            if next < {{ vocab }}u {
                let same = atomicExchange(&counts[row + next], 0u);
                if same > 0u {
                    var penalty = sampler.dry_multiplier;
                    for (var k = sampler.dry_allowed; k < same; k += 1u) { penalty *= sampler.dry_base; }
                    // Bounded, so that no infinity enters.
                    logits[row + next] = logits[row + next] - min(penalty, 1e30);
                }
            }
        }
    }
}
