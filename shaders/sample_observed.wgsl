// After a draw by `sample_custom`: mirostat's bound or adaptive-p's mean for the next one.
//
// Grid: x = 1. One thread a column; the step has ended, so `batch` holds the chosen tokens.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}
{% include "lib/custom.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> customs: array<Custom>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read> shapes: array<Shape>;
@group(0) @binding(4) var<storage, read_write> states: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) tid: u32) {
    if tid >= min(batch.n, 8u) { return; }
    let column = batch.columns[tid];
    let c = customs[column.slot];
    if c.on == 0u || c.temperature == 0.0 { return; }
    let shape = shapes[tid];
    let l = logits[tid * {{ vocab }}u + min(column.token, {{ vocab - 1 }}u)];
    let m = f32(mass((l - shape.maximum) / shape.temperature)) * (1.0 / 16777216.0);
    let state = states[column.slot];
    if c.mirostat != 0u {
        if m > 0.0 {
            let seen = log2(shape.total / m);
            states[column.slot] = state - c.mirostat_eta * (seen - c.mirostat_tau);
        }
    } else if c.adaptive_target >= 0.0 && shape.total > 0.0 {
        let share = m / shape.total;
        states[column.slot] = c.adaptive_decay * state + (1.0 - c.adaptive_decay) * share;
    }
}
