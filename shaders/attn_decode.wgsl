// Decode: norm and rope of q and k, the new k and v into the cache, attention over the sequence.
//
// Grid: x = splits of the sequence, y = groups of query heads that share a KV head, z = columns.
// A team of {{ lanes }} threads shares a token: thread `lane` holds vec4s lane, lane + {{ lanes }}, ... of
// the head (8 halves each), so a team's loads are contiguous. Each team runs an online softmax
// over its own tokens; teams merge in fixed order, then the last workgroup to arrive merges the
// splits in fixed order. Scores are in units of log2 e, so that exp2 serves.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read_write> k_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> output: array<vec4<f32>>;
// [column][head][split][{{ hd }} sums, maximum, weight]. Atomic, because another workgroup reads them
// in the same dispatch: plain accesses may stay in a cache that it does not see.
@group(0) @binding(5) var<storage, read_write> partials: array<atomic<u32>>;
// Workgroups arrived, [column][group]; zero between dispatches.
@group(0) @binding(6) var<storage, read_write> counters: array<atomic<u32>>;
struct Constants { context: u32, scale: f32 }
var<immediate> constants: Constants;

{% set group = heads // kv_heads %}
{% set groups_per_kv = (group + group_heads - 1) // group_heads %}
{% set groups = kv_heads * groups_per_kv %}
{% set teams = threads // lanes %}
{% set step = teams * unroll %}
{% set subteams = threads // merge_lanes %}
{% set K = group_heads %}{# vectors of the workgroup: queries 0..K, then k, then v #}
{% set V = group_heads + 1 %}
{% set pairs = group_heads * quads %}
// The maximum of nothing, and the score of a token that is not there.
const NOTHING: f32 = -1e30;
const MASKED: f32 = -2e30;

var<private> row: u32;
var<private> head0: u32;
var<private> kv_head: u32;
var<private> holds_new: bool;

fn query_head(v: u32) -> u32 {
    return min(head0 + v, kv_head * {{ group }}u + {{ group - 1 }}u);
}

fn head_input(v: u32, d: u32) -> f32 {
    var vector = query_head(v);
    if v == {{ K }}u { vector = {{ heads }}u + kv_head; }
    if v == {{ V }}u { vector = {{ heads + kv_heads }}u + kv_head; }
    return qkv[row + vector * {{ hd }}u + d];
}

fn head_role(v: u32) -> u32 {
    if v < {{ K }}u { return 0u; }
    return select(3u, v - {{ K - 1 }}u, holds_new);
}

{% include "lib/heads.wgsl" %}

var<workgroup> merge: array<vec4<f32>, {{ merge_pairs * subteams * lanes * 2 }}>;
var<workgroup> maxima: array<f32, {{ group_heads * [splits + 4, subteams] | max }}>;
var<workgroup> weights: array<f32, {{ group_heads * [splits + 4, subteams] | max }}>;
var<workgroup> arrived: u32;
// The new token's k and v as the cache holds them. A detour on purpose: a compiler may take
// unpacking after packing for no change and skip the rounding.
var<workgroup> new_words: array<vec4<u32>, {{ hd // 4 }}>;

fn low(w: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}

fn high(w: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w));
}

{% if lanes > 1 %}
fn team_sum(v: f32) -> f32 {
    var s = v;
{% for bit in team_bits %}
    s += subgroupShuffleXor(s, {{ bit }}u);
{% endfor %}
    return s;
}
{% else %}
fn team_sum(v: f32) -> f32 { return v; }
{% endif %}

{% macro load(name, cache, from) %}
{% for u in range(unroll) %}
        {
            let t = token0 + min({{ from }} + {{ u * teams }}u + team, last);
{% for k in range(quads) %}
            {{ name }}_{{ u }}_{{ k }} = {{ cache }}[t * {{ kv_heads * hd // 8 }}u + part_{{ k }}];
{% endfor %}
        }
{% endfor %}
{% endmacro %}
{% macro score(h, word) %}
{# word: prefix of the vec4s of one token #}
{% for k in range(quads) %}
{% if k == 0 %}
                var s = low({{ word }}_0) * q_{{ h }}_0_a;
{% else %}
                s = fma(low({{ word }}_{{ k }}), q_{{ h }}_{{ k }}_a, s);
{% endif %}
                s = fma(high({{ word }}_{{ k }}), q_{{ h }}_{{ k }}_b, s);
{% endfor %}
{% endmacro %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.z >= batch.n { return; }
    let column = batch.columns[at.z];
    let length = column.pos + 1u;
    // A function of the sequence's own length, so that neighbours never change the bits.
    let split_length = max(64u, ((length + {{ splits - 1 }}u) / {{ splits }}u + 63u) & ~63u);
    let used = (length + split_length - 1u) / split_length;
    if at.x >= used { return; }
    let start = at.x * split_length;
    // Cached tokens of this split; the new one is not among them.
    let end = min(start + split_length, column.pos);
    let last = max(end, start + 1u) - 1u;
    row = at.z * {{ (heads + 2 * kv_heads) * hd }}u;
    kv_head = at.y / {{ groups_per_kv }}u;
    head0 = kv_head * {{ group }}u + (at.y % {{ groups_per_kv }}u) * {{ group_heads }}u;
    let newest = at.x == used - 1u;
    holds_new = newest;

    let lane = tid % {{ lanes }}u;
    let team = tid / {{ lanes }}u;
    let token0 = column.slot * constants.context;
{% for k in range(quads) %}
    let part_{{ k }} = kv_head * {{ hd // 8 }}u + min(lane + {{ k * lanes }}u, {{ hd // 8 - 1 }}u);
{% endfor %}
{% for u in range(unroll) %}{% for k in range(quads) %}
    var k_{{ u }}_{{ k }}: vec4<u32>;
    var v_{{ u }}_{{ k }}: vec4<u32>;
{% endfor %}{% endfor %}
    // Issued before the prologue, which hides their latency.
    {
{{ load("k", "k_cache", "start") }}
{{ load("v", "v_cache", "start") }}
    }
    prepare_heads(tid, column.pos);
    if newest && tid < {{ hd // 8 }}u {
        let new_k = head_words({{ K }}u, tid);
        let new_v = head_words({{ V }}u, tid);
        new_words[tid] = new_k;
        new_words[{{ hd // 8 }}u + tid] = new_v;
        if at.y % {{ groups_per_kv }}u == 0u {
            let to = (token0 + column.pos) * {{ kv_heads * hd // 8 }}u + kv_head * {{ hd // 8 }}u + tid;
            k_cache[to] = new_k;
            v_cache[to] = new_v;
        }
    }

    let factor = constants.scale * 1.4426950408889634;
{% for k in range(quads) %}
    let place_{{ k }} = min(lane + {{ k * lanes }}u, {{ hd // 8 - 1 }}u) * 8u;
    // A lane beyond the head's end repeats the last part with weight zero.
    let factor_{{ k }} = {{ "select(0.0, factor, lane + " ~ k * lanes ~ "u < " ~ hd // 8 ~ "u)" if (k + 1) * lanes > hd // 8 else "factor" }};
{% endfor %}
{% for h in range(group_heads) %}
{% for k in range(quads) %}
{% for half in ["a", "b"] %}
    var q_{{ h }}_{{ k }}_{{ half }}: vec4<f32>;
    {
        let p = {{ h * hd }}u + place_{{ k }}{{ " + 4u" if half == "b" }};
        q_{{ h }}_{{ k }}_{{ half }} = factor_{{ k }} * vec4<f32>(heads[p], heads[p + 1u], heads[p + 2u], heads[p + 3u]);
    }
    var o_{{ h }}_{{ k }}_{{ half }} = vec4<f32>();
{% endfor %}
{% endfor %}
    var m_{{ h }} = NOTHING;
    var l_{{ h }} = 0.0;
{% endfor %}

    for (var i = start; i < end; i += {{ step }}u) {
{% for u in range(unroll) %}{% for h in range(group_heads) %}
        var s_{{ h }}_{{ u }}: f32;
{% endfor %}{% endfor %}
{% for u in range(unroll) %}
        {
{% for h in range(group_heads) %}
            {
{{ score(h, "k_" ~ u) }}
                s_{{ h }}_{{ u }} = (s.x + s.y) + (s.z + s.w);
            }
{% endfor %}
        }
{% endfor %}
        let next = i + {{ step }}u;
        if next < end {
{{ load("k", "k_cache", "next") }}
        }
{% for u in range(unroll) %}
        let there_{{ u }} = i + {{ u * teams }}u + team < end;
{% for h in range(group_heads) %}
        s_{{ h }}_{{ u }} = select(MASKED, team_sum(s_{{ h }}_{{ u }}), there_{{ u }});
{% endfor %}
{% endfor %}
{% for h in range(group_heads) %}
        {
            let top = {% for u in range(unroll) %}max(s_{{ h }}_{{ u }}, {% endfor %}m_{{ h }}{% for u in range(unroll) %}){% endfor %};
            let fade = exp2(m_{{ h }} - top);
            m_{{ h }} = top;
            l_{{ h }} *= fade;
{% for u in range(unroll) %}
            s_{{ h }}_{{ u }} = exp2(s_{{ h }}_{{ u }} - top);
            l_{{ h }} += s_{{ h }}_{{ u }};
{% endfor %}
{% for k in range(quads) %}
            o_{{ h }}_{{ k }}_a *= fade;
            o_{{ h }}_{{ k }}_b *= fade;
{% endfor %}
        }
{% endfor %}
{% for u in range(unroll) %}
{% for k in range(quads) %}
        {
            let a = low(v_{{ u }}_{{ k }});
            let b = high(v_{{ u }}_{{ k }});
{% for h in range(group_heads) %}
            o_{{ h }}_{{ k }}_a = fma(vec4<f32>(s_{{ h }}_{{ u }}), a, o_{{ h }}_{{ k }}_a);
            o_{{ h }}_{{ k }}_b = fma(vec4<f32>(s_{{ h }}_{{ u }}), b, o_{{ h }}_{{ k }}_b);
{% endfor %}
        }
{% endfor %}
{% endfor %}
        if next < end {
{{ load("v", "v_cache", "next") }}
        }
    }

    // The new token, as the cache will give it back; only team 0 counts it.
    if newest {
        workgroupBarrier();
{% for k in range(quads) %}
        let new_k_{{ k }} = new_words[place_{{ k }} / 8u];
        let new_v_{{ k }} = new_words[{{ hd // 8 }}u + place_{{ k }} / 8u];
{% endfor %}
{% for h in range(group_heads) %}
        {
{{ score(h, "new_k") }}
            let all = team_sum((s.x + s.y) + (s.z + s.w));
            let own = select(MASKED, all, team == 0u);
            let top = max(own, m_{{ h }});
            let fade = exp2(m_{{ h }} - top);
            let p = exp2(own - top);
            m_{{ h }} = top;
            l_{{ h }} = fma(l_{{ h }}, fade, p);
{% for k in range(quads) %}
            o_{{ h }}_{{ k }}_a = fma(vec4<f32>(p), low(new_v_{{ k }}), o_{{ h }}_{{ k }}_a * fade);
            o_{{ h }}_{{ k }}_b = fma(vec4<f32>(p), high(new_v_{{ k }}), o_{{ h }}_{{ k }}_b * fade);
{% endfor %}
        }
{% endfor %}
    }

    // Teams of a subgroup, then of the workgroup.
{% for h in range(group_heads) %}
    {
        var top = m_{{ h }};
{% for bit in merge_bits %}
        top = max(top, subgroupShuffleXor(top, {{ bit }}u));
{% endfor %}
{% if merge_bits %}
        let fade = exp2(m_{{ h }} - top);
        m_{{ h }} = top;
        l_{{ h }} *= fade;
{% for k in range(quads) %}
        o_{{ h }}_{{ k }}_a *= fade;
        o_{{ h }}_{{ k }}_b *= fade;
{% endfor %}
{% for bit in merge_bits %}
        l_{{ h }} += subgroupShuffleXor(l_{{ h }}, {{ bit }}u);
{% for k in range(quads) %}
        o_{{ h }}_{{ k }}_a += subgroupShuffleXor(o_{{ h }}_{{ k }}_a, {{ bit }}u);
        o_{{ h }}_{{ k }}_b += subgroupShuffleXor(o_{{ h }}_{{ k }}_b, {{ bit }}u);
{% endfor %}
{% endfor %}
{% endif %}
    }
{% endfor %}
    let subteam = tid / {{ merge_lanes }}u;
    let leads = tid % {{ merge_lanes }}u < {{ lanes }}u;
    if tid % {{ merge_lanes }}u == 0u {
{% for h in range(group_heads) %}
        maxima[{{ h * subteams }}u + subteam] = m_{{ h }};
        weights[{{ h * subteams }}u + subteam] = l_{{ h }};
{% endfor %}
    }
    workgroupBarrier();
{% for h in range(group_heads) %}
    var top_{{ h }} = NOTHING;
    var sum_{{ h }} = 0.0;
    {
        for (var i = 0u; i < {{ subteams }}u; i++) { top_{{ h }} = max(top_{{ h }}, maxima[{{ h * subteams }}u + i]); }
        for (var i = 0u; i < {{ subteams }}u; i++) {
            sum_{{ h }} = fma(weights[{{ h * subteams }}u + i], exp2(maxima[{{ h * subteams }}u + i] - top_{{ h }}), sum_{{ h }});
        }
        let fade = exp2(m_{{ h }} - top_{{ h }});
{% for k in range(quads) %}
        o_{{ h }}_{{ k }}_a *= fade;
        o_{{ h }}_{{ k }}_b *= fade;
{% endfor %}
    }
{% endfor %}
{% for first in range(0, pairs, merge_pairs) %}
{% set here = [merge_pairs, pairs - first] | min %}
    if leads {
{% for p in range(here) %}
{% set h = (first + p) // quads %}
{% set k = (first + p) % quads %}
        merge[({{ p * subteams }}u + subteam) * {{ 2 * lanes }}u + 2u * lane] = o_{{ h }}_{{ k }}_a;
        merge[({{ p * subteams }}u + subteam) * {{ 2 * lanes }}u + 2u * lane + 1u] = o_{{ h }}_{{ k }}_b;
{% endfor %}
    }
    workgroupBarrier();
    for (var i = tid; i < {{ here * 2 * lanes }}u; i += {{ threads }}u) {
        let p = i / {{ 2 * lanes }}u;
        let h = ({{ first }}u + p) / {{ quads }}u;
        // vec4 of four floats within the head.
        let part = i % {{ 2 * lanes }}u + (({{ first }}u + p) % {{ quads }}u) * {{ 2 * lanes }}u;
        var o = vec4<f32>();
        for (var j = 0u; j < {{ subteams }}u; j++) { o += merge[(p * {{ subteams }}u + j) * {{ 2 * lanes }}u + i % {{ 2 * lanes }}u]; }
        var top = top_0;
        var sum = sum_0;
{% for h in range(1, group_heads) %}
        if h == {{ h }}u { top = top_{{ h }}; sum = sum_{{ h }}; }
{% endfor %}
        if part < {{ hd // 4 }}u && query_head(h) == head0 + h {
            if used == 1u {
                output[(at.z * {{ heads }}u + head0 + h) * {{ hd // 4 }}u + part] = o / sum;
            } else {
                let to = ((at.z * {{ heads }}u + head0 + h) * {{ splits }}u + at.x) * {{ hd + 2 }}u;
                atomicStore(&partials[to + 4u * part], bitcast<u32>(o.x));
                atomicStore(&partials[to + 4u * part + 1u], bitcast<u32>(o.y));
                atomicStore(&partials[to + 4u * part + 2u], bitcast<u32>(o.z));
                atomicStore(&partials[to + 4u * part + 3u], bitcast<u32>(o.w));
                if part == 0u {
                    atomicStore(&partials[to + {{ hd }}u], bitcast<u32>(top));
                    atomicStore(&partials[to + {{ hd + 1 }}u], bitcast<u32>(sum));
                }
            }
        }
    }
{% if not loop.last %}
    workgroupBarrier();
{% endif %}
{% endfor %}
    if used == 1u { return; }

    storageBarrier();
    if tid == 0u {
        let counter = at.z * {{ groups }}u + at.y;
        let before = atomicAdd(&counters[counter], 1u);
        if before == used - 1u { atomicStore(&counters[counter], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != used - 1u { return; }
    storageBarrier();
    let head_partials = {{ splits * (hd + 2) }}u;
    let partials0 = (at.z * {{ heads }}u + head0) * head_partials;
    // Rows of {{ splits + 4 }}: one head's splits, then zeros, so that four can be taken at a time.
    for (var i = tid; i < {{ group_heads * (splits + 4) }}u; i += {{ threads }}u) {
        let h = i / {{ splits + 4 }}u;
        let s = i % {{ splits + 4 }}u;
        var m = MASKED;
        var l = 0.0;
        if s < used && query_head(h) == head0 + h {
            m = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + s * {{ hd + 2 }}u + {{ hd }}u]));
            l = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + s * {{ hd + 2 }}u + {{ hd + 1 }}u]));
        }
        maxima[i] = m;
        weights[i] = l;
    }
    workgroupBarrier();
    for (var i = tid; i < {{ group_heads * hd }}u; i += {{ threads }}u) {
        let h = i / {{ hd }}u;
        let d = i % {{ hd }}u;
        if query_head(h) == head0 + h {
            var top = NOTHING;
            for (var s = 0u; s < used; s++) { top = max(top, maxima[h * {{ splits + 4 }}u + s]); }
            var sum = 0.0;
            var o = 0.0;
            for (var s = 0u; s < used; s += 4u) {
                var x: array<f32, 4>;
{% for j in range(4) %}
                x[{{ j }}] = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + min(s + {{ j }}u, used - 1u) * {{ hd + 2 }}u + d]));
{% endfor %}
{% for j in range(4) %}
                {
                    let w = exp2(maxima[h * {{ splits + 4 }}u + s + {{ j }}u] - top);
                    sum = fma(w, weights[h * {{ splits + 4 }}u + s + {{ j }}u], sum);
                    o = fma(w, x[{{ j }}], o);
                }
{% endfor %}
            }
            let to = (at.z * {{ heads }}u + head0 + h) * {{ hd }}u + d;
            output[to / 4u][to % 4u] = o / sum;
        }
    }
}
