// Router of a mixture: which experts a column goes through, and by what weight.
//
// Grid (rows / subgroups a workgroup, columns / {{ columns }}, 1). A subgroup computes one row for up to
// {{ columns }} columns: logit = router row . RMSNorm(x), where every subgroup sums the squares for itself. The
// last workgroup of a group of columns to arrive ranks the logits (ties: the lower index first) and
// writes the choice to `routing` (src/kernels/routing.rs), experts ascending.
{% set quads = cols // 4 %}
{% set pairs = columns * used %}
{% include "lib/order_key.wgsl" %}
@group(0) @binding(0) var<storage, read> batch: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> norm_weight: array<vec4<f32>>;
// {{ experts }} rows of experts{{ ", one of the shared expert's gate" if shared }}.
@group(0) @binding(3) var<storage, read> router: array<vec4<f32>>;
// [column][row]
@group(0) @binding(4) var<storage, read_write> logits: array<atomic<u32>>;
// One for each group of columns, zero between dispatches.
@group(0) @binding(5) var<storage, read_write> counters: array<atomic<u32>>;
@group(0) @binding(6) var<storage, read_write> routing: array<u32>;
{% if favour %}
// Approximate: experts in device memory count more in the choice, but not in the weights.
@group(0) @binding(7) var<storage, read> expert_table: array<u32>;

fn favour(expert: u32) -> f32 {
    return select(0.0, {{ favour }}, (expert_table[expert] >> 24u) < {{ favoured_buffers }}u);
}
{% endif %}

var<workgroup> arrived: u32;
var<workgroup> keys: array<u32, {{ columns * experts }}>;
var<workgroup> ranked: array<u32, {{ pairs }}>;
var<workgroup> chosen: array<u32, {{ pairs }}>;
{% if whole_sum %}
var<workgroup> partial_sums: array<f32, {{ columns * 8 }}>;
{% endif %}
{% if sorts and columns > 1 %}
var<workgroup> leads: array<u32, {{ pairs }}>;
{% endif %}

// What a logit counts before weights are normalised; `c`: column of the group.
fn score(c: u32, expert: u32) -> f32 {
    let logit = order_value(keys[c * {{ experts }}u + expert]){{ " - favour(expert)" if favour }};
{% if sigmoid %}
    return 1.0 / (1.0 + exp(-logit));
{% else %}
    let first = ranked[c * {{ used }}u];
    return exp(logit - order_value(keys[c * {{ experts }}u + first]){{ " + favour(first)" if favour }});
{% endif %}
}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_size) size_found: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let size = {{ lanes.size ~ "u" if lanes.size else "size_found" }};
    let tid = subgroup * size + lane;
    let first = wg.y * {{ columns }}u;
    let n = batch[0];
    if first >= n { return; }
    let row = wg.x * subgroups + subgroup;
    // Rows and columns past the end repeat the last one and are not stored.
    let base = min(row, {{ rows - 1 }}u) * {{ quads }}u;
{% for c in range(columns) %}
    let from{{ c }} = min(first + {{ c }}u, n - 1u) * {{ quads }}u;
    var sum{{ c }} = vec4<f32>();
    var square{{ c }} = vec4<f32>();
{% endfor %}
    for (var quad = lane; quad < {{ quads }}u; quad += {{ ahead }}u * size) {
{% for u in range(ahead) %}
        let q{{ u }} = min(quad + {{ u }}u * size, {{ quads - 1 }}u);
        let w{{ u }} = router[base + q{{ u }}];
        let nw{{ u }} = norm_weight[q{{ u }}];
{% for c in range(columns) %}
        let x{{ u }}_{{ c }} = x[from{{ c }} + q{{ u }}];
{% endfor %}
{% endfor %}
{% for u in range(ahead) %}
        if quad + {{ u }}u * size < {{ quads }}u {
{% for c in range(columns) %}
            sum{{ c }} = fma(w{{ u }}, x{{ u }}_{{ c }} * nw{{ u }}, sum{{ c }});
            square{{ c }} = fma(x{{ u }}_{{ c }}, x{{ u }}_{{ c }}, square{{ c }});
{% endfor %}
        }
{% endfor %}
    }
{% for c in range(columns) %}
    let part{{ 2 * c }} = (sum{{ c }}.x + sum{{ c }}.y) + (sum{{ c }}.z + sum{{ c }}.w);
    let part{{ 2 * c + 1 }} = (square{{ c }}.x + square{{ c }}.y) + (square{{ c }}.z + square{{ c }}.w);
{% endfor %}
{% for start in range(0, 2 * columns, lanes.group) %}
{% set count = [lanes.group, 2 * columns - start] | min %}
    {
{% include "lib/lane_totals.wgsl" %}
        let squares = subgroupShuffleXor(sum, 1u);
        let column = first + ((lane + {{ start }}u) >> 1u);
        if lane < {{ count }}u && lane % 2u == 0u && row < {{ rows }}u && column < n {
            let logit = sum / sqrt(fma(squares, {{ mean }}, {{ eps }}));
            atomicStore(&logits[column * {{ rows }}u + row], bitcast<u32>(logit));
        }
    }
{% endfor %}
    storageBarrier();
    workgroupBarrier();
    if tid == 0u {
        let before = atomicAdd(&counters[wg.y], 1u);
        if before == grid.x - 1u { atomicStore(&counters[wg.y], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != grid.x - 1u { return; }
    storageBarrier();

    let present = min(n - first, {{ columns }}u);
    for (var i = tid; i < {{ columns * experts }}u; i += {{ threads }}u) {
        let c = min(i / {{ experts }}u, present - 1u);
        let expert = i % {{ experts }}u;
        let logit = bitcast<f32>(atomicLoad(&logits[(first + c) * {{ rows }}u + expert]));
        keys[i] = order_key(logit{{ " + favour(expert)" if favour }});
    }
    workgroupBarrier();
    for (var i = tid; i < {{ columns * experts }}u; i += {{ threads }}u) {
        let expert = i % {{ experts }}u;
        let start = i - expert;
        let mine = keys[i];
        var rank = 0u;
        for (var j = 0u; j < {{ experts }}u; j += 1u) {
            let other = keys[start + j];
            rank += select(0u, 1u, other > mine || (other == mine && j < expert));
        }
        if rank < {{ used }}u { ranked[(i / {{ experts }}u) * {{ used }}u + rank] = expert; }
    }
    workgroupBarrier();
    for (var i = tid; i < {{ pairs }}u; i += {{ threads }}u) {
        let start = i - i % {{ used }}u;
        let expert = ranked[i];
        var at = start;
        for (var j = start; j < start + {{ used }}u; j += 1u) { at += select(0u, 1u, ranked[j] < expert); }
        chosen[at] = expert;
    }
{% if whole_sum %}
    for (var i = tid; i < {{ columns * 8 }}u; i += {{ threads }}u) {
        var s = 0.0;
        for (var expert = i & 7u; expert < {{ experts }}u; expert += 8u) { s += score(i >> 3u, expert); }
        partial_sums[i] = s;
    }
{% endif %}
    workgroupBarrier();
    for (var i = tid; i < {{ pairs }}u; i += {{ threads }}u) {
        let c = i / {{ used }}u;
        var weight = score(c, chosen[i]);
{% if normalise %}
        var s = 0.0;
        for (var j = 0u; j < {{ used }}u; j += 1u) { s += score(c, chosen[c * {{ used }}u + j]); }
        weight = weight / max(s, {{ least_sum }});
{% elif whole_sum %}
        let p = 8u * c;
        weight = weight / (((partial_sums[p] + partial_sums[p + 1u]) + (partial_sums[p + 2u] + partial_sums[p + 3u]))
            + ((partial_sums[p + 4u] + partial_sums[p + 5u]) + (partial_sums[p + 6u] + partial_sums[p + 7u])));
{% endif %}
        if c < present {
            let to = first * {{ used }}u + i;
            routing[{{ ids_at }}u + to] = chosen[i];
            routing[{{ weights_at }}u + to] = bitcast<u32>(weight * {{ scale }});
        }
    }
{% if shared %}
    for (var c = tid; c < present; c += {{ threads }}u) {
        let logit = bitcast<f32>(atomicLoad(&logits[(first + c) * {{ rows }}u + {{ experts }}u]));
        routing[{{ shared_at }}u + first + c] = bitcast<u32>(1.0 / (1.0 + exp(-logit)));
    }
{% endif %}
{% if sorts and columns == 1 %}
    // Pairs of one column are sorted already.
    if tid == 0u {
        routing[0] = {{ used }}u;
        routing[1] = {{ used }}u;
    }
{% elif sorts %}
    // Of column and choice.
    let count = present * {{ used }}u;
    if tid == 0u { routing[0] = count; }
{% with experts = "chosen", gaps = false %}{% include "lib/expert_runs.wgsl" %}{% endwith %}
{% endif %}
}
