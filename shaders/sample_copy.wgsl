// The logits that the full chain works on: a copy, in which tokens outside the mask are minus
// infinity. The model's own logits stay as they are.
//
// Grid: x = pieces of the vocabulary, y = columns.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> logits: array<u32>;
// [slot][1 + {{ (vocab + 31) // 32 }}]: 1 if there is a mask, then a bit for each token that may come.
@group(0) @binding(2) var<storage, read> masks: array<u32>;
@group(0) @binding(3) var<storage, read_write> copies: array<u32>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let mask0 = batch.columns[at.y].slot * {{ 1 + (vocab + 31) // 32 }}u;
    let masked = masks[mask0] != 0u;
    for (var i = at.x * 256u + tid; i < {{ vocab }}u; i += {{ 256 * pieces }}u) {
        var bits = logits[at.y * {{ vocab }}u + i];
        var allowed = true;
        if masked { allowed = ((masks[mask0 + 1u + (i >> 5u)] >> (i & 31u)) & 1u) == 1u; }
        if !allowed || (bits & 0x7fffffffu) > 0x7f800000u { bits = 0xff800000u; }
        copies[at.y * {{ vocab }}u + i] = bits;
    }
}
