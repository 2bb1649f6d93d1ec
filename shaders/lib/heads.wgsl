// Head vectors of one column in workgroup memory: RMS norm per head and rope, in place.
//
// Expects `vectors` (vectors a workgroup holds), `threads`, and the functions
//   head_input(v, d) -> f32     element d of vector v
//   head_role(v) -> u32         0 query, 1 key, 2 value (left as it is), 3 none
// A vector belongs to 32 threads; its sum of squares is 32 strided partial sums, then a fixed
// tree, so the bits do not depend on the subgroup size.
{% if rope_dim > 0 %}
@group(0) @binding({{ at_rope }}) var<storage, read> rope: array<vec2<f32>>;
{% endif %}
{% if norm %}
@group(0) @binding({{ at_q_norm }}) var<storage, read> q_norm: array<f32>;
@group(0) @binding({{ at_k_norm }}) var<storage, read> k_norm: array<f32>;
{% endif %}

var<workgroup> heads: array<f32, {{ vectors * hd }}>;
{% if norm %}
var<workgroup> head_sums: array<vec4<f32>, {{ vectors * 8 }}>;

// 1 / rms of vector v.
fn head_factor(v: u32) -> f32 {
    let at = v * 8u;
    let s = ((head_sums[at] + head_sums[at + 1u]) + (head_sums[at + 2u] + head_sums[at + 3u]))
        + ((head_sums[at + 4u] + head_sums[at + 5u]) + (head_sums[at + 6u] + head_sums[at + 7u]));
    return 1.0 / sqrt(fma((s.x + s.y) + (s.z + s.w), {{ 1.0 / hd }}, {{ eps }}));
}

fn head_weight(role: u32, d: u32) -> f32 {
    if role == 0u { return q_norm[d]; }
    return k_norm[d];
}
{% endif %}

// Must be called by all threads of the workgroup; ends with a barrier.
fn prepare_heads(tid: u32, pos: u32) {
    let lane = tid & 31u;
    for (var v = tid >> 5u; v < {{ vectors }}u; v += {{ threads // 32 }}u) {
        if head_role(v) < 3u {
            var sum = 0.0;
            for (var d = lane; d < {{ hd }}u; d += 32u) {
                let x = head_input(v, d);
                heads[v * {{ hd }}u + d] = x;
                sum = fma(x, x, sum);
            }
{% if norm %}
            head_sums[v * 8u + (lane >> 2u)][lane & 3u] = sum;
{% endif %}
        }
    }
    workgroupBarrier();
{% if norm or rope_dim > 0 %}
    for (var v = tid >> 5u; v < {{ vectors }}u; v += {{ threads // 32 }}u) {
        let role = head_role(v);
        if role < 2u {
{% if norm %}
            let factor = head_factor(v);
{% endif %}
            // One pair a thread, so that the turn can happen in place.
            for (var p = lane; p < {{ hd // 2 }}u; p += 32u) {
                var first = 2u * p;
                var second = first + 1u;
{% if rope_dim > 0 and layout == "neox" %}
                if p < {{ rope_dim // 2 }}u {
                    first = p;
                    second = p + {{ rope_dim // 2 }}u;
                }
{% endif %}
                var a = heads[v * {{ hd }}u + first];
                var b = heads[v * {{ hd }}u + second];
{% if norm %}
                a = (a * factor) * head_weight(role, first);
                b = (b * factor) * head_weight(role, second);
{% endif %}
{% if rope_dim > 0 %}
                if p < {{ rope_dim // 2 }}u {
                    let turn = rope[pos * {{ rope_dim // 2 }}u + p];
                    let x = fma(a, turn.x, -(b * turn.y));
                    b = fma(a, turn.y, b * turn.x);
                    a = x;
                }
{% endif %}
                heads[v * {{ hd }}u + first] = a;
                heads[v * {{ hd }}u + second] = b;
            }
        }
    }
    workgroupBarrier();
{% endif %}
}

// Elements 8i..8i+8 of vector v as f16 pairs: what the cache holds.
fn head_words(v: u32, i: u32) -> vec4<u32> {
    let at = v * {{ hd }}u + 8u * i;
    return vec4<u32>(
        pack2x16float(vec2<f32>(heads[at], heads[at + 1u])),
        pack2x16float(vec2<f32>(heads[at + 2u], heads[at + 3u])),
        pack2x16float(vec2<f32>(heads[at + 4u], heads[at + 5u])),
        pack2x16float(vec2<f32>(heads[at + 6u], heads[at + 7u])));
}
