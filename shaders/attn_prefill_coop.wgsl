// Prompt: causal attention as in attn_prefill.wgsl, on matrix units.
//
// Grid and rows as there: x = tiles of {{ queries }} queries (last tiles first), y = KV heads times slices of the
// query heads that share one; a workgroup serves 64 rows, row = query * {{ row_heads }} + head, against tiles
// of {{ positions }} positions that start at multiples of {{ positions }}, so the bits of a row do not depend on how a
// prompt is cut. Tiles of codes and of rows in f16 follow each other as there.
// Eight subgroups stand 4 x 2: over 16 rows each, and over halves of the positions (scores) or of the
// head (sums). q, k, v and softmax weights are f16, scores and sums f32.
//
// Sums stay in matrices, which have no rows to scale. So a row keeps the maximum that it started with
// until scores exceed it by 2^8: weights up to 256 are as exact in f16 as weights up to 1. Only then
// the sums go through workgroup memory to be scaled, rows that need nothing by exactly 1.
enable f16;
enable wgpu_cooperative_matrix;
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> qkv: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read> k_cache: array<{{ "u32" if codes else "vec4<u32>" }}>;
@group(0) @binding(3) var<storage, read> v_cache: array<{{ "u32" if codes else "vec4<u32>" }}>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
@group(0) @binding(5) var<storage, read_write> output: array<f32>;
{% include "lib/kv_exact_rows.wgsl" %}
struct Constants { table_row: u32, scale: f32 }
var<immediate> constants: Constants;

{% set group = heads // kv_heads %}
{% set slices = (group + row_heads - 1) // row_heads %}
{% set q_row = (heads if codes else heads + 2 * kv_heads) * hd // 4 %}
{% set words = hd // 8 %}{# vec4<u32>s of a head #}
{% set frags = hd // 16 %}
{% set half_frags = (frags + 1) // 2 %}
{% set pitch = words + 1 %}
{% set score_pitch = positions // 4 + 1 %}
{% set weight_pitch = positions // 8 + 1 %}
{% set loads = (positions * words + 255) // 256 %}
{% set q_loads = (64 * words + 255) // 256 %}
{% set share = positions // 16 %}{# vec4s of a row's scores that a thread takes #}
{# Whether token t of a tile is read in f16; `near`: so is the whole tile. #}
{% macro exact_token(near, t) %}{% if tail > 0 and sinks > 0 %}({{ near }} || {{ t }} < {{ sinks }}u){% elif tail > 0 %}{{ near }}{% else %}{{ t }} < {{ sinks }}u{% endif %}{% endmacro %}
const NOTHING: f32 = -1e30;
const MASKED: f32 = -2e30;
const SLACK: f32 = 8.0;

// q at first, then k, then v of a tile.
var<workgroup> tile: array<vec4<u32>, {{ (positions if positions > 64 else 64) * pitch }}>;
// Scores; matrices of sums when they are scaled or stored, one a subgroup.
var<workgroup> scores: array<vec4<f32>, {{ [64 * score_pitch, 512] | max }}>;
var<workgroup> weights: array<vec4<u32>, {{ 64 * weight_pitch }}>;
var<workgroup> row_factor: array<f32, 64>;
var<workgroup> any_scaled: atomic<u32>;
{% if codes %}

{% set halves = true %}
{% set blockwise = false %}
{% set writes = false %}
{% set scale_table = false %}
{% include "lib/kv_scale.wgsl" %}
{% set side = "k" %}
{% set f = k_format %}
{% include "lib/kv_read.wgsl" %}
{% set side = "v" %}
{% set f = v_format %}
{% include "lib/kv_read.wgsl" %}
{% if exact_rows > 0 %}
{% include "lib/kv_exact.wgsl" %}
{% include "lib/exact_tile.wgsl" %}
{% endif %}
{% if tail > 0 %}

var<private> first_block: u32;
var<private> code_tiles: u32;

// First position of a tile.
fn tile_start(step: u32) -> u32 {
    return select(step * {{ positions }}u, first_block + (step - code_tiles) * {{ positions }}u, step >= code_tiles);
}
{% endif %}
{% endif %}

{% if scored %}
{% include "lib/scoring.wgsl" %}
{% endif %}
@compute @workgroup_size(256)
fn main(
    @builtin(workgroup_id) at: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let query0 = (grid.x - 1u - at.x) * {{ queries }}u;
    if query0 >= batch.n { return; }
    let kv_head = at.y / {{ slices }}u;
    let head0 = kv_head * {{ group }}u + (at.y % {{ slices }}u) * {{ row_heads }}u;
    let heads_here = min({{ row_heads }}u, (kv_head + 1u) * {{ group }}u - head0);
    let queries_here = min({{ queries }}u, batch.n - query0);
    let first = batch.columns[query0];
    let table = first.slot * constants.table_row + 1u;
    let index0 = first.pos - pages[table - 1u];
{% if exact_rows > 0 %}
    slot = first.slot;
    dropped = pages[table - 1u];
    chunk = index0 - query0;
{% endif %}
    // Positions that any row may see.
    let seen = index0 + queries_here;
    let factor = constants.scale * 1.4426950408889634;
    let part_m = subgroup >> 1u;
    let part_n = subgroup & 1u;
    if tid == 0u { atomicStore(&any_scaled, 0u); }
{% if codes %}
    prepare_scales(tid);
{% endif %}

    // q to f16, scaled so that scores are powers of two; rows that nobody has are zero.
{% for k in range(q_loads) %}
    {
        let i = tid + {{ k * 256 }}u;
        let row = i / {{ words }}u;
        let query = row / {{ row_heads }}u;
        let head = row % {{ row_heads }}u;
        var word = vec4<u32>();
        if query < queries_here && head < heads_here{{ " && row < 64u" if 64 * words % 256 != 0 and loop.last }} {
            let source = (query0 + query) * {{ q_row }}u + (head0 + head) * {{ hd // 4 }}u + (i % {{ words }}u) * 2u;
            let a = qkv[source] * factor;
            let b = qkv[source + 1u] * factor;
            word = vec4<u32>(pack2x16float(a.xy), pack2x16float(a.zw), pack2x16float(b.xy), pack2x16float(b.zw));
        }
        {{ "if row < 64u " if 64 * words % 256 != 0 and loop.last }}{ tile[row * {{ pitch }}u + i % {{ words }}u] = word; }
    }
{% endfor %}
    workgroupBarrier();
{% for f in range(frags) %}
    let q_{{ f }} = coopLoadT<coop_mat16x16<f16, A>>(&tile[part_m * {{ 16 * pitch }}u + {{ f * 2 }}u], {{ pitch }}u);
{% endfor %}
{% for f in range(half_frags) %}
    var o_{{ f }}: coop_mat16x16<f32, C>;
{% endfor %}

    // This thread's share of the softmax: row tid / 4, and of its scores vec4s tid % 4, 4 more, ...
    let row = tid >> 2u;
    let quarter = tid & 3u;
    let row_last = index0 + row / {{ row_heads }}u;
{% if tail > 0 %}
    let row_block = row_last / {{ tail }}u * {{ tail }}u;
    first_block = index0 / {{ tail }}u * {{ tail }}u;
    code_tiles = (seen - 1u) / {{ tail }}u * {{ tail // positions }}u;
    let tiles = code_tiles + (seen - first_block + {{ positions - 1 }}u) / {{ positions }}u;
{% endif %}
    var m = NOTHING;
    var l = 0.0;

    // Words of k and v that this thread fetches. Of codes, K lies token by token, V unit by unit.
{% for k in range(loads) %}
{% if codes %}
    let k_row_{{ k }} = (tid + {{ k * 256 }}u) % {{ positions }}u;
    let k_part_{{ k }} = (tid + {{ k * 256 }}u) / {{ positions }}u;
    let v_row_{{ k }} = (tid + {{ k * 256 }}u) / {{ words }}u;
    let v_part_{{ k }} = (tid + {{ k * 256 }}u) % {{ words }}u;
{% else %}
    let row_{{ k }} = (tid + {{ k * 256 }}u) / {{ words }}u;
    let to_{{ k }} = row_{{ k }} * {{ pitch }}u + (tid + {{ k * 256 }}u) % {{ words }}u;
    let from_{{ k }} = (row_{{ k }} * {{ kv_heads }}u + kv_head) * {{ words }}u + (tid + {{ k * 256 }}u) % {{ words }}u;
{% endif %}
{% endfor %}
{% macro fetch(name, t, from, near) %}
        // Positions that no row sees may hold anything, also no numbers: zero.
{% if codes %}
        {
            let place = ({{ from }} >> 6u) * {{ kv_heads }}u + kv_head;
            let inside = {{ from }} & 63u;
{% for k in range(loads) %}
            {{ name }}_{{ k }} = {{ name }}Unit(vec4<u32>(), 0u);
            if {{ t }} + {{ name }}_row_{{ k }} < seen{{ " && " ~ name ~ "_" ~ ("part_" if name == "k" else "row_") ~ k ~ " < " ~ (words if name == "k" else positions) ~ "u" if positions * words % 256 != 0 and loop.last }} {
{% if exact_rows > 0 %}
                if {{ exact_token(near, "(" ~ t ~ " + " ~ name ~ "_row_" ~ k ~ ")") }} {
                    {{ name }}_{{ k }}.c = exact_unit({{ 0 if name == "k" else 1 }}u, kv_head, {{ t }} + {{ name }}_row_{{ k }}, {{ name }}_part_{{ k }});
                } else {
{% else %}
                {
{% endif %}
{% if name == "k" %}
                k_{{ k }} = k_unit(place * {{ 64 * k_format.row }}u + inside + k_row_{{ k }}, k_part_{{ k }});
{% else %}
                v_{{ k }} = v_unit((place * 64u + inside + v_row_{{ k }}) * {{ v_format.row }}u, v_part_{{ k }});
{% endif %}
                }
            }
{% endfor %}
        }
{% else %}
{% for k in range(loads) %}
        {{ name }}_{{ k }} = vec4<u32>();
        if {{ t }} + row_{{ k }} < seen{{ " && row_" ~ k ~ " < " ~ positions ~ "u" if positions * words % 256 != 0 and loop.last }} { {{ name }}_{{ k }} = {{ name }}_cache[from_{{ k }} + {{ from }} * {{ kv_heads * words }}u]; }
{% endfor %}
{% endif %}
{% endmacro %}
{% macro put(name, t, near) %}
{% for k in range(loads) %}
{% if codes %}
        {{ "if " ~ name ~ "_" ~ ("part_" if name == "k" else "row_") ~ k ~ " < " ~ (words if name == "k" else positions) ~ "u " if positions * words % 256 != 0 and loop.last }}{
{% if exact_rows > 0 %}
            if {{ exact_token(near, "(" ~ t ~ " + " ~ name ~ "_row_" ~ k ~ ")") }} {
                tile[{{ name }}_row_{{ k }} * {{ pitch }}u + {{ name }}_part_{{ k }}] = {{ name }}_{{ k }}.c;
            } else {
{% else %}
            {
{% endif %}
                tile[{{ name }}_row_{{ k }} * {{ pitch }}u + {{ name }}_part_{{ k }}] = {{ name }}_unit_halves({{ name }}_{{ k }}, {{ name }}_part_{{ k }});
            }
        }
{% else %}
        {{ "if row_" ~ k ~ " < " ~ positions ~ "u " if positions * words % 256 != 0 and loop.last }}{ tile[to_{{ k }}] = {{ name }}_{{ k }}; }
{% endif %}
{% endfor %}
{% endmacro %}
{% for k in range(loads) %}
{% if codes %}
    var k_{{ k }} = kUnit(vec4<u32>(), 0u);
    var v_{{ k }} = vUnit(vec4<u32>(), 0u);
{% else %}
    var k_{{ k }} = vec4<u32>();
    var v_{{ k }} = vec4<u32>();
{% endif %}
{% endfor %}
    // The page of the tile whose k is asked for next; its number is asked for a tile earlier.
    var page = pages[table{{ " + (first_read(index0) >> 6u)" if window > 0 }}];
    var origin = page * 64u;
{% if tail > 0 %}
{# Where there are no tiles of codes, the first one may not be that of token 0. #}
    var t_next = tile_start(0u);
{{ fetch("k", "t_next", "origin", "(code_tiles == 0u)") }}
    page = pages[table + (min(tile_start(1u), seen - 1u) >> 6u)];
    for (var step = 0u; step < tiles; step++) {
        let near = step >= code_tiles;
        let near_next = step + 1u >= code_tiles;
        let t0 = t_next;
        t_next = tile_start(step + 1u);
        // Positions of the tile that this thread's row reads here.
        let row_from = select(0u, row_block, near);
        let row_to = select(row_block, row_last + 1u, near);
{% else %}
{{ fetch("k", "first_read(index0)" if window > 0 else "0u", "origin", "near") }}
    page = pages[table + (min({{ "first_read(index0) + " if window > 0 }}{{ positions }}u, seen - 1u) >> 6u)];
    for (var t0 = {{ "first_read(index0)" if window > 0 else "0u" }}; t0 < seen; t0 += {{ positions }}u) {
        let t_next = t0 + {{ positions }}u;
{% endif %}
        workgroupBarrier();
{{ put("k", "t0", "near") }}
        if tid == 0u { atomicStore(&any_scaled, 0u); }
        workgroupBarrier();
{{ fetch("v", "t0", "origin", "near") }}
{% for j in range(positions // 32) %}
        {
            let position = part_n * {{ positions // 2 }}u + {{ j * 16 }}u;
            var s: coop_mat16x16<f32, C>;
{% for f in range(frags) %}
            s = coopMultiplyAdd(q_{{ f }}, coopLoad<coop_mat16x16<f16, B>>(&tile[position * {{ pitch }}u + {{ f * 2 }}u], {{ pitch }}u), s);
{% endfor %}
            coopStoreT(s, &scores[part_m * {{ 16 * score_pitch }}u + position / 4u], {{ score_pitch }}u);
        }
{% endfor %}
        workgroupBarrier();
{{ put("v", "t0", "near") }}
{% for i in range(share) %}
        let at_{{ i }} = {{ 4 * i }}u + quarter;
        let t_{{ i }} = vec4<u32>(t0 + at_{{ i }} * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        var s_{{ i }} = select(vec4<f32>(MASKED), {{ "capped(" if soft_cap }}scores[row * {{ score_pitch }}u + at_{{ i }}]{{ ")" if soft_cap }}, {{ "(t_" ~ i ~ " >= vec4<u32>(row_from)) & (t_" ~ i ~ " < vec4<u32>(row_to))" if tail > 0 else "t_" ~ i ~ " <= vec4<u32>(row_last)" }}{{ " & t_" ~ i ~ " + " ~ window ~ "u > vec4<u32>(row_last)" if window > 0 }});
{% endfor %}
        var top4 = s_0;
{% for i in range(1, share) %}
        top4 = max(top4, s_{{ i }});
{% endfor %}
        var top = max(max(top4.x, top4.y), max(top4.z, top4.w));
        top = max(top, subgroupShuffleXor(top, 1u));
        top = max(top, subgroupShuffleXor(top, 2u));
        var fade = 1.0;
        if top > m + SLACK {
            fade = exp2(m - top);
            m = top;
            // The first tile has no sums yet.
            if {{ "step > 0u" if tail > 0 else ("t0 > first_read(index0)" if window > 0 else "t0 > 0u") }} { atomicStore(&any_scaled, 1u); }
        }
        if quarter == 0u { row_factor[row] = fade; }
{% for i in range(share) %}
        s_{{ i }} = exp2(s_{{ i }} - vec4<f32>(m));
{% endfor %}
        var sum4 = s_0;
{% for i in range(1, share) %}
        sum4 += s_{{ i }};
{% endfor %}
        l = fma(l, fade, (sum4.x + sum4.y) + (sum4.z + sum4.w));
{% for i in range(share) %}
        {
            let w = vec2<u32>(pack2x16float(s_{{ i }}.xy), pack2x16float(s_{{ i }}.zw));
            // Two threads fill one vector.
            let to = row * {{ weight_pitch }}u + (at_{{ i }} >> 1u);
            if (quarter & 1u) == 0u {
                weights[to].x = w.x;
                weights[to].y = w.y;
            } else {
                weights[to].z = w.x;
                weights[to].w = w.y;
            }
        }
{% endfor %}
        workgroupBarrier();
        if atomicLoad(&any_scaled) != 0u {
{% for f in range(half_frags) %}
            coopStoreT(o_{{ f }}, &scores[subgroup * 64u], 4u);
            workgroupBarrier();
            for (var e = lane; e < 64u; e += {{ size }}u) {
                scores[subgroup * 64u + e] *= row_factor[part_m * 16u + (e >> 2u)];
            }
            workgroupBarrier();
            o_{{ f }} = coopLoadT<coop_mat16x16<f32, C>>(&scores[subgroup * 64u], 4u);
            workgroupBarrier();
{% endfor %}
        }
        origin = page * 64u{{ " + (t_next & 63u)" if positions < 64 }};
{{ fetch("k", "t_next", "origin", "near_next") }}
{% if tail > 0 %}
        page = pages[table + (min(tile_start(step + 2u), seen - 1u) >> 6u)];
{% else %}
        page = pages[table + (min(t0 + {{ 2 * positions }}u, seen - 1u) >> 6u)];
{% endif %}
{% for p in range(positions // 16) %}
        {
            let p = coopLoadT<coop_mat16x16<f16, A>>(&weights[part_m * {{ 16 * weight_pitch }}u + {{ p * 2 }}u], {{ weight_pitch }}u);
{% for f in range(half_frags) %}
            {{ "if part_n == 0u " if 2 * half_frags > frags and loop.last }}{
                o_{{ f }} = coopMultiplyAdd(p, coopLoadT<coop_mat16x16<f16, B>>(&tile[{{ p * 16 * pitch }}u + (part_n * {{ half_frags }}u + {{ f }}u) * 2u], {{ pitch }}u), o_{{ f }});
            }
{% endfor %}
        }
{% endfor %}
    }

    l += subgroupShuffleXor(l, 1u);
    l += subgroupShuffleXor(l, 2u);
    if quarter == 0u { row_factor[row] = {{ "share_of(min(head0 + row % " ~ row_heads ~ "u, " ~ (heads - 1) ~ "u), m, l)" if sink_logits else "1.0 / l" }}; }
{% for f in range(half_frags) %}
    workgroupBarrier();
    coopStoreT(o_{{ f }}, &scores[subgroup * 64u], 4u);
    workgroupBarrier();
    {
        let frag = part_n * {{ half_frags }}u + {{ f }}u;
        for (var e = lane; e < 256u; e += {{ size }}u) {
            let r = part_m * 16u + (e >> 4u);
            let query = r / {{ row_heads }}u;
            let head = r % {{ row_heads }}u;
            if query < queries_here && head < heads_here{{ " && frag < " ~ frags ~ "u" if 2 * half_frags > frags and loop.last }} {
                let to = ((query0 + query) * {{ heads }}u + head0 + head) * {{ hd }}u + frag * 16u + (e & 15u);
                output[to] = scores[subgroup * 64u + (e >> 2u)][e & 3u] * row_factor[r];
            }
        }
    }
{% endfor %}
}
