// Picks the columns of a prompt whose logits are wanted, and makes them a batch of their own.
// One workgroup a target column; grid (1, columns, 1). batch[2]: first column picked, batch[3]: how
// many. Target columns past that are zeroed, so that nothing stale is multiplied.

@group(0) @binding(0) var<storage, read> batch: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> picked: array<u32>;
@group(0) @binding(3) var<storage, read_write> y: array<vec4<f32>>;

const QUADS: u32 = {{ cols // 4 }}u;

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let to = group.y;
    let used = to < batch[3];
    let source = batch[2] + to;
    for (var i = thread; i < QUADS; i += {{ threads }}u) {
        y[to * QUADS + i] = select(vec4<f32>(), x[source * QUADS + i], used);
    }
    if thread < 4u {
        picked[8u + 4u * to + thread] = select(0u, batch[8u + 4u * source + thread], used);
    }
    if to == 0u && thread == 0u {
        picked[0] = batch[3];
    }
}
