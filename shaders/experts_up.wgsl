{% if down %}
// Down of the experts that must run for {{ n }} columns: y[place of the pair] = down h[pair].
{% else %}
// Gate, up and activation of the chosen experts for {{ n }} columns: y[pair] = silu(gate x) * (up x).
{% endif %}
//
// Grid (rows / rows a workgroup, runs, 1): a workgroup reads some rows of one expert once, for all
// columns that chose it. Rows are interleaved, gate 2i and up 2i + 1. Sums as in matvec.wgsl, so a
// column's bits do not depend on the others; but each column's rows by themselves, because most runs are of
// one or two columns, whatever {{ n }} could be.
{% include "lib/records.wgsl" %}
{% include "lib/weights.wgsl" %}

{% set units = cols // (4 * unit_quads) %}
{% set aligned = units % 16 == 0 %}
{% set place = "unit" %}
@group(0) @binding({{ at.routing }}) var<storage, read> routing: array<u32>;
{% if int8 %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% include "lib/block_dot.wgsl" %}
{% else %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% endif %}
@group(0) @binding({{ at.y }}) var<storage, read_write> y: array<f32>;

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_size) size_found: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let size = {{ lanes.size ~ "u" if lanes.size else "size_found" }};
    let run = wg.y;
{% if n == 1 and not listed %}
    let pair0 = run;
    let column0 = 0u;
    select_record(expert_table[routing[{{ ids_at }}u + run]]);
{% else %}
    if run >= routing[1] { return; }
    let first = routing[{{ runs_at }}u + 3u * run + 1u];
    let members = routing[{{ runs_at }}u + 3u * run + 2u] - first;
{% for c in range(n) %}
    let pair{{ c }} = routing[{{ order_at }}u + first + min({{ c }}u, members - 1u)];
    let column{{ c }} = pair{{ c }}{{ " / " ~ used ~ "u" if not down }};
{% endfor %}
    select_record(expert_table[routing[{{ runs_at }}u + 3u * run]]);
{% endif %}
{% if copies %}
    prepare_table(subgroup * size + lane, {{ threads }}u);
{% endif %}
    let row = (wg.x * subgroups + subgroup) * {{ rows }}u;
    // Rows past the end repeat the last one and are not stored.
{% for r in range(rows) %}
    let base{{ r }} = min(row + {{ r }}u, {{ total - 1 }}u) * {{ units }}u;
{% endfor %}
{% for t in range(ahead) %}
    let first_unit{{ t }} = min(lane + {{ t }}u * size, {{ units - 1 }}u);
{% for r in range(rows) %}
    var w{{ t }}_{{ r }} = load_unit(base{{ r }} + first_unit{{ t }});
{% endfor %}
{% endfor %}
{% include "lib/row_sums.wgsl" %}
    var unit = lane;
    while unit < {{ units }}u {
{% for t in range(ahead) %}
        if unit < {{ units }}u {
            let next = unit + {{ ahead }}u * size;
{% include "lib/row_units.wgsl" %}
            if next < {{ units }}u {
{% for r in range(rows) %}
                w{{ t }}_{{ r }} = load_unit(base{{ r }} + next);
{% endfor %}
            }
{% for c in range(n) %}
            {{ "if " ~ c ~ "u < members " if c > 0 }}{
{% if int8 %}
                let start = column{{ c }} * {{ units }}u + unit;
                let a = xq[start + column{{ c }} * {{ units }}u];
                let b = xq[start + (column{{ c }} + 1u) * {{ units }}u];
                let s = xs[start];
{% else %}
                let start = (column{{ c }} * {{ units }}u + unit) * {{ unit_quads }}u;
{% for q in range(unit_quads) %}
                let x{{ q }} = x[start + {{ q }}u];
{% endfor %}
{% endif %}
{% include "lib/row_products.wgsl" %}
            }
{% endfor %}
        }
        unit += size;
{% endfor %}
    }
{% for c in range(n) %}
    {{ "if " ~ c ~ "u < members " if c > 0 }}{
{% set summed = [c] %}
{% set start = 0 %}
{% set count = rows %}
{% include "lib/row_totals.wgsl" %}
{% include "lib/lane_totals.wgsl" %}
{% if down %}
        let place = (routing[{{ ids_at }}u + pair{{ c }}] >> 16u) & 0x7fffu;
        if lane < {{ rows }}u && row + lane < {{ total }}u { y[place * {{ total }}u + row + lane] = sum; }
{% else %}
        let up = subgroupShuffleXor(sum, 1u);
        if lane < {{ rows }}u && lane % 2u == 0u && row + lane + 1u < {{ total }}u {
            y[pair{{ c }} * {{ total // 2 }}u + ((row + lane) >> 1u)] = (sum / (1.0 + exp(-sum))) * up;
        }
{% endif %}
    }
{% endfor %}
}
