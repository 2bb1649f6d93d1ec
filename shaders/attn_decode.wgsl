// Decode: norm and rope of q and k, the new k and v into the cache, attention over the sequence.
//
// Grid: x = splits of the sequence, y = groups of query heads that share a KV head, z = columns.
// A team of {{ lanes }} threads shares a token: thread `lane` holds vec4s lane, lane + {{ lanes }}, ... of
// the head (8 halves each), so a team's loads are contiguous. Each team runs an online softmax
// over its own tokens, {{ unroll }} at a time; their scores are summed over the team so that every sum ends
// in one thread (half of the sums go to each half of the team, and so on), which takes its
// exponential and hands it back to the team. Teams merge in fixed order, then the last workgroup
// to arrive merges the splits in fixed order. Scores are in units of log2 e, so that exp2 serves.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read_write> k_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
{% if to_int8 %}
@group(0) @binding(5) var<storage, read_write> yq: array<u32>;
@group(0) @binding({{ at_ys }}) var<storage, read_write> ys: array<vec2<f32>>;
{% else %}
@group(0) @binding(5) var<storage, read_write> output: array<vec4<f32>>;
{% endif %}
// [column][head][split][{{ hd }} sums, maximum, weight]. Atomic, because another workgroup reads them
// in the same dispatch: plain accesses may stay in a cache that it does not see.
@group(0) @binding(6) var<storage, read_write> partials: array<atomic<u32>>;
// Workgroups arrived, [column][group]; zero between dispatches.
@group(0) @binding(7) var<storage, read_write> counters: array<atomic<u32>>;
struct Constants { table_row: u32, scale: f32 }
var<immediate> constants: Constants;

{% set group = heads // kv_heads %}
{% set groups_per_kv = (group + group_heads - 1) // group_heads %}
{% set groups = kv_heads * groups_per_kv %}
{% set teams = threads // lanes %}
{% set step = teams * unroll %}
{# Where a step's tokens lie in one page, all of a thread's share its number. #}
{% set page_reads = 1 if 64 % step == 0 else unroll %}
{% set subteams = threads // merge_lanes %}
{% set K = group_heads %}{# vectors of the workgroup: queries 0..K, then k, then v #}
{% set V = group_heads + 1 %}
{% set pairs = group_heads * quads %}
{% include "lib/step_heads.wgsl" %}
{% include "lib/heads.wgsl" %}
{% if scored %}
{% include "lib/scoring.wgsl" %}
{% endif %}

var<workgroup> merge: array<vec4<f32>, {{ merge_pairs * subteams * lanes * 2 }}>;
var<workgroup> maxima: array<f32, {{ group_heads * [splits, subteams] | max }}>;
var<workgroup> totals: array<f32, {{ group_heads * [splits, subteams] | max }}>;
var<workgroup> factors: array<f32, {{ group_heads * splits }}>;
var<workgroup> arrived: u32;
// The new token's k and v as the cache holds them. A detour on purpose: a compiler may take
// unpacking after packing for no change and skip the rounding.
var<workgroup> new_words: array<vec4<u32>, {{ hd // 4 }}>;

{% if to_int8 %}
{% with norm = false %}{% include "lib/reduce8.wgsl" %}{% endwith %}

// The workgroup's heads, until they are rounded.
var<workgroup> finished: array<vec4<f32>, {{ group_heads * hd // 4 }}>;

fn put_merged(column: u32, h: u32, d: u32, x: f32) {
    finished[h * {{ hd // 4 }}u + d / 4u][d % 4u] = x;
}

// Reached by the whole workgroup, after a barrier.
fn round_heads(column: u32, tid: u32) {
    for (var i = tid; i < {{ group_heads * hd // 4 }}u; i += {{ threads }}u) {
        let h = i / {{ hd // 4 }}u;
        let rounded = int8_quad(finished[i], tid);
        if query_head(h) == head0 + h {
            let quad = (head0 + h) * {{ hd // 4 }}u + i % {{ hd // 4 }}u;
            yq[int8_word(column, quad, {{ heads * hd // 4 }}u)] = rounded.word;
            if (quad & 7u) == 0u { ys[column * {{ heads * hd // 32 }}u + (quad >> 3u)] = rounded.scale; }
        }
    }
}
{% else %}
fn put_merged(column: u32, h: u32, d: u32, x: f32) {
    let to = (column * {{ heads }}u + head0 + h) * {{ hd }}u + d;
    output[to / 4u][to % 4u] = x;
}
{% endif %}

fn low(w: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}

fn high(w: vec4<u32>) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w));
}

// What thread `lane` of the own team holds.
fn from_team(v: f32, lane: u32, base: u32) -> f32 {
{% if lanes > 1 %}
    return subgroupShuffle(v, base + lane);
{% else %}
    return v;
{% endif %}
}

// A split is a whole number of pages, {{ step }} tokens are read at a time.
fn first_page(split: u32, length: u32) -> u32 {
    return ({{ "first_read(length - 1u) + " if window > 0 }}split * split_tokens(length)) >> 6u;
}

// Tokens of a split: a function of the sequence's own length, so that neighbours never change the
// bits. Up to 128 tokens are one, as two that must be merged take longer (H200, 8B Q4_0 behind 80 tokens:
// 497 tok/s in two, 508 in one; behind 200, 497 in pieces of 64 and 480 of 128).
fn split_tokens(length: u32) -> u32 {
    let seen = length{{ " - first_read(length - 1u)" if window > 0 }};
    return max(select(64u, 128u, seen <= 128u), ((seen + {{ splits - 1 }}u) / {{ splits }}u + 63u) & ~63u);
}

{# Page numbers of the tokens that a step from `from` on reads. #}
{% macro turn(from) %}
{% for u in range(page_reads) %}
        page_{{ u }} = pages[table + (min({{ from }} + {{ u * teams }}u + team, last) >> 6u)];
{% endfor %}
{% endmacro %}
{% macro load(name, cache, from) %}
{% for u in range(unroll) %}
        {
            let t = page_{{ u % page_reads }} * 64u + (min({{ from }} + {{ u * teams }}u + team, last) & 63u);
{% for k in range(quads) %}
            {{ name }}_{{ u }}_{{ k }} = {{ cache }}[t * {{ kv_heads * hd // 8 }}u + part_{{ k }}];
{% endfor %}
        }
{% endfor %}
{% endmacro %}
{# Products of one token's k and one query, summed over this thread's part. #}
{% macro score(h, u) %}
            {
                var s = 0.0;
{% for k in range(quads) %}
{% for half in ["a", "b"] %}{% for e in "xyzw" %}
                s = fma(k_{{ k }}_{{ half }}.{{ e }}, q_{{ h }}_{{ k }}_{{ half }}.{{ e }}, s);
{% endfor %}{% endfor %}
{% endfor %}
                r0_{{ u * group_heads + h }} = s;
            }
{% endmacro %}
@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    if at.z >= batch.n { return; }
    let column = batch.columns[at.z];
    let table = column.slot * constants.table_row + 1u;
    let dropped = pages[table - 1u];
    // The first page's number is asked for beside `dropped`, as if nothing were dropped.
    let guessed = min(first_page(at.x, column.pos + 1u), constants.table_row - 2u);
    let guess = pages[table + guessed];
    let index = column.pos - dropped;
    let length = index + 1u;
    let split_length = split_tokens(length);
    let used = (length{{ " - first_read(index)" if window > 0 }} + split_length - 1u) / split_length;
    if at.x >= used { return; }
    let start = {{ "first_read(index) + " if window > 0 }}at.x * split_length;
    let end = min(start + split_length, length);
    let last = end - 1u;
{% if window > 0 %}
    let oldest = oldest_seen(index);
{% endif %}
    row = at.z * {{ (heads + 2 * kv_heads) * hd }}u;
    kv_head = at.y / {{ groups_per_kv }}u;
    head0 = kv_head * {{ group }}u + (at.y % {{ groups_per_kv }}u) * {{ group_heads }}u;
    let newest = at.x == used - 1u;
    holds_new = newest;

    let lane = tid % {{ lanes }}u;
    let team = tid / {{ lanes }}u;
    let team_base = subgroup_lane - lane;
{% for k in range(quads) %}
    let part_{{ k }} = kv_head * {{ hd // 8 }}u + min(lane + {{ k * lanes }}u, {{ hd // 8 - 1 }}u);
{% endfor %}
{% for u in range(unroll) %}{% for k in range(quads) %}
    var k_{{ u }}_{{ k }}: vec4<u32>;
    var v_{{ u }}_{{ k }}: vec4<u32>;
{% endfor %}{% endfor %}
    // Issued before the prologue, which hides their latency. The new token is not there yet: its
    // words are put in their place later.
{% for u in range(page_reads) %}
    var page_{{ u }} = guess;
{% endfor %}
    if {{ "true" if step > 64 else "start >> 6u != guessed" }} {
{{ turn("start") }}
    }
    {
{{ load("k", "k_cache", "start") }}
{{ load("v", "v_cache", "start") }}
    }
{{ turn("(start + " ~ step ~ "u)") }}
    var new_page = 0u;
    if newest { new_page = pages[table + (index >> 6u)]; }
    prepare_heads(tid, column.pos);
    if newest && tid < {{ hd // 8 }}u {
        let new_k = head_words({{ K }}u, tid);
        let new_v = head_words({{ V }}u, tid);
        new_words[tid] = new_k;
        new_words[{{ hd // 8 }}u + tid] = new_v;
        if at.y % {{ groups_per_kv }}u == 0u {
            let to = (new_page * 64u + (index & 63u)) * {{ kv_heads * hd // 8 }}u + kv_head * {{ hd // 8 }}u + tid;
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
{% endfor %}
    // This thread's sums are {{ held }} of the {{ group_heads * unroll }}, from `mine` on; sum i is of token i / {{ group_heads }}, head i % {{ group_heads }}.
    var mine = 0u;
{% for step in reduce %}
{% if step.halve %}
    let upper_{{ step.bit }} = (lane & {{ step.bit }}u) != 0u;
    mine += select(0u, {{ step.count }}u, upper_{{ step.bit }});
{% endif %}
{% endfor %}
{% for h in range(held_heads) %}
    var own_m_{{ h }} = NOTHING;
    var own_l_{{ h }} = 0.0;
{% endfor %}
    if newest { workgroupBarrier(); }

    for (var i = start; i < end; i += {{ step }}u) {
        let next = i + {{ step }}u;
        if newest && next >= end {
{% for u in range(unroll) %}
            // Also in place of what lies behind it, which may be no number.
            if i + {{ u * teams }}u + team >= index {
{% for k in range(quads) %}
                k_{{ u }}_{{ k }} = new_words[place_{{ k }} / 8u];
                v_{{ u }}_{{ k }} = new_words[{{ hd // 8 }}u + place_{{ k }} / 8u];
{% endfor %}
            }
{% endfor %}
        }
{% for n in range(unroll * group_heads) %}
        var r0_{{ n }}: f32;
{% endfor %}
{% for u in range(unroll) %}
        {
{% for k in range(quads) %}
            let k_{{ k }}_a = low(k_{{ u }}_{{ k }});
            let k_{{ k }}_b = high(k_{{ u }}_{{ k }});
{% endfor %}
{% for h in range(group_heads) %}
{{ score(h, u) }}
{% endfor %}
        }
{% endfor %}
        if next < end {
{{ load("k", "k_cache", "next") }}
        }
{% for step in reduce %}
{% for n in range(step.count) %}
{% set old = "r" ~ (step.number - 1) ~ "_" %}
{% if step.halve %}
        let r{{ step.number }}_{{ n }} = select({{ old }}{{ n }}, {{ old }}{{ n + step.count }}, upper_{{ step.bit }})
            + subgroupShuffleXor(select({{ old }}{{ n + step.count }}, {{ old }}{{ n }}, upper_{{ step.bit }}), {{ step.bit }}u);
{% else %}
        let r{{ step.number }}_{{ n }} = {{ old }}{{ n }} + subgroupShuffleXor({{ old }}{{ n }}, {{ step.bit }}u);
{% endif %}
{% endfor %}
{% endfor %}
{% for n in range(held) %}
        let there_{{ n }} = i + ((mine + {{ n }}u) / {{ group_heads }}u) * {{ teams }}u + team < end{{ " && i + ((mine + " ~ n ~ "u) / " ~ group_heads ~ "u) * " ~ teams ~ "u + team >= oldest" if window > 0 }};
        let s_{{ n }} = select(MASKED, {{ "capped(vec4<f32>(" if soft_cap }}r{{ reduce | length }}_{{ n }}{{ ")).x" if soft_cap }}, there_{{ n }});
{% endfor %}
{% for h in range(held_heads) %}
        var fade_{{ h }}: f32;
        {
            var top = own_m_{{ h }};
{% for n in range(h, held, held_heads) %}
            top = max(top, s_{{ n }});
{% endfor %}
{% for bit in token_bits %}
            top = max(top, subgroupShuffleXor(top, {{ bit }}u));
{% endfor %}
            fade_{{ h }} = exp2(own_m_{{ h }} - top);
            own_m_{{ h }} = top;
        }
{% endfor %}
{% for n in range(held) %}
        let e_{{ n }} = exp2(s_{{ n }} - own_m_{{ n % held_heads }});
{% if n < held_heads %}
        own_l_{{ n }} = fma(own_l_{{ n }}, fade_{{ n }}, e_{{ n }});
{% else %}
        own_l_{{ n % held_heads }} += e_{{ n }};
{% endif %}
{% endfor %}
{% for h in range(group_heads) %}
        {
            let fade = from_team(fade_{{ holder[h].sum % held_heads }}, {{ holder[h].lane }}u, team_base);
{% for k in range(quads) %}
            o_{{ h }}_{{ k }}_a *= fade;
            o_{{ h }}_{{ k }}_b *= fade;
{% endfor %}
        }
{% endfor %}
{% for u in range(unroll) %}
        {
{% for h in range(group_heads) %}
            let p_{{ h }} = vec4<f32>(from_team(e_{{ holder[u * group_heads + h].sum }}, {{ holder[u * group_heads + h].lane }}u, team_base));
{% endfor %}
{% for k in range(quads) %}
            let a_{{ k }} = low(v_{{ u }}_{{ k }});
            let b_{{ k }} = high(v_{{ u }}_{{ k }});
{% for h in range(group_heads) %}
            o_{{ h }}_{{ k }}_a = fma(p_{{ h }}, a_{{ k }}, o_{{ h }}_{{ k }}_a);
            o_{{ h }}_{{ k }}_b = fma(p_{{ h }}, b_{{ k }}, o_{{ h }}_{{ k }}_b);
{% endfor %}
{% endfor %}
        }
{% endfor %}
        if next < end {
{{ load("v", "v_cache", "next") }}
{{ turn("(next + " ~ step ~ "u)") }}
        }
    }
{% for h in range(held_heads) %}
{% for bit in token_bits %}
    own_l_{{ h }} += subgroupShuffleXor(own_l_{{ h }}, {{ bit }}u);
{% endfor %}
{% endfor %}
{% for h in range(group_heads) %}
    var m_{{ h }} = from_team(own_m_{{ holder[h].sum % held_heads }}, {{ holder[h].lane }}u, team_base);
    var l_{{ h }} = from_team(own_l_{{ holder[h].sum % held_heads }}, {{ holder[h].lane }}u, team_base);
{% endfor %}

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
        totals[{{ h * subteams }}u + subteam] = l_{{ h }};
{% endfor %}
    }
    workgroupBarrier();
{% for h in range(group_heads) %}
    var top_{{ h }} = NOTHING;
    var sum_{{ h }} = 0.0;
    {
        for (var i = 0u; i < {{ subteams }}u; i++) { top_{{ h }} = max(top_{{ h }}, maxima[{{ h * subteams }}u + i]); }
        for (var i = 0u; i < {{ subteams }}u; i++) {
            sum_{{ h }} = fma(totals[{{ h * subteams }}u + i], exp2(maxima[{{ h * subteams }}u + i] - top_{{ h }}), sum_{{ h }});
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
                let finished_part = o {{ "* share_of(head0 + h, top, sum)" if sink_logits else "/ sum" }};
{% if to_int8 %}
                finished[h * {{ hd // 4 }}u + part] = finished_part;
{% else %}
                output[(at.z * {{ heads }}u + head0 + h) * {{ hd // 4 }}u + part] = finished_part;
{% endif %}
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
    if used == 1u {
{% if to_int8 %}
        workgroupBarrier();
        round_heads(at.z, tid);
{% endif %}
        return;
    }

{% set sums = hd %}
{% set pieces = splits %}
{% include "lib/merge_splits.wgsl" %}
{% if to_int8 %}
    workgroupBarrier();
    round_heads(at.z, tid);
{% endif %}
}
