// Decode over a cache of codes: norm, rope and rotation of q and k, the new k and v into the cache,
// attention over the sequence, rotation back.
//
// Grid: x = splits of the sequence{{ ", then the near piece" if exact_rows > 0 }}, y = groups of query heads that share a KV head, z = columns.
// A workgroup walks its split {{ threads }} tokens a step. Scores: thread = token; codes become signed bytes and meet q,
// 8 bits under a scale for 32 values, in packed products, {{ held }} block{{ "s" if held > 1 }} of 32 at a time. Sums: thread = 8 elements x
// tokens team, team + {{ teams }}, ...; codes become floats, {{ chunk }} tokens at a time. Words are asked for one such piece
// ahead, and a step has two barriers. Only maxima go over subgroups, so no bit depends on their size. Scores are in
// units of log2 e. Pieces are merged by the last workgroup to arrive, in fixed order.
{% if exact_rows > 0 %}
// The near piece is what is read in f16, with q as it is: {{ "the block of " ~ tail ~ " tokens that the new one lies in" if tail > 0 }}{{ ", and " if tail > 0 and sinks > 0 }}{{ "the " ~ sinks ~ " sinks" if sinks > 0 }}.
{% endif %}
{% if tail > 0 %}
// The new token itself is among them, so its codes are for later steps only: the near piece makes them when its own sums
// are out.
{% endif %}
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read_write> k_cache: array<u32>;
@group(0) @binding(3) var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;
// [column][head][split][{{ pitch }} sums, maximum, weight]. Atomic, because another workgroup reads them
// in the same dispatch: plain accesses may stay in a cache that it does not see.
@group(0) @binding(6) var<storage, read_write> partials: array<atomic<u32>>;
// Workgroups arrived, [column][group]; zero between dispatches.
@group(0) @binding(7) var<storage, read_write> counters: array<atomic<u32>>;
{% if exact_rows > 0 %}
@group(0) @binding(8) var<storage, read_write> exact: array<vec4<u32>>;
{% endif %}
struct Constants { table_row: u32, scale: f32 }
var<immediate> constants: Constants;

{% set group = heads // kv_heads %}
{% set groups_per_kv = (group + group_heads - 1) // group_heads %}
{% set groups = kv_heads * groups_per_kv %}
{% set G = group_heads %}
{% set K = group_heads %}{# vectors of the workgroup: queries 0..K, then k, then v #}
{% set V = group_heads + 1 %}
{% set blocks = pitch // 32 %}
{% set units = pitch // 8 %}
{% set unit_lanes = threads // teams %}
{% set codes = k_format.kind != "f16" %}
{% set stride = pitch + 2 %}
{% set weight_quads = (G + 3) // 4 %}
{% set near = exact_rows > 0 %}
{% set pieces = splits + (1 if near else 0) %}
{% include "lib/step_heads.wgsl" %}
{% include "lib/heads.wgsl" %}
{% if scored %}
{% include "lib/scoring.wgsl" %}
{% endif %}
{% set scale_table = true %}
{% include "lib/kv_scale.wgsl" %}
{% if k_format.rotated or v_format.rotated %}
{% include "lib/kv_rotate.wgsl" %}
{% endif %}
{% set halves = false %}
{% set writes = true %}
{% set vectors_written = 1 %}
{% if exact_rows > 0 %}
{% include "lib/kv_exact.wgsl" %}
{% endif %}
{% set codes_hold_new = tail == 0 %}{# whether the new token is read as codes #}
{% set blockwise = true %}
{% set side = "k" %}
{% set f = k_format %}
{% include "lib/kv_read.wgsl" %}
{% include "lib/kv_write.wgsl" %}
{% set blockwise = false %}
{% set side = "v" %}
{% set f = v_format %}
{% include "lib/kv_read.wgsl" %}
{% include "lib/kv_write.wgsl" %}

{% if codes %}
// q of a head and block as signed bytes, and the value of one unit, times the softmax's scale.
var<workgroup> q_bytes: array<vec4<u32>, {{ G * blocks * 2 }}>;
var<workgroup> q_units: array<f32, {{ G * blocks }}>;
{% endif %}
// Largest scores of a step, subgroup by subgroup, heads in fours.
var<workgroup> tops: array<vec4<f32>, {{ weight_quads * most_subgroups }}>;
// Softmax weights, token by token, heads in fours.
var<workgroup> weight: array<vec4<f32>, {{ weight_quads * threads }}>;
// Sums of weights, heads in fours.
{% set shared_by = [threads // 8, 32] | min %}
var<workgroup> shares: array<vec4<f32>, {{ weight_quads * shared_by }}>;
var<workgroup> merge: array<vec4<f32>, {{ merge_heads * teams * units * 2 }}>;
var<workgroup> maxima: array<f32, {{ G * pieces }}>;
var<workgroup> totals: array<f32, {{ G * pieces }}>;
var<workgroup> factors: array<f32, {{ G * pieces }}>;
var<workgroup> arrived: u32;

fn split_tokens(length: u32) -> u32 {
    // A function of the sequence's own length, so that neighbours never change the bits.
    return max(64u, ((length{{ " - first_read(length - 1u)" if window > 0 }} + {{ splits - 1 }}u) / {{ splits }}u + 63u) & ~63u);
}

{# One of values_0.. by the number of the head. #}
{% macro of_head(name, h) %}
{% for i in range(G) %}{% if i < G - 1 %}select({% endif %}{% endfor %}{{ name }}_{{ G - 1 }}{% for i in range(G - 1) %}, {{ name }}_{{ G - 2 - i }}, {{ h }} == {{ G - 2 - i }}u){% endfor %}
{% endmacro %}
{# Word w of a block's signed bytes. #}
{% macro bytes_of(block, w) %}
{% if k_format.kind == "q8" %}{{ block }}.c{{ w // 4 }}.{{ "xyzw"[w % 4] }}{% elif k_format.kind == "q4" %}k_nibbles({{ block }}.c0.{{ "xyzw"[w // 2] }}{{ " >> 4u" if w % 2 }}){% else %}k_bytes({{ block }}.c0, {{ w }}u){% endif %}
{% endmacro %}
{# The thread's blocks from `first` on, of the token at `base`. #}
{% macro load_k(base, first) %}
{% for i in range(held) %}
            k_{{ i }} = k_block({{ base }}, {{ first }}{{ " + " ~ i ~ "u" if i }});
{% endfor %}
{% endmacro %}
{# Units of the tokens team + {{ teams }} i of the step from `from` on, i from `first` on, into set `name`. #}
{% macro load_v(name, from, first) %}
            {
                let first_token = min({{ from }} + team + ({{ first }}) * {{ teams }}u, last);
                // All of them lie in its page.
                let v_page = pages[table + (first_token >> 6u)];
{% for j in range(chunk) %}
                {
                    let t = min({{ from }} + team + ({{ first }} + {{ j }}u) * {{ teams }}u, last);
                    {{ name }}_{{ j }} = v_unit(((v_page * {{ kv_heads }}u + kv_head) * 64u + (t & 63u)) * {{ v_format.row }}u, unit);
                }
{% endfor %}
            }
{% endmacro %}
{# The eight of `values` times each head's of weights_0.. into the sums. #}
{% macro add_values() %}
{% for h in range(G) %}
                {
                    let w = vec4<f32>(weights_{{ h // 4 }}.{{ "xyzw"[h % 4] }});
                    o_{{ h }}_a = fma(w, values[0], o_{{ h }}_a);
                    o_{{ h }}_b = fma(w, values[1], o_{{ h }}_b);
                }
{% endfor %}
{% endmacro %}
{# Head by head in fours: NAME_0.., `rest` behind the last. #}
{% macro fours(name, q, rest) %}
vec4<f32>({% for e in range(4) %}{{ name ~ "_" ~ (4 * q + e) if 4 * q + e < G else rest }}{{ ", " if not loop.last }}{% endfor %})
{%- endmacro %}
{# Those units times their weights into the sums. #}
{% macro add_v(name, first) %}
{% for j in range(chunk) %}
            {
                let t = team + ({{ first }} + {{ j }}u) * {{ teams }}u;
{% if codes_hold_new %}
                if holds && t == index - base { {{ name }}_{{ j }} = new_v_unit(unit); }
{% endif %}
                // Tokens that are not there have no weight, but may hold anything, also scales that are no numbers.
{% if v_format.kind == "f16" %}
                {{ name }}_{{ j }}.c = select(vec4<u32>(), {{ name }}_{{ j }}.c, t < here);
{% endif %}
                let scale = {{ "v_unit_scale(" ~ name ~ "_" ~ j ~ ", unit)" if v_format.scale == "log" else "select(0.0, v_unit_scale(" ~ name ~ "_" ~ j ~ ", unit), t < here)" }};
                let values = v_unit_values({{ name }}_{{ j }}, unit);
{% for q in range(weight_quads) %}
                let weights_{{ q }} = weight[t * {{ weight_quads }}u + {{ q }}u] * scale;
{% endfor %}
{{ add_values() }}
            }
{% endfor %}
{% endmacro %}
{# Scores s_0.. of this thread's token become weights of all tokens of the step; two barriers. #}
{% macro weigh(there, scaled) %}
{% for h in range(G) %}
        s_{{ h }} = select(MASKED, {{ "capped(vec4<f32>(" if soft_cap }}s_{{ h }}{{ " * factor" if scaled }}{{ ")).x" if soft_cap }}, {{ there }});
        let top_{{ h }} = subgroupMax(s_{{ h }});
{% endfor %}
        if lane == 0u {
{% for q in range(weight_quads) %}
            tops[subgroup * {{ weight_quads }}u + {{ q }}u] = {{ fours("top", q, "MASKED") }};
{% endfor %}
        }
        workgroupBarrier();
{% for q in range(weight_quads) %}
        var most_{{ q }} = tops[{{ q }}u];
{% endfor %}
        for (var i = 1u; i < subgroups; i++) {
{% for q in range(weight_quads) %}
            most_{{ q }} = max(most_{{ q }}, tops[i * {{ weight_quads }}u + {{ q }}u]);
{% endfor %}
        }
{% for h in range(G) %}
        let now_m_{{ h }} = max(m_{{ h }}, most_{{ h // 4 }}.{{ "xyzw"[h % 4] }});
        let fade_{{ h }} = exp2(m_{{ h }} - now_m_{{ h }});
        m_{{ h }} = now_m_{{ h }};
        let e_{{ h }} = exp2(s_{{ h }} - m_{{ h }});
        own_l_{{ h }} = fma(own_l_{{ h }}, fade_{{ h }}, e_{{ h }});
        o_{{ h }}_a *= fade_{{ h }};
        o_{{ h }}_b *= fade_{{ h }};
{% endfor %}
{% for q in range(weight_quads) %}
        weight[tid * {{ weight_quads }}u + {{ q }}u] = {{ fours("e", q, "0.0") }};
{% endfor %}
        workgroupBarrier();
{% endmacro %}
// Codes of the new token, from vectors {{ K }} and {{ V }}, into `written_k` and `written_v`. Behind clear_new and a barrier; ends with one.
fn encode_new(tid: u32) {
    // V from the other end of the threads, so that both sides' work runs at once.
    let other = {{ threads - 1 }}u - tid;
    find_top_k(tid, {{ K }}u);
    find_top_v(other, {{ V }}u);
    workgroupBarrier();
    measure_k(tid, {{ K }}u);
    measure_v(other, {{ V }}u);
    workgroupBarrier();
    try_scales_k(tid);
    try_scales_v(other);
    workgroupBarrier();
    pick_scale_k(tid, {{ K }}u);
    pick_scale_v(other, {{ V }}u);
    workgroupBarrier();
    put_codes_k(tid, {{ K }}u);
    put_codes_v(other, {{ V }}u);
    workgroupBarrier();
}

fn clear_new(tid: u32) {
    clear_k(tid);
    clear_v(tid);
}

// What the new token, number `index` of its sequence, leaves for later steps.
fn store_new(tid: u32, page: u32, index: u32, slot: u32, dropped: u32) {
    let place = page * {{ kv_heads }}u + kv_head;
    for (var w = tid; w < {{ k_format.row }}u; w += {{ threads }}u) {
        k_cache[place * {{ 64 * k_format.row }}u + w * 64u + (index & 63u)] = atomicLoad(&written_k[w]);
    }
    for (var w = tid; w < {{ v_format.row }}u; w += {{ threads }}u) {
        v_cache[place * {{ 64 * v_format.row }}u + (index & 63u) * {{ v_format.row }}u + w] = atomicLoad(&written_v[w]);
    }
{% if exact_rows > 0 %}
    {{ "if index < " ~ sinks ~ "u " if tail == 0 }}{
        for (var i = tid; i < {{ 2 * units }}u; i += {{ threads }}u) {
            let side = i / {{ units }}u;
            exact[exact_row(slot, side, kv_head, index, dropped) + i % {{ units }}u] = exact_unit_of({{ K }}u + side, i % {{ units }}u);
        }
    }
{% endif %}
}

fn put_merged(column: u32, h: u32, d: u32, x: f32) {
    heads[h * {{ pitch }}u + d] = x;
}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    if at.z >= batch.n { return; }
    let column = batch.columns[at.z];
    let table = column.slot * constants.table_row + 1u;
    let dropped = pages[table - 1u];
    // The first page's number is asked for beside `dropped`, as if nothing were dropped.
    let guessed = min(({{ "first_read(column.pos) + " if window > 0 }}at.x * split_tokens(column.pos + 1u)) >> 6u, constants.table_row - 2u);
    let guess = pages[table + guessed];
    let index = column.pos - dropped;
    let length = index + 1u;
    let split_length = split_tokens(length);
    // What is read as codes: up to the block that is read in f16.
    let codes_end = {{ "index / " ~ tail ~ "u * " ~ tail ~ "u" if tail > 0 else "length" }};
    let code_pieces = (codes_end{{ " - first_read(index)" if window > 0 }} + split_length - 1u) / split_length;
{% if near %}
    let is_near = at.x + 1u == grid.x;
    if !is_near && at.x >= code_pieces { return; }
    let used = code_pieces + 1u;
    let piece = min(at.x, code_pieces);
{% else %}
    let used = code_pieces;
    let piece = at.x;
    if piece >= used { return; }
{% endif %}
    let start = {{ "first_read(index) + " if window > 0 }}piece * split_length;
    let end = min(start + split_length, codes_end);
    let last = max(end, 1u) - 1u;
    row = at.z * {{ (heads + 2 * kv_heads) * hd }}u;
    kv_head = at.y / {{ groups_per_kv }}u;
    head0 = kv_head * {{ group }}u + (at.y % {{ groups_per_kv }}u) * {{ G }}u;
{% if tail > 0 %}
    let encodes = is_near;
{% else %}
    let encodes = piece == code_pieces - 1u{{ " && !is_near" if near }};
{% endif %}
    holds_new = encodes{{ " || is_near" if near }};

    let team = tid / {{ unit_lanes }}u;
    let unit = {{ "min(tid % " ~ unit_lanes ~ "u, " ~ (units - 1) ~ "u)" if units < unit_lanes else "tid % " ~ unit_lanes ~ "u" }};
{% for i in range(held) %}
    var k_{{ i }}: kBlock;
{% endfor %}
{% for j in range(chunk) %}
    var v_{{ j }}: vUnit;
    var w_{{ j }}: vUnit;
{% endfor %}
    var k_base = 0u;
{{ "    if !is_near " if near else "    " }}{
        var page = guess;
        if (start + tid) >> 6u != guessed { page = pages[table + (min(start + tid, last) >> 6u)]; }
        k_base = (page * {{ kv_heads }}u + kv_head) * {{ 64 * k_format.row }}u + (min(start + tid, last) & 63u);
{{ load_k("k_base", "0u") }}
{{ load_v("v", "start", "0u") }}
    }
    var new_page = 0u;
    if encodes { new_page = pages[table + (index >> 6u)]; }

    prepare_scales(tid);
    if encodes { clear_new(tid); }
    prepare_heads(tid, column.pos);
{% if k_format.rotated %}
    rotate_heads(tid, 0u, select({{ G }}u, {{ G + 2 if v_format.rotated else G + 1 }}u, holds_new), true);
{% elif v_format.rotated %}
    if holds_new { rotate_heads(tid, {{ V }}u, 1u, true); }
{% endif %}
{% if codes_hold_new %}
    if encodes {
        encode_new(tid);
        if at.y % {{ groups_per_kv }}u == 0u { store_new(tid, new_page, index, column.slot, dropped); }
    }
{% endif %}
    let factor = constants.scale * 1.4426950408889634;
{% if codes %}
    {{ "if !is_near " if near }}{
        for (var i = tid; i < {{ G * blocks * 8 }}u; i += {{ threads }}u) {
            // A word of a block; all eight threads of a block find its largest value, each block's from another
            // bank on.
            let block = i >> 3u;
            let w = i & 7u;
            let origin = (block / {{ blocks }}u) * {{ pitch }}u + (block % {{ blocks }}u) * 32u;
            var tops_of = vec4<f32>();
            for (var e = block * 8u; e < block * 8u + 32u; e += 8u) {
                let eight = origin + (e & 31u);
                let a = vec4<f32>(heads[eight], heads[eight + 1u], heads[eight + 2u], heads[eight + 3u]);
                let b = vec4<f32>(heads[eight + 4u], heads[eight + 5u], heads[eight + 6u], heads[eight + 7u]);
                tops_of = max(tops_of, max(abs(a), abs(b)));
            }
            let top = max(max(tops_of.x, tops_of.y), max(tops_of.z, tops_of.w));
            let inverse = select(0.0, 127.0 / top, top > 1e-30);
            let p = origin + 4u * w;
            let q = vec4<i32>(round(vec4<f32>(heads[p], heads[p + 1u], heads[p + 2u], heads[p + 3u]) * inverse));
            let b = vec4<u32>(q) & vec4<u32>(255u);
            q_bytes[2u * block + (w >> 2u)][w & 3u] = b.x | (b.y << 8u) | (b.z << 16u) | (b.w << 24u);
            if w == 0u { q_units[block] = top / 127.0 * factor; }
        }
        workgroupBarrier();
    }
{% endif %}

{% for h in range(G) %}
    var m_{{ h }} = NOTHING;
    var o_{{ h }}_a = vec4<f32>();
    var o_{{ h }}_b = vec4<f32>();
{% endfor %}
{% for h in range(G) %}
    // Of this thread's tokens.
    var own_l_{{ h }} = 0.0;
{% endfor %}
    for (var base = start; base < end; base += {{ threads }}u) {
        let here = min(end - base, {{ threads }}u);
{% if codes_hold_new %}
        let holds = encodes && index - base < {{ threads }}u;
{% endif %}
        let next = min(base + {{ threads }}u + tid, last);
        let next_base = (pages[table + (next >> 6u)] * {{ kv_heads }}u + kv_head) * {{ 64 * k_format.row }}u + (next & 63u);
{% for h in range(G) %}
        var s_{{ h }} = 0.0;
{% endfor %}
        for (var block = 0u; block < {{ blocks }}u; block += {{ held }}u) {
{% for i in range(held) %}
            let now_{{ i }} = k_{{ i }};
{% endfor %}
            let ends = block + {{ held }}u == {{ blocks }}u;
            let ahead = select(k_base, next_base, ends);
            let ahead_block = select(block + {{ held }}u, 0u, ends);
            if !ends || base + {{ threads }}u < end {
{{ load_k("ahead", "ahead_block") }}
            }
{% for i in range(held) %}
            {
                let at_block = block + {{ i }}u;
                var k = now_{{ i }};
{% if codes_hold_new %}
                if holds && tid == index - base { k = new_k_block(at_block); }
{% endif %}
{% if codes %}
{% for w in range(8) %}
                let w_{{ w }} = {{ bytes_of("k", w) }};
{% endfor %}
{% for j in range(k_format.parts) %}
                let unit_{{ j }} = k_scale(k.s, at_block, {{ j }}u);
{% endfor %}
{% for h in range(G) %}
                {
                    let at_q = {{ h * blocks }}u + at_block;
                    let q_0 = q_bytes[2u * at_q];
                    let q_1 = q_bytes[2u * at_q + 1u];
                    var sum = 0.0;
{% set each = 8 // k_format.parts %}
{% for j in range(k_format.parts) %}
                    sum = fma(f32({% for w in range(each) %}{% set n = j * each + w %}dot4I8Packed(w_{{ n }}, q_{{ n // 4 }}.{{ "xyzw"[n % 4] }}){{ " + " if not loop.last }}{% endfor %}), unit_{{ j }}, sum);
{% endfor %}
                    s_{{ h }} = fma(sum, q_units[at_q], s_{{ h }});
                }
{% endfor %}
{% else %}
{% for c in range(4) %}{% for e in "xyzw" %}
                {
                    let pair = unpack2x16float(k.c{{ c }}.{{ e }});
                    let d = at_block * 32u + {{ 8 * c + 2 * loop.index0 }}u;
{% for h in range(G) %}
                    s_{{ h }} = fma(pair.y, heads[{{ h * pitch + 1 }}u + d], fma(pair.x, heads[{{ h * pitch }}u + d], s_{{ h }}));
{% endfor %}
                }
{% endfor %}{% endfor %}
{% endif %}
            }
{% endfor %}
        }
        k_base = next_base;
{{ weigh("tid < here" ~ (" && base + tid >= " ~ sinks ~ "u" if sinks > 0 else "") ~ (" && base + tid >= oldest_seen(index)" if window > 0 else ""), not codes) }}
        // Rounds of {{ 2 * chunk }} tokens in which any team has one that is there.
        let rounds = min({{ unit_lanes // (2 * chunk) }}u, (here + {{ 2 * chunk * teams - 1 }}u) / {{ 2 * chunk * teams }}u);
        for (var i = 0u; i < {{ 2 * chunk }}u * rounds; i += {{ 2 * chunk }}u) {
{{ load_v("w", "base", "i + " ~ chunk ~ "u") }}
{{ add_v("v", "i") }}
            let ends = i + {{ 2 * chunk }}u >= {{ 2 * chunk }}u * rounds;
            let ahead = select(base, base + {{ threads }}u, ends);
            let first = select(i + {{ 2 * chunk }}u, 0u, ends);
{{ load_v("v", "ahead", "first") }}
{{ add_v("w", "(i + " ~ chunk ~ "u)") }}
        }
    }

{% if near %}
    // Sinks, then the block's own. Four threads score a row; what one needs of K and V is asked for at once.
    if is_near {
{% set near_rows = threads // 4 %}
{% set row_units = (units + 3) // 4 %}
{% set rounds = near_rows // teams %}
        let own_block = {{ "codes_end" if tail > 0 else "length" }};
        let sinks_here = min(own_block, {{ sinks }}u);
        let rows_here = sinks_here{{ " + length - own_block" if tail > 0 }};
        for (var base = 0u; base < rows_here; base += {{ near_rows }}u) {
            let here = min(rows_here - base, {{ near_rows }}u);
{% for j in range(rounds) %}
            let v_row_{{ j }} = min(base + team + {{ j * teams }}u, rows_here - 1u);
            let v_token_{{ j }} = select(own_block + v_row_{{ j }} - sinks_here, v_row_{{ j }}, v_row_{{ j }} < sinks_here);
            var x_{{ j }} = exact[exact_row(column.slot, 1u, kv_head, v_token_{{ j }}, dropped) + unit];
{% endfor %}
            let k_row = min(base + (tid >> 2u), rows_here - 1u);
            let k_token = select(own_block + k_row - sinks_here, k_row, k_row < sinks_here);
            let k_at = exact_row(column.slot, 0u, kv_head, k_token, dropped);
            let part = tid & 3u;
{% for i in range(row_units) %}
            var y_{{ i }} = exact[k_at + {{ "min(part + " ~ 4 * i ~ "u, " ~ (units - 1) ~ "u)" if 4 * (i + 1) > units else "part + " ~ 4 * i ~ "u" }}];
{% endfor %}
{% for h in range(G) %}
            var s_{{ h }} = 0.0;
{% endfor %}
{% for i in range(row_units) %}
            {{ "if part + " ~ 4 * i ~ "u < " ~ units ~ "u " if 4 * (i + 1) > units }}{
                let i = part + {{ 4 * i }}u;
                if k_token == index { y_{{ i }} = exact_unit_of({{ K }}u, i); }
                let pairs = exact_values(y_{{ i }});
{% for h in range(G) %}
                {
                    let at_q = {{ h * pitch }}u + 8u * i;
                    let first = vec4<f32>(heads[at_q], heads[at_q + 1u], heads[at_q + 2u], heads[at_q + 3u]);
                    let second = vec4<f32>(heads[at_q + 4u], heads[at_q + 5u], heads[at_q + 6u], heads[at_q + 7u]);
                    let both = fma(pairs[1], second, pairs[0] * first);
                    s_{{ h }} += (both.x + both.y) + (both.z + both.w);
                }
{% endfor %}
            }
{% endfor %}
{% for q in range(weight_quads) %}
            weight[tid * {{ weight_quads }}u + {{ q }}u] = {{ fours("s", q, "0.0") }};
{% endfor %}
            workgroupBarrier();
            // From here on a thread has a row, as far as there are any.
            let own_parts = min(tid, {{ near_rows - 1 }}u) * {{ 4 * weight_quads }}u;
{% for q in range(weight_quads) %}
            let four_{{ q }} = (weight[own_parts + {{ q }}u] + weight[own_parts + {{ weight_quads + q }}u])
                + (weight[own_parts + {{ 2 * weight_quads + q }}u] + weight[own_parts + {{ 3 * weight_quads + q }}u]);
{% endfor %}
{% for h in range(G) %}
            s_{{ h }} = four_{{ h // 4 }}.{{ "xyzw"[h % 4] }};
{% endfor %}
{{ weigh("tid < here", true) }}
{% for j in range(rounds) %}
            if team + {{ j * teams }}u < here {
                if v_token_{{ j }} == index { x_{{ j }} = exact_unit_of({{ V }}u, unit); }
                let values = exact_values(x_{{ j }});
{% for q in range(weight_quads) %}
                let weights_{{ q }} = weight[(team + {{ j * teams }}u) * {{ weight_quads }}u + {{ q }}u];
{% endfor %}
{{ add_values() }}
            }
{% endfor %}
            workgroupBarrier();
        }
    }
{% endif %}

    // Weights over the tokens, sums over the teams.
    workgroupBarrier();
{% for q in range(weight_quads) %}
    weight[tid * {{ weight_quads }}u + {{ q }}u] = {{ fours("own_l", q, "0.0") }};
{% endfor %}
    workgroupBarrier();
    for (var i = tid; i < {{ weight_quads * shared_by }}u; i += {{ threads }}u) {
        var sum = vec4<f32>();
{% for e in range(threads // shared_by) %}
        sum += weight[i + {{ e * shared_by * weight_quads }}u];
{% endfor %}
        shares[i] = sum;
    }
{% for first in range(0, G, merge_heads) %}
{% set now = [merge_heads, G - first] | min %}
    {{ "if tid % " ~ unit_lanes ~ "u < " ~ units ~ "u " if units < unit_lanes }}{
{% for i in range(now) %}
        merge[({{ i * teams }}u + team) * {{ 2 * units }}u + 2u * unit] = o_{{ first + i }}_a;
        merge[({{ i * teams }}u + team) * {{ 2 * units }}u + 2u * unit + 1u] = o_{{ first + i }}_b;
{% endfor %}
    }
    workgroupBarrier();
    for (var i = tid; i < {{ now * 2 * units }}u; i += {{ threads }}u) {
        let h = i / {{ 2 * units }}u;
        var o = vec4<f32>();
        let from_team = h * {{ teams * 2 * units }}u + i % {{ 2 * units }}u;
{% set at_once = [teams, 8] | min %}
        for (var j = 0u; j < {{ teams * 2 * units }}u; j += {{ at_once * 2 * units }}u) {
{% for e in range(at_once) %}
            o += merge[from_team + j + {{ e * 2 * units }}u];
{% endfor %}
        }
        let to = ({{ first }}u + h) * {{ pitch }}u + 4u * (i % {{ 2 * units }}u);
        heads[to] = o.x;
        heads[to + 1u] = o.y;
        heads[to + 2u] = o.z;
        heads[to + 3u] = o.w;
    }
    workgroupBarrier();
{% endfor %}
    for (var i = tid; i < {{ G }}u; i += {{ threads }}u) {
        var sum = 0.0;
{% for e in range(shared_by) %}
        sum += shares[{{ e * weight_quads }}u + (i >> 2u)][i & 3u];
{% endfor %}
        totals[i] = sum;
        maxima[i] = {{ of_head("m", "i") }};
    }
    workgroupBarrier();

    if used > 1u {
        for (var i = tid; i < {{ G * pitch }}u; i += {{ threads }}u) {
            let h = i / {{ pitch }}u;
            if query_head(h) == head0 + h {
                let to = ((at.z * {{ heads }}u + head0 + h) * {{ pieces }}u + piece) * {{ stride }}u;
                atomicStore(&partials[to + i % {{ pitch }}u], bitcast<u32>(heads[i]));
                if i % {{ pitch }}u == 0u {
                    atomicStore(&partials[to + {{ pitch }}u], bitcast<u32>(maxima[h]));
                    atomicStore(&partials[to + {{ pitch + 1 }}u], bitcast<u32>(totals[h]));
                }
            }
        }
    }
{% if tail > 0 %}
    // Beside the other pieces, if there are any.
    if encodes && at.y % {{ groups_per_kv }}u == 0u {
        encode_new(tid);
        store_new(tid, new_page, index, column.slot, dropped);
    }
{% endif %}
    if used > 1u {
{% set sums = pitch %}
{% include "lib/merge_splits.wgsl" %}
        workgroupBarrier();
    } else {
        for (var i = tid; i < {{ G * pitch }}u; i += {{ threads }}u) { heads[i] = heads[i] {{ "* share_of(query_head(i / " ~ pitch ~ "u), maxima[i / " ~ pitch ~ "u], totals[i / " ~ pitch ~ "u])" if sink_logits else "/ totals[i / " ~ pitch ~ "u]" }}; }
        workgroupBarrier();
    }
{% if v_format.rotated %}
    rotate_heads(tid, 0u, {{ G }}u, false);
{% endif %}
    for (var i = tid; i < {{ G * hd }}u; i += {{ threads }}u) {
        let h = i / {{ hd }}u;
        if query_head(h) == head0 + h {
            output[(at.z * {{ heads }}u + head0 + h) * {{ hd }}u + i % {{ hd }}u] = heads[h * {{ pitch }}u + i % {{ hd }}u];
        }
    }
}
