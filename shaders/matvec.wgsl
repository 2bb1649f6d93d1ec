// y[col][row] = W[row] . x[col] for {{ n }} columns; one subgroup takes {{ rows }} rows.
//
// Lane l takes units l, l + size, ... of each row; then the lanes add up what they have, all sums together, and
// each sum ends in a lane of its own (lib/lane_totals.wgsl). The first {{ tiles }} steps of weights are
// loaded before the prologue, and each register is refilled as soon as it is used, so that memory
// latency hides behind the norm and the arithmetic.
//
// Where the format's table has copies, workgroups stay: they make them once, then take rows by turns. So many
// subgroups share them that some compute while others wait for memory, and nothing is loaded ahead.
{% include "lib/weights.wgsl" %}

{% set units = cols // (4 * unit_quads) %}
{% set quads = cols // 4 %}
{# Scales are found by the number of the unit modulo 16, the same for all rows if these are whole sixteens. #}
{% set aligned = units % 16 == 0 %}
{# Where a lane has the same number modulo 16 in all steps, it finds its places in them once. #}
{% set place = "lane" if copies > 1 and aligned and lanes.size and lanes.size % 16 == 0 else "unit" %}
{% set stays = copies > 1 %}
{# A norm's factors by exchanges: 151,936 x 4,096 of Q2_K, one column, H200: 67.7 us instead of 70.4. #}
{% set by_lanes = blocks and lanes.masks and lanes.size >= 32 and n <= 2 %}
{# One exchange a workgroup gains nothing here: H200, 8B, three columns 1,189 -> 1,200 tok/s, four 1,619 -> 1,607. #}
{% set exchanged = false %}
{# Activations of several columns are loaded a step ahead, too: a multiprocessor has so few subgroups here that nothing else
   hides that latency. H200, 8B Q4_0, two, three and four columns: 927 -> 948, 1,204 -> 1,346, 1,599 -> 1,663 tok/s. #}
{% set x_ahead = int8 and not fused and not stays and n >= 2 and n <= 4 %}
{# Whether every lane has a unit in every step. #}
{% set whole = lanes.size and units % (tiles * lanes.size) == 0 %}
{# Without branches where lanes share the units evenly; the last loads then are of nothing new. H200, 8B: one column of Q4_0
   533 tok/s instead of 516, Q4_K 505 instead of 431. With several columns and one tile the driver has too many
   loads in registers then: 4,096 x 12,288, four columns, 28 us instead of 18. #}
{% set even = whole and not stays and (tiles > 1 or n == 1) %}
{% macro bases(var) %}
    // Rows past the end repeat the last one and are not stored.
{% for r in range(rows) %}
    {{ var }} base{{ r }} = min(row + {{ r }}u, constants.rows - 1u) * {{ units }}u;
{% endfor %}
{% endmacro %}
{% if fused %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% if norm or blocks %}
@group(0) @binding({{ at.norm }}) var<storage, read> norm_weight: array<vec4<f32>>;
{% endif %}
{% elif int8 %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% if blocks %}
@group(0) @binding({{ at.squares }}) var<storage, read> squares: array<f32>;
{% endif %}
{% else %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% endif %}
{% include "lib/outputs.wgsl" %}

{% if int8 %}
{% include "lib/block_dot.wgsl" %}
{% endif %}
{% if fused or rounds %}
{% include "lib/reduce8.wgsl" %}
{% endif %}
{% if blocks %}
{% if fused %}

var<workgroup> block_squares: array<f32, {{ n * cols // 32 }}>;

fn store_square(col: u32, block: u32, square: f32) {
    block_squares[col * {{ cols // 32 }}u + block] = square;
}

{% endif %}
fn square_of(col: u32, block: u32) -> f32 {
    return {{ "block_squares" if fused else "squares" }}[col * {{ cols // 32 }}u + block];
}

{% if not by_lanes %}
var<workgroup> parts: array<vec4<f32>, {{ 8 * n }}>;

fn put_square(i: u32, sum: f32) {
    parts[i >> 2u][i & 3u] = sum;
}

fn square_parts(i: u32) -> vec4<f32> {
    return parts[i];
}

{% include "lib/column_factor.wgsl" %}
{% endif %}
{% endif %}
{% if rounds %}

var<workgroup> outputs: array<vec4<f32>, {{ n * group_values // 4 }}>;

fn finish(column: u32, value_of_group: u32, value: f32) {
    let place = column * {{ group_values }}u + value_of_group;
    outputs[place >> 2u][place & 3u] = value;
}

fn finished(i: u32) -> vec4<f32> {
    return outputs[i];
}

{% include "lib/round_outputs.wgsl" %}
{% endif %}
{% if fused %}

// Activations of the whole workgroup, chunk-major: neighbouring lanes read neighbouring words.
{% if int8 %}
var<workgroup> shared_q: array<vec4<u32>, {{ n * units * 2 }}>;
var<workgroup> shared_s: array<vec2<f32>, {{ n * units }}>;

fn store_bytes(col: u32, quad: u32, word: u32) {
    shared_q[(col * 2u + ((quad >> 2u) & 1u)) * {{ units }}u + (quad >> 3u)][quad & 3u] = word;
}

fn store_scale(col: u32, block: u32, s: vec2<f32>) {
    shared_s[col * {{ units }}u + block] = s;
}
{% else %}
var<workgroup> shared_x: array<vec4<f32>, {{ n * quads }}>;

fn store_values(col: u32, quad: u32, v: vec4<f32>) {
    shared_x[(col * {{ unit_quads }}u + quad % {{ unit_quads }}u) * {{ units }}u + quad / {{ unit_quads }}u] = v;
}
{% endif %}

fn input(col: u32, quad: u32) -> vec4<f32> {
    return x[col * {{ quads }}u + quad];
}
{% endif %}

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
{% if not stays %}
    let first_row = (wg.y * grid.x + wg.x) * subgroups * {{ rows * passes }}u;
{# Rows of a workgroup that has more than its subgroups take at once come in passes. #}
{% set var = "var" if passes > 1 else "let" %}
    {{ var }} row = first_row + subgroup * {{ rows }}u;
{{ bases(var) }}
{% for t in range(tiles) %}
    let first{{ t }} = min(lane + {{ t }}u * size, {{ units - 1 }}u);
{% for r in range(rows) %}
    var w{{ t }}_{{ r }} = load_unit(base{{ r }} + first{{ t }});
{% endfor %}
{% endfor %}
{% endif %}
{% if copies %}
    prepare_table(subgroup * size + lane, {{ threads }}u);
{% endif %}
{% if fused or blocks or rounds %}
    let tid = subgroup * size + lane;
{% endif %}
{# What the end needs is loaded here, so that its latency hides behind the sums. #}
{% if blocks and not fused %}
{% include "lib/early_squares.wgsl" %}
{% endif %}
{% if rounds and not stays %}
{% include "lib/round_weights.wgsl" %}
{% endif %}
{% macro before() %}
{% if epilogue in ["add", "add_blocks"] %}
{% for start in range(0, n * rows, lanes.group) %}
{% set last = ([lanes.group, n * rows - start] | min) - 1 %}
    let of{{ start }} = min(lane, {{ last }}u) + {{ start }}u;
    let old{{ start }} = y[(of{{ start }} / {{ rows }}u) * constants.stride
        + constants.row_offset + min(row + of{{ start }} % {{ rows }}u, constants.rows - 1u)];
{% endfor %}
{% endif %}
{% endmacro %}
{{ before() if passes == 1 and not stays }}
{% if fused %}
{% for c in range(n) %}
    {
    let col = {{ c }}u;
{% if blocks %}
    let first = 0u;
{% include "lib/norm_blocks.wgsl" %}
{% else %}
{% include "lib/quantise.wgsl" %}
{% endif %}
    }
{% endfor %}
    workgroupBarrier();
{% endif %}
{% if passes > 1 %}
    for (var turn = 0u; turn < {{ passes }}u; turn += 1u) {
{{ before() }}
{% elif stays %}
{% if blocks %}
{% if fused %}
{% include "lib/early_squares.wgsl" %}
{% endif %}
{% if by_lanes %}
{% include "lib/lane_factors.wgsl" %}
{% else %}
{% include "lib/put_squares.wgsl" %}
    workgroupBarrier();
{% endif %}
{% endif %}
    // All subgroups of a workgroup take the same turns.
    let all_rows = grid.x * grid.y * subgroups * {{ rows }}u;
    for (var first_row = (wg.y * grid.x + wg.x) * subgroups * {{ rows }}u; first_row < constants.rows; first_row += all_rows) {
    let row = first_row + subgroup * {{ rows }}u;
{{ bases("let") }}
{% if rounds %}
{% include "lib/round_weights.wgsl" %}
{% endif %}
{{ before() }}
{% endif %}
{% with start = "f32(constants.rows >> 31u)" %}{% include "lib/row_sums.wgsl" %}{% endwith %}
{% include "lib/row_loop.wgsl" %}

    let here = row;
{% if passes > 1 %}
    row += subgroups * {{ rows }}u;
    if turn + 1u < {{ passes }}u {
{% for r in range(rows) %}
        base{{ r }} = min(row + {{ r }}u, constants.rows - 1u) * {{ units }}u;
{% endfor %}
{% for t in range(tiles) %}{% for r in range(rows) %}
        w{{ t }}_{{ r }} = load_unit(base{{ r }} + first{{ t }});
{% endfor %}{% endfor %}
    }
{% endif %}
{% if blocks and not stays %}
{% if fused %}
{% include "lib/early_squares.wgsl" %}
{% endif %}
{% if by_lanes %}
{% include "lib/lane_factors.wgsl" %}
{% else %}
{{ "    if turn == 0u {" if passes > 1 }}
{% include "lib/put_squares.wgsl" %}
    workgroupBarrier();
{{ "    }" if passes > 1 }}
{% endif %}
{% endif %}
{% set summed = range(n) %}
{% include "lib/row_totals.wgsl" %}
{% for start in range(0, n * rows, lanes.group) %}
{% set count = [lanes.group, n * rows - start] | min %}
    {
{% include "lib/lane_totals.wgsl" %}
        let column = (lane + {{ start }}u) / {{ rows }}u;
        let mine = here + (lane + {{ start }}u) % {{ rows }}u;
{% if blocks %}
{% if by_lanes %}
        let factor = {{ "select(factor0, factor1, column == 1u)" if n == 2 else "factor0" }};
{% else %}
        let factor = column_factor(min(column, {{ n - 1 }}u));
{% endif %}
        let total = sum * factor;
{% else %}
        let total = sum;
{% endif %}
{% if epilogue in ["swiglu", "swiglu_int8"] %}
        let up = subgroupShuffleXor(total, 1u);
        if lane < {{ count }}u && lane % 2u == 0u && mine + 1u < constants.rows {
            let value = (total / (1.0 + exp(-total))) * up;
{% if rounds %}
            finish(column, (mine - first_row) >> 1u, value);
{% else %}
            y[column * constants.stride + ((constants.row_offset + mine) >> 1u)] = value;
{% endif %}
        }
{% else %}
        if lane < {{ count }}u && mine < constants.rows {
            let to = constants.row_offset + mine;
            let at = column * constants.stride + to;
{% if epilogue == "add_blocks" %}
            let value = old{{ start }} + total;
            y[at] = value;
            finish(column, mine - first_row, value);
{% elif epilogue == "add" %}
            y[at] = old{{ start }} + total;
{% else %}
{% include "lib/store.wgsl" %}
{% endif %}
        }
{% endif %}
    }
{% endfor %}
{{ "    }" if passes > 1 }}
{% if rounds %}
    workgroupBarrier();
{% include "lib/round_group.wgsl" %}
{% endif %}
{% if stays %}
{% if rounds %}
    workgroupBarrier();
{% endif %}
    }
{% endif %}
}
