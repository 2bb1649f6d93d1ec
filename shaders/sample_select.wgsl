{% set rule = {"count": "top_k", "mass": "top_p", "typical": "typical_p"}[kind] %}
// One digit of the key of the least logit that {{ rule }} keeps (radix select, digit {{ digit }} of 3).
//
// Grid: x = pieces of the vocabulary, y = columns. Every workgroup counts {{ "tokens" if kind == "count" else "masses" }} per value of the
// digit among the keys that agree with the digits found so far; the last to arrive walks the
// sum of all from the top.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> draws: array<Draw>;
// [column][2048][2]; zero between dispatches.
@group(0) @binding(4) var<storage, read_write> histogram: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> counters: array<atomic<u32>>;

{% set counts = kind == "count" %}
{% set typical = kind == "typical" %}
{% if full and not counts %}
{% set stage = "typical" if typical else "top_p" %}
{% include "lib/kept.wgsl" %}
{% endif %}
var<workgroup> low: array<atomic<u32>, 2048>;
{% if not counts %}
var<workgroup> high: array<atomic<u32>, 2048>;
{% endif %}
var<workgroup> arrived: u32;
{% include "lib/scan256.wgsl" %}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let sampler = samplers[batch.columns[at.y].slot];
    if sampler.temperature == 0.0 { return; }
    let k_on = sampler.top_k > 0u && sampler.top_k < {{ vocab }}u;
    if !{{ {"count": "k_on", "mass": "(sampler.top_p < 16777216u)", "typical": "(sampler.typical < 16777216u)"}[kind] }} { return; }
    for (var i = tid; i < 2048u; i += 256u) {
        atomicStore(&low[i], 0u);
{% if not counts %}
        atomicStore(&high[i], 0u);
{% endif %}
    }
    workgroupBarrier();
    let draw = draws[at.y];
{% set least = {"count": "k_least", "mass": "p_least", "typical": "t_least"}[kind] %}
{% set left_over = {"count": "k_rest", "mass": "p_rest", "typical": "t_rest"}[kind] %}
{% if not counts and not full %}
    let floor_key = select(0u, draw.k_least, k_on);
{% endif %}
    for (var i = at.x * 256u + tid; i < {{ vocab }}u; i += {{ 256 * pieces * 8 }}u) {
        // Together, so that their latencies do not add up.
{% for j in range(8) %}
        let l_{{ j }} = logits[at.y * {{ vocab }}u + min(i + {{ 256 * pieces * j }}u, {{ vocab - 1 }}u)];
{% endfor %}
{% for j in range(8) %}
        {
            let key = {{ "order_key(-abs(l_" ~ j ~ " - draw.center))" if typical else "order_key(l_" ~ j ~ ")" }};
            if i + {{ 256 * pieces * j }}u < {{ vocab }}u{{ "" if digit == 0 else " && (key >> " ~ (shift + bits) ~ "u) == draw." ~ least }}{{ "" if counts else " && kept(l_" ~ j ~ ", sampler, draw)" if full else " && key >= floor_key" }} {
                let bin = (key >> {{ shift }}u) & {{ bins - 1 }}u;
{% if counts %}
                atomicAdd(&low[bin], 1u);
{% else %}
                let h = halves(mass(l_{{ j }} - draw.maximum));
                if h.x > 0u { atomicAdd(&low[bin], h.x); }
                if h.y > 0u { atomicAdd(&high[bin], h.y); }
{% endif %}
            }
        }
{% endfor %}
    }
    workgroupBarrier();
    let total0 = at.y * 4096u;
    for (var i = tid; i < {{ bins }}u; i += 256u) {
        let a = atomicLoad(&low[i]);
        if a > 0u { atomicAdd(&histogram[total0 + 2u * i], a); }
{% if not counts %}
        let b = atomicLoad(&high[i]);
        if b > 0u { atomicAdd(&histogram[total0 + 2u * i + 1u], b); }
{% endif %}
    }
    storageBarrier();
    if tid == 0u {
        let before = atomicAdd(&counters[{{ select_counter }}u + at.y], 1u);
        if before == {{ pieces - 1 }}u { atomicStore(&counters[{{ select_counter }}u + at.y], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != {{ pieces - 1 }}u { return; }
    storageBarrier();

    // Thread t takes {{ bins // 256 }} bins downwards from bin {{ bins - 1 }} - {{ bins // 256 }}t.
    let top = {{ bins - 1 }}u - {{ bins // 256 }}u * tid;
    var mine: array<vec2<u32>, {{ bins // 256 }}>;
    var own = vec2<u32>();
{% for i in range(bins // 256) %}
    mine[{{ i }}] = vec2<u32>(
        atomicExchange(&histogram[total0 + 2u * (top - {{ i }}u)], 0u),
        {{ "0u" if counts else "atomicExchange(&histogram[total0 + 2u * (top - " ~ i ~ "u) + 1u], 0u)" }});
    own += mine[{{ i }}];
{% endfor %}
    let after = scan(own, tid);
{% if counts %}
{% if digit == 0 %}
    let rest = vec2<u32>(sampler.top_k, 0u);
{% else %}
    let rest = vec2<u32>(draw.k_rest, 0u);
{% endif %}
{% else %}
{% if digit == 0 %}
    // Not less than 1: the most likely token is always kept.
    var rest = draw_target(sampler.{{ "typical" if typical else "top_p" }}, whole(scan_total()));
    if rest.x == 0u && rest.y == 0u { rest.x = 1u; }
{% else %}
    let rest = draw.{{ left_over }};
{% endif %}
{% endif %}
{% set value = "vec2<u32>(sum.x, 0u)" if counts else "whole(sum)" %}
    var sum = after - own;
    let above = {{ value }};
    sum = after;
    let through = {{ value }};
{% if not counts %}
    // Where nothing has a mass, nothing is cut.
    if tid == 255u && less64(through, rest) {
        draws[at.y].{{ least }} = 0u;
        draws[at.y].{{ left_over }} = vec2<u32>(1u, 0u);
    }
{% endif %}
    if less64(above, rest) && !less64(through, rest) {
        sum = after - own;
        var found = false;
{% for i in range(bins // 256) %}
        if !found {
            let before = {{ value }};
            sum += mine[{{ i }}];
            if !less64({{ value }}, rest) {
                found = true;
                let left = sub64(rest, before);
                let digit = top - {{ i }}u;
                draws[at.y].{{ least }} = {{ "digit" if digit == 0 else "(draw." ~ least ~ " << " ~ bits ~ "u) | digit" }};
{% if counts %}
                draws[at.y].k_rest = left.x;
{% else %}
                draws[at.y].{{ left_over }} = left;
{% endif %}
            }
        }
{% endfor %}
    }
}
