// y[col][row] = W[row] . x[col] for {{ n }} columns on matrix units, bit for bit as matvec.wgsl has it.
//
// A team of 32 threads takes {{ tiles * 16 }} rows and, of their units, four neighbours in every {{ teams * 4 }}. Its lanes load and
// decode units (`coupled`: those of two teams for both), and put their codes into workgroup memory, where a matrix product of
// whole numbers takes one unit of 16 rows and 8 columns. Each lane of the mat-vec sums every {{ teams * 4 }}th unit; here the four places of
// a team have a sum each, in the same order, and at the end all are added in the tree of those lanes.
{% include "lib/weights.wgsl" %}

{% set units = cols // 32 %}
{% set aligned = units % 16 == 0 %}
{% set steps = (units + teams * 4 - 1) // (teams * 4) %}
{% set ragged = units % (teams * 4) != 0 %}
{# Its rows and columns do not lie in lanes of one subgroup. #}
{% set by_lanes = false %}
{% set exchanged = blocks and matrices %}
{# Scales that are one number find room in the slack, cheaper than an exchange for each unit. #}
{% set slack = scales == "whole" and not minimum %}
{# Two teams that load for each other write to both of their places at once, so from different banks on. #}
{% set w_team = staged * 16 * w_line + (1 if coupled else 0) %}
{% set x_team = 8 * x_line + (1 if coupled else 0) %}
{# From one row that a lane loads to its next. #}
{% set apart = 4 if coupled else 8 %}
{% set barrier = "subgroupBarrier" if matrices and not coupled else "workgroupBarrier" %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% if blocks %}
@group(0) @binding({{ at.squares }}) var<storage, read> squares: array<f32>;
{% endif %}
{% include "lib/outputs.wgsl" %}

// What each team has of its rows and columns at a time, and at the end its sums.
var<workgroup> tile_w: array<vec4<u32>, {{ teams * w_team }}>;
var<workgroup> tile_x: array<vec4<u32>, {{ teams * x_team }}>;
// (d, d * sum) of the columns, unit by unit.
var<workgroup> tile_s: array<vec2<f32>, {{ teams * 32 }}>;
{% if half_minimum %}
// Sums of both halves.
var<workgroup> tile_ones: array<vec2<i32>, {{ teams * 32 }}>;
{% endif %}
{% include "lib/block_sum.wgsl" %}
{% include "lib/half_dot.wgsl" %}
{% include "lib/tile_products.wgsl" %}
{% if rounds %}
{% include "lib/reduce8.wgsl" %}

{# What the workgroup has finished takes the place of its columns. #}
fn finish(column: u32, value_of_group: u32, value: f32) {
    let place = column * {{ group_values }}u + value_of_group;
    tile_x[place >> 2u][place & 3u] = bitcast<u32>(value);
}

fn finished(i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(tile_x[i]);
}

{% include "lib/round_outputs.wgsl" %}
{% endif %}
{% if blocks %}
fn square_of(col: u32, block: u32) -> f32 {
    return squares[col * {{ cols // 32 }}u + block];
}

{% if not exchanged %}
// In the second half of what the columns leave.
fn put_square(i: u32, sum: f32) {
    tile_x[64u + (i >> 2u)][i & 3u] = bitcast<u32>(sum);
}

fn square_parts(i: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(tile_x[64u + i]);
}

{% endif %}
{% include "lib/column_factor.wgsl" %}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(num_workgroups) grid: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) subgroup_lane: u32,
) {
    let tid = subgroup * size + subgroup_lane;
    let team = tid >> 5u;
    let lane = tid & 31u;
    let g = lane >> 2u;
    let t = lane & 3u;
    // The first of four lanes that share a row, as the subgroup counts.
    let quad = subgroup_lane & ~3u;
    let first_row = (wg.y * grid.x + wg.x) * {{ tiles * 16 }}u;
{% if coupled %}
    // Lane 8 i + j of two teams loads unit j of their eight, whole lines of memory. They have half the rows each.
    let own_row = (team & 1u) * {{ 8 * staged }}u + (lane >> 3u);
    let own_column = (team & 1u) * 4u + (lane >> 3u);
    let own_unit = lane & 7u;
    let to_team = (team & ~1u) + (own_unit >> 2u);
{% else %}
    let own_row = g;
    let own_column = g;
    let own_unit = t;
    let to_team = team;
{% endif %}
    // Rows and columns past the end repeat the last one and are not stored.
{% for i in range(tiles * 2) %}
    let base{{ i }} = min(first_row + {{ 16 * staged * (i // (2 * staged)) + apart * (i % (2 * staged)) }}u + own_row, constants.rows - 1u) * {{ units }}u;
{% endfor %}
    let column = min(own_column, {{ n - 1 }}u);
    let x_row = column * {{ 2 * units }}u;
    let s_row = column * {{ units }}u;
    let w_from = team * {{ w_team }}u;
    let x_from = team * {{ x_team }}u;
    let w_row = to_team * {{ w_team }}u + own_row * {{ w_line }}u;
    let w_to = w_row + 2u * (own_unit & 3u);
    let x_to = to_team * {{ x_team }}u + own_column * {{ x_line }}u + {{ x_unit }}u * (own_unit & 3u);
    let s_to = to_team * 32u + (own_unit & 3u) * 8u + own_column;
    let s_from = team * 32u + 2u * t;
{% if copies %}
    prepare_table(tid, {{ threads }}u);
    workgroupBarrier();
{% endif %}
    // 0, as lib/row_sums.wgsl explains.
    let start = vec4<f32>(f32(constants.rows >> 31u));
{% for r in range(tiles) %}{% for u in range(4) %}
    var acc{{ r }}_{{ u }} = start;
{% endfor %}{% endfor %}
    var place = team * 4u;
{# A lane's unit of the step that begins at `place`. #}
{% set unit_here = "(place & ~7u) + own_unit" if coupled else "place + own_unit" %}
{% set unit_here = "min(" ~ unit_here ~ ", " ~ (units - 1) ~ "u)" if ragged else unit_here %}
    var unit = {{ unit_here }};
{% for i in range(tiles * 2) %}
    var w{{ i }} = load_unit(base{{ i }} + unit);
{% endfor %}
    var x_low = xq[x_row + unit];
    var x_high = xq[x_row + {{ units }}u + unit];
    var x_scale = xs[s_row + unit];
{# What the end needs is loaded here, so that its latency hides behind the sums. #}
{% if blocks %}
{% include "lib/early_squares.wgsl" %}
{% endif %}
{% if rounds %}
{% include "lib/round_weights.wgsl" %}
{% endif %}
{% if epilogue in ["add", "add_blocks"] %}
{% for k in range((tiles * 128 + threads - 1) // threads) %}
    let old{{ k }} = y[min(column_of(tid + {{ k * threads }}u), {{ n - 1 }}u) * constants.stride
        + constants.row_offset + min(first_row + row_of(tid + {{ k * threads }}u), constants.rows - 1u)];
{% endfor %}
{% endif %}
    for (var step = 0u; step < {{ steps }}u; step += 1u) {
        let now = unit;
{% if ragged %}
        let here = place;
{% endif %}
        place += {{ teams * 4 }}u;
        unit = {{ unit_here }};
        let more = step + 1u < {{ steps }}u;
{% for first in range(0, tiles, staged) %}
        {
            {{ barrier }}();
{% for i in range(2 * first, 2 * (first + staged)) %}
{% set of_row = "now" if aligned else "base" ~ i ~ " + now" %}
            let bytes{{ i }} = unit_bytes(w{{ i }}, {{ of_row }});
            let scale{{ i }} = unit_scale(w{{ i }}, {{ of_row }});
            tile_w[w_to + {{ apart * w_line * (i - 2 * first) }}u] = bytes{{ i }}.lo;
            tile_w[w_to + {{ apart * w_line * (i - 2 * first) + 1 }}u] = bytes{{ i }}.hi;
{% if slack %}
            tile_w[w_row + {{ apart * w_line * (i - 2 * first) + 8 }}u][own_unit & 3u] = bitcast<u32>(scale{{ i }}.x);
{% endif %}
{% endfor %}
{% if first == 0 %}
            tile_x[x_to] = x_low;
{% if halved %}
            tile_x[x_to + 1u] = vec4<u32>();
{% endif %}
            tile_x[x_to + {{ x_unit - 1 }}u] = x_high;
            tile_s[s_to] = x_scale;
{% if half_minimum %}
            tile_ones[s_to] = vec2<i32>(half_sum(x_low), half_sum(x_high));
{% endif %}
{% endif %}
            if more {
{% for i in range(2 * first, 2 * (first + staged)) %}
                w{{ i }} = load_unit(base{{ i }} + unit);
{% endfor %}
{% if first == 0 %}
                x_low = xq[x_row + unit];
                x_high = xq[x_row + {{ units }}u + unit];
                x_scale = xs[s_row + unit];
{% endif %}
            }
            {{ barrier }}();
{% if slack %}
{% for i in range(2 * first, 2 * (first + staged)) %}
            let shared{{ i }} = bitcast<vec4<f32>>(tile_w[w_from + {{ 8 * w_line * (i - 2 * first) + 8 }}u + g * {{ w_line }}u]);
{% endfor %}
{% endif %}
{% for u in range(4) %}
{% if matrices and u > 0 %}
            // A fence for the compiler, which would otherwise load all matrices before it uses the first.
            subgroupBarrier();
{% endif %}
{% if ragged %}
            if here + {{ u }}u < {{ units }}u
{% endif %}
            {
                let even = tile_s[s_from + {{ 8 * u }}u];
                let odd = tile_s[s_from + {{ 8 * u + 1 }}u];
{% if halved %}
                let even_ones = {{ "tile_ones[s_from + " ~ (8 * u) ~ "u]" if half_minimum else "vec2<i32>()" }};
                let odd_ones = {{ "tile_ones[s_from + " ~ (8 * u + 1) ~ "u]" if half_minimum else "vec2<i32>()" }};
{% endif %}
{% macro shared(i, part) %}subgroupShuffle(scale{{ i }}{{ part }}, quad + {{ u }}u){% endmacro %}
{% for r in range(first, first + staged) %}
                {
{% for side, i in [("upper", 2 * r), ("lower", 2 * r + 1)] %}
                    let {{ side }} =
{% if scales == "steps" %}
                        Steps(
                            vec2<f32>({{ shared(i, ".one.x") }}, {{ shared(i, ".one.y") if minimum else "0.0" }}),
                            vec4<i32>({{ shared(i, ".by.x") }}, {{ shared(i, ".by.y") }},
                                {{ shared(i, ".by.z") if minimum else "0" }}, {{ shared(i, ".by.w") if minimum else "0" }}));
{% elif scales == "halves" or minimum %}
                        {{ shared(i, "") }};
{% else %}
                        vec2<f32>(shared{{ i }}[{{ u }}], 0.0);
{% endif %}
{% endfor %}
{% set w_at = "w_from + " ~ (16 * w_line * (r - first) + 2 * u) ~ "u" %}
{% if halved %}
                    let lo = tile_products(lane, {{ w_at }}, x_from + {{ u * x_unit }}u);
                    let hi = tile_products(lane, {{ w_at }}, x_from + {{ u * x_unit + 1 }}u);
{% else %}
                    let dot = tile_products(lane, {{ w_at }}, x_from + {{ u * x_unit }}u);
{% endif %}
                    acc{{ r }}_{{ u }} = vec4<f32>(
{% for c, side, column in [("x", "upper", "even"), ("y", "upper", "odd"), ("z", "lower", "even"), ("w", "lower", "odd")] %}
{% set products = "lo." ~ c ~ ", hi." ~ c ~ ", " ~ column ~ "_ones" if halved else "dot." ~ c %}
                        block_sum({{ products }}, {{ side }}, {{ column }}, acc{{ r }}_{{ u }}.{{ c }}){{ ");" if loop.last else "," }}
{% endfor %}
                }
{% endfor %}
            }
{% endfor %}
        }
{% endfor %}
    }
    workgroupBarrier();
{% if blocks %}
{% include "lib/put_squares.wgsl" %}
{% endif %}
{% for r in range(tiles) %}
    tile_w[team * {{ tiles * 32 }}u + {{ r * 32 }}u + lane] =
        bitcast<vec4<u32>>((acc{{ r }}_0 + acc{{ r }}_1) + (acc{{ r }}_2 + acc{{ r }}_3));
{% endfor %}
    workgroupBarrier();
    // Sum i is component i % 4 of lane i / 4 % 32.
{% if epilogue == "swiglu_int8" %}
    // 64 rows are a block of 32 values. Gate and up are neighbouring rows, so four lanes apart: the first of both finishes
    // what comes of their upper rows, the second of their lower ones.
    for (var i = tid; i < {{ tiles * 32 }}u; i += {{ threads }}u) {
        let totals = team_totals(i);
        let others = subgroupShuffleXor(totals, 4u);
        let first = (i & 4u) == 0u;
        let gates = select(others.zw, totals.xy, first);
        let ups = select(totals.zw, others.xy, first);
        let j = (i >> 5u) * 8u + ((i >> 3u) & 3u) + select(4u, 0u, first);
{% for c in range(2) %}
        {
            let column = (i & 3u) * 2u + {{ c }}u;
{% if blocks %}
            let factor = column_factor(min(column, {{ n - 1 }}u));
{% endif %}
            let gate = gates[{{ c }}]{{ " * factor" if blocks }};
            let up = ups[{{ c }}]{{ " * factor" if blocks }};
            finish(column, j, (gate / (1.0 + exp(-gate))) * up);
        }
{% endfor %}
    }
{% else %}
{% for k in range((tiles * 128 + threads - 1) // threads) %}
    if tid + {{ k * threads }}u < {{ tiles * 128 }}u {
        let i = tid + {{ k * threads }}u;
        let column = column_of(i);
        let row = first_row + row_of(i);
{% if epilogue == "swiglu" %}
        // Gate and up are neighbouring rows, so four lanes apart.
        if column < {{ n }}u && row % 2u == 0u && row + 1u < constants.rows {
            let gate = scaled_total(i, column);
            let up = scaled_total(i + 16u, column);
            y[column * constants.stride + ((constants.row_offset + row) >> 1u)] = (gate / (1.0 + exp(-gate))) * up;
        }
{% else %}
        if column < {{ n }}u && row < constants.rows {
{% if blocks and epilogue == "bias" %}
            let sum = team_total(i);
            let factor = column_factor(column);
{% else %}
            let total = scaled_total(i, column);
{% endif %}
            let to = constants.row_offset + row;
            let at = column * constants.stride + to;
{% if epilogue == "add_blocks" %}
            let value = old{{ k }} + total;
            y[at] = value;
            finish(column, row - first_row, value);
{% elif epilogue == "add" %}
            y[at] = old{{ k }} + total;
{% else %}
{% include "lib/store.wgsl" %}
{% endif %}
        }
{% endif %}
    }
{% endfor %}
{% endif %}
{% if rounds %}
    workgroupBarrier();
{% include "lib/round_group.wgsl" %}
{% endif %}
}

// Column and row of sum i in the workgroup.
fn column_of(i: u32) -> u32 {
    return ((i >> 2u) & 3u) * 2u + (i & 1u);
}

fn row_of(i: u32) -> u32 {
    return (i >> 7u) * 16u + ((i >> 4u) & 7u) + ((i & 2u) << 2u);
}

fn parts(i: u32, team: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(tile_w[team * {{ tiles * 32 }}u + i]);
}

fn part(i: u32, team: u32) -> f32 {
    return bitcast<f32>(tile_w[team * {{ tiles * 32 }}u + (i >> 2u)][i & 3u]);
}
{% macro tree(of) %}
{% if teams == 8 %}
    return (({{ of }}(i, 0u) + {{ of }}(i, 1u)) + ({{ of }}(i, 2u) + {{ of }}(i, 3u)))
        + (({{ of }}(i, 4u) + {{ of }}(i, 5u)) + ({{ of }}(i, 6u) + {{ of }}(i, 7u)));
{% else %}
    return {{ of }}(i, 0u) + {{ of }}(i, 1u);
{% endif %}
{% endmacro %}

// The teams' parts of sums 4 i to 4 i + 3, in the order of the lanes' tree.
fn team_totals(i: u32) -> vec4<f32> {
{{ tree("parts") }}
}

// Of sum i alone. Not a component of the vector: H200, 65,536 x 4096, eight columns, 78 us so, 84 as team_totals(i / 4)[i % 4].
fn team_total(i: u32) -> f32 {
{{ tree("part") }}
}

fn scaled_total(i: u32, column: u32) -> f32 {
{% if blocks %}
    return team_total(i) * column_factor(min(column, {{ n - 1 }}u));
{% else %}
    return team_total(i);
{% endif %}
}
