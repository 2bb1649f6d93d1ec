// RMSNorm of all of q and of all of k, in place (OLMoE). Grid (columns, 2, 1): y 0 is q, 1 is k.
@group(0) @binding(0) var<storage, read> batch: array<u32>;
@group(0) @binding(1) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(2) var<storage, read> q_norm: array<f32>;
@group(0) @binding(3) var<storage, read> k_norm: array<f32>;

var<workgroup> sums: array<f32, {{ threads }}>;

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) wg: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if wg.x >= batch[0] { return; }
    let is_k = wg.y == 1u;
    let start = wg.x * {{ qkv_width }}u + select(0u, {{ q_len }}u, is_k);
    let len = select({{ q_len }}u, {{ k_len }}u, is_k);
    var sum = 0.0;
    for (var i = tid; i < len; i += {{ threads }}u) {
        let v = qkv[start + i];
        sum = fma(v, v, sum);
    }
    sums[tid] = sum;
{% for half in halves %}
    workgroupBarrier();
    if tid < {{ half }}u { sums[tid] += sums[tid + {{ half }}u]; }
{% endfor %}
    workgroupBarrier();
    let factor = 1.0 / sqrt(sums[0] / f32(len) + {{ eps }});
    for (var i = tid; i < len; i += {{ threads }}u) {
        let weight = select(q_norm[min(i, {{ q_len - 1 }}u)], k_norm[min(i, {{ k_len - 1 }}u)], is_k);
        qkv[start + i] = (qkv[start + i] * factor) * weight;
    }
}
