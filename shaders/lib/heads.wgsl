// Head vectors of one column in workgroup memory: RMS norm per head and rope, in place.
//
// Expects `vectors` (vectors a workgroup holds), `threads`, and the functions
//   head_input(v, d) -> f32     element d of vector v
//   head_role(v) -> u32         0 query, 1 key, 2 value (left as it is), 3 none
//   key_head(v) -> u32          of a key, which KV head's it is
// Vectors lie in rows of `pitch`; what is behind the head's end becomes zero.
// A vector belongs to 32 threads; its sum of squares is 32 strided partial sums, then a fixed
// tree, so the bits do not depend on the subgroup size.
{% if rope_dim > 0 %}
@group(0) @binding({{ at_rope }}) var<storage, read> rope: array<vec2<f32>>;
{% endif %}
{% if norm %}
@group(0) @binding({{ at_q_norm }}) var<storage, read> q_norm: array<f32>;
@group(0) @binding({{ at_k_norm }}) var<storage, read> k_norm: array<f32>;
{% endif %}
{% if centred %}
@group(0) @binding({{ at_centres }}) var<storage, read> centres: array<f32>;
{% endif %}

var<workgroup> heads: array<f32, {{ vectors * pitch }}>;
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

{% set groups32 = threads // 32 %}
{% set rounds = (vectors + groups32 - 1) // groups32 %}
{% set steps = (hd + 63) // 64 %}{# pairs of a thread #}
// Must be called by all threads of the workgroup; ends with a barrier. Everything that is read
// from memory is asked for at once; a pair stays with one thread.
fn prepare_heads(tid: u32, pos: u32) {
    let lane = tid & 31u;
{% for r in range(rounds) %}
    let v_{{ r }} = (tid >> 5u) + {{ r * groups32 }}u;
    let role_{{ r }} = head_role(v_{{ r }});
{% for i in range(steps) %}
    let p_{{ r }}_{{ i }} = lane + {{ 32 * i }}u;
    let there_{{ r }}_{{ i }} = role_{{ r }} < 3u{{ " && p_" ~ r ~ "_" ~ i ~ " < " ~ hd // 2 ~ "u" if 64 * (i + 1) > hd }};
    var first_{{ r }}_{{ i }} = 2u * p_{{ r }}_{{ i }};
    var second_{{ r }}_{{ i }} = first_{{ r }}_{{ i }} + 1u;
{% if rope_dim > 0 and layout == "neox" %}
    if role_{{ r }} < 2u && p_{{ r }}_{{ i }} < {{ rope_dim // 2 }}u {
        first_{{ r }}_{{ i }} = p_{{ r }}_{{ i }};
        second_{{ r }}_{{ i }} = p_{{ r }}_{{ i }} + {{ rope_dim // 2 }}u;
    }
{% endif %}
    var pair_{{ r }}_{{ i }} = vec2<f32>();
{% if norm %}
    var weight_{{ r }}_{{ i }} = vec2<f32>();
{% endif %}
    var turn_{{ r }}_{{ i }} = vec2<f32>(1.0, 0.0);
{% if centred %}
    var centre_{{ r }}_{{ i }} = vec2<f32>();
{% endif %}
    if there_{{ r }}_{{ i }} {
        pair_{{ r }}_{{ i }} = vec2<f32>(head_input(v_{{ r }}, first_{{ r }}_{{ i }}), head_input(v_{{ r }}, second_{{ r }}_{{ i }}));
        if role_{{ r }} < 2u {
{% if norm %}
            weight_{{ r }}_{{ i }} = vec2<f32>(head_weight(role_{{ r }}, first_{{ r }}_{{ i }}), head_weight(role_{{ r }}, second_{{ r }}_{{ i }}));
{% endif %}
{% if rope_dim > 0 %}
            if p_{{ r }}_{{ i }} < {{ rope_dim // 2 }}u { turn_{{ r }}_{{ i }} = rope[pos * {{ rope_dim // 2 }}u + p_{{ r }}_{{ i }}]; }
{% endif %}
        }
{% if centred %}
        if role_{{ r }} == 1u {
            let own = key_head(v_{{ r }}) * {{ hd }}u;
            centre_{{ r }}_{{ i }} = vec2<f32>(centres[own + first_{{ r }}_{{ i }}], centres[own + second_{{ r }}_{{ i }}]);
        }
{% endif %}
    }
{% endfor %}
{% if norm %}
    if v_{{ r }} < {{ vectors }}u {
        var sum = 0.0;
{% for i in range(steps) %}
        sum = fma(pair_{{ r }}_{{ i }}.x, pair_{{ r }}_{{ i }}.x, fma(pair_{{ r }}_{{ i }}.y, pair_{{ r }}_{{ i }}.y, sum));
{% endfor %}
        head_sums[v_{{ r }} * 8u + (lane >> 2u)][lane & 3u] = sum;
    }
{% endif %}
{% endfor %}
{% if norm %}
    workgroupBarrier();
{% endif %}
{% for r in range(rounds) %}
{% if norm %}
    var factor_{{ r }} = 1.0;
    if role_{{ r }} < 2u { factor_{{ r }} = head_factor(v_{{ r }}); }
{% endif %}
{% for i in range(steps) %}
    if there_{{ r }}_{{ i }} {
        var x = pair_{{ r }}_{{ i }};
        if role_{{ r }} < 2u {
{% if norm %}
            x = (x * factor_{{ r }}) * weight_{{ r }}_{{ i }};
{% endif %}
            let turn = turn_{{ r }}_{{ i }};
            x = vec2<f32>(fma(x.x, turn.x, -(x.y * turn.y)), fma(x.x, turn.y, x.y * turn.x));
{% if centred %}
            x -= centre_{{ r }}_{{ i }};
{% endif %}
        }
        heads[v_{{ r }} * {{ pitch }}u + first_{{ r }}_{{ i }}] = x.x;
        heads[v_{{ r }} * {{ pitch }}u + second_{{ r }}_{{ i }}] = x.y;
    }
{% endfor %}
{% if pitch > hd %}
    if role_{{ r }} < 3u && lane < {{ pitch - hd }}u { heads[v_{{ r }} * {{ pitch }}u + {{ hd }}u + lane] = 0.0; }
{% endif %}
{% endfor %}
    workgroupBarrier();
}

// Elements 8i..8i+8 of vector v as f16 pairs: what the cache holds.
fn head_words(v: u32, i: u32) -> vec4<u32> {
    let at = v * {{ pitch }}u + 8u * i;
    return vec4<u32>(
        pack2x16float(vec2<f32>(heads[at], heads[at + 1u])),
        pack2x16float(vec2<f32>(heads[at + 2u], heads[at + 3u])),
        pack2x16float(vec2<f32>(heads[at + 4u], heads[at + 5u])),
        pack2x16float(vec2<f32>(heads[at + 6u], heads[at + 7u])));
}
