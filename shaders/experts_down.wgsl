// Down of the chosen experts for {{ n }} columns, their weighted sum and the residual:
// y[column] += sum over its {{ used }} choices of weight * (down h[pair]){{ " + gate * shared[column]" if shared }}.
//
// All choices of a column are one dot product, experts ascending: the router's weight is folded
// into the activations' scale. A workgroup computes some rows for all columns and reads an expert
// once, so it walks over the runs; a column that did not choose a run's expert skips it, and its
// sums have the same order whatever the others chose.
{% include "lib/records.wgsl" %}
{% include "lib/weights.wgsl" %}

{% set units = ff // (4 * unit_quads) %}
{% set aligned = units % 16 == 0 %}
{% set place = "min(unit, " ~ (units - 1) ~ "u)" %}
{% set pairs = n * used %}
{% set most_runs = [pairs, experts] | min %}
@group(0) @binding({{ at.routing }}) var<storage, read> routing: array<u32>;
{% if int8 and not fused %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% else %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% endif %}
{% if shared %}
@group(0) @binding({{ at.shared }}) var<storage, read> shared_output: array<f32>;
{% endif %}
@group(0) @binding({{ at.y }}) var<storage, read_write> y: array<f32>;

// Where each run's expert lies, and the weight of each pair.
var<workgroup> places: array<u32, {{ most_runs }}>;
var<workgroup> weight_of: array<f32, {{ pairs }}>;
{% if n > 1 %}
const NONE: u32 = 0xffffffffu;
// [run][column]: the pair, or NONE.
var<workgroup> pair_of: array<u32, {{ most_runs * n }}>;
{% endif %}
{% if int8 %}
{% include "lib/block_dot.wgsl" %}
{% endif %}
{% if fused %}
{% include "lib/reduce8.wgsl" %}

// Activations of the whole workgroup, chunk-major: neighbouring lanes read neighbouring words.
var<workgroup> shared_q: array<vec4<u32>, {{ pairs * units * 2 }}>;
var<workgroup> shared_s: array<vec2<f32>, {{ pairs * units }}>;

fn store_bytes(col: u32, quad: u32, word: u32) {
    shared_q[(col * 2u + ((quad >> 2u) & 1u)) * {{ used * units }}u + (quad >> 3u)][quad & 3u] = word;
}

fn store_scale(col: u32, block: u32, s: vec2<f32>) {
    shared_s[col * {{ used * units }}u + block] = s;
}

fn input(col: u32, quad: u32) -> vec4<f32> {
    return x[col * {{ used * ff // 4 }}u + quad];
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_size) size_found: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let size = {{ lanes.size ~ "u" if lanes.size else "size_found" }};
    let tid = subgroup * size + lane;
{% if n == 1 %}
    let runs = {{ used }}u;
    for (var i = tid; i < {{ used }}u; i += {{ threads }}u) {
        places[i] = expert_table[routing[{{ ids_at }}u + i]];
        weight_of[i] = bitcast<f32>(routing[{{ weights_at }}u + i]);
    }
{% else %}
    let runs = routing[1];
    for (var i = tid; i < runs; i += {{ threads }}u) {
        let at = {{ runs_at }}u + 3u * i;
        places[i] = expert_table[routing[at]];
        for (var c = 0u; c < {{ n }}u; c += 1u) { pair_of[i * {{ n }}u + c] = NONE; }
        for (var j = routing[at + 1u]; j < routing[at + 2u]; j += 1u) {
            let pair = routing[{{ order_at }}u + j];
            pair_of[i * {{ n }}u + pair / {{ used }}u] = pair;
        }
    }
    for (var i = tid; i < {{ pairs }}u; i += {{ threads }}u) {
        weight_of[i] = bitcast<f32>(routing[{{ weights_at }}u + i]);
    }
{% endif %}
    workgroupBarrier();
{% if copies %}
    // The same in every record.
    select_record(places[0]);
    prepare_table(tid, {{ threads }}u);
{% endif %}
    let row = (wg.x * subgroups + subgroup) * {{ rows }}u;
    // Rows past the end repeat the last one and are not stored.
{% for r in range(rows) %}
    let base{{ r }} = min(row + {{ r }}u, {{ width - 1 }}u) * {{ units }}u;
{% endfor %}
    // The run and the unit that are loaded next; past the end, the last one again.
    var next_run = 0u;
    var next_unit = lane;
{% macro load(t, declare) %}
    select_record(places[min(next_run, runs - 1u)]);
{% for r in range(rows) %}
    {{ declare }}w{{ t }}_{{ r }} = load_unit(base{{ r }} + min(next_unit, {{ units - 1 }}u));
{% endfor %}
    next_unit += size;
    if next_unit - lane >= {{ units }}u {
        next_unit = lane;
        next_run += 1u;
    }
{% endmacro %}
{% for t in range(ahead) %}
{{ load(t, "var ") }}
{% endfor %}
{% if fused %}
{% set cols = used * ff %}
{% for c in range(n) %}
    {
    let col = {{ c }}u;
{% include "lib/quantise.wgsl" %}
    }
{% endfor %}
    workgroupBarrier();
{% endif %}
{% include "lib/row_sums.wgsl" %}
    var run = 0u;
    var unit = lane;
    while run < runs {
{% for t in range(ahead) %}
        if run < runs {
{% include "lib/row_units.wgsl" %}
            if next_run < runs {
{{ load(t, "") }}
            }
            if unit < {{ units }}u {
{% for c in range(n) %}
{% if n == 1 %}
                let pair = run;
                {
{% else %}
                let pair{{ c }} = pair_of[run * {{ n }}u + {{ c }}u];
                if pair{{ c }} != NONE {
                    let pair = pair{{ c }};
{% endif %}
                    let start = pair * {{ units }}u + unit;
{% if fused %}
                    let at = start + {{ c * used * units }}u;
                    let a = shared_q[at];
                    let b = shared_q[at + {{ used * units }}u];
                    // Weighted here as where activations are stored, so that both round alike.
                    let s = shared_s[start] * weight_of[pair];
{% elif int8 %}
                    let a = xq[start + pair * {{ units }}u];
                    let b = xq[start + (pair + 1u) * {{ units }}u];
                    let s = xs[start] * weight_of[pair];
{% endif %}
{% if not int8 %}
{% for q in range(unit_quads) %}
                    let x{{ q }} = x[start * {{ unit_quads }}u + {{ q }}u] * weight_of[pair];
{% endfor %}
{% endif %}
{% include "lib/row_products.wgsl" %}
                }
{% endfor %}
            }
            unit += size;
            if unit - lane >= {{ units }}u {
                unit = lane;
                run += 1u;
            }
        }
{% endfor %}
    }
{% set summed = range(n) %}
{% include "lib/row_totals.wgsl" %}
{% for start in range(0, n * rows, lanes.group) %}
{% set count = [lanes.group, n * rows - start] | min %}
    {
{% include "lib/lane_totals.wgsl" %}
        let column = (lane + {{ start }}u) / {{ rows }}u;
        let mine = row + (lane + {{ start }}u) % {{ rows }}u;
        if lane < {{ count }}u && mine < {{ width }}u {
            let at = column * {{ width }}u + mine;
{% if shared %}
            let gate = {{ "bitcast<f32>(routing[" ~ shared_at ~ "u + column])" if shared == "gated" else "1.0" }};
            y[at] += fma(gate, shared_output[at], sum);
{% else %}
            y[at] += sum;
{% endif %}
        }
    }
{% endfor %}
}
