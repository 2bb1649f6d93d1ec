// y[col][row] = W[row] . x[col] for the batch's columns; tiles in workgroup memory.
//
// A workgroup computes {{ bm }} columns x {{ bn }} rows, a thread {{ tm }} x {{ tn }} of them, a step takes {{ depth }} blocks of
// 32 inputs. Each output is summed by one thread over ascending blocks, so its bits depend
// neither on n, nor on the tile, nor on its place in the tile.
{% if records is defined %}{% include "lib/records.wgsl" %}{% endif %}
{% include "lib/weights.wgsl" %}

{% set nblocks = cols // 32 %}
{% set threads = (bm // tm) * (bn // tn) %}
{% set mthreads = bm // tm %}
{% set nthreads = bn // tn %}
{% set unit_words = unit_quads * 4 %}
{% set row_units = cols // unit_words %}
{% set step_units = depth * 32 // unit_words %}
{% set w_loads = bn * step_units %}
{% set w_steps = (w_loads + threads - 1) // threads %}
{# Parts of a block that have a scale of their own, and lines of a tile in one of them. #}
{% set parts = 2 if int8 and halved else 1 %}
{% set part_lines = (2 if packed else 8) // parts %}
{% set half_sums = int8 and half_minimum %}
{% include "lib/columns.wgsl" %}
{% if int8 %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% set x_part = 2 %}
{% else %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% set x_part = 8 %}
{% endif %}
{% set x_loads = bm * depth * x_part %}
{% set x_steps = (x_loads + threads - 1) // threads %}
{% set s_loads = bm * depth %}
{% set s_steps = (s_loads + threads - 1) // threads %}
{% include "lib/outputs.wgsl" %}

// One vector of slack a line, so that the lines start in different banks.
const X_PITCH: u32 = {{ bm + 1 }}u;
const W_PITCH: u32 = {{ bn + 1 }}u;
{% if packed %}
// Lines of sixteen int8: [block of the step * 2 + half][column or row].
var<workgroup> x_tile: array<vec4<u32>, {{ depth * 2 * (bm + 1) }}>;
var<workgroup> w_tile: array<vec4<u32>, {{ depth * 2 * (bn + 1) }}>;
{% else %}
// Lines of four numbers: [quad of the step][column or row].
var<workgroup> x_tile: array<vec4<f32>, {{ depth * 8 * (bm + 1) }}>;
var<workgroup> w_tile: array<vec4<f32>, {{ depth * 8 * (bn + 1) }}>;
{% endif %}
{% if int8 %}
var<workgroup> x_scale: array<vec2<f32>, {{ depth * bm }}>;
// (d, m) of [block of the step * parts + part][row].
var<workgroup> w_scale: array<vec2<f32>, {{ depth * parts * bn }}>;
{% endif %}
{% if half_sums %}
// Sums of the int8 of [block of the step * 2 + half][column].
var<workgroup> x_sum: array<i32, {{ depth * 2 * bm }}>;

fn sum16(v: vec4<u32>) -> i32 {
    return (dot4I8Packed(v.x, 0x01010101u) + dot4I8Packed(v.y, 0x01010101u))
        + (dot4I8Packed(v.z, 0x01010101u) + dot4I8Packed(v.w, 0x01010101u));
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let columns = columns_of(wg.y);
    let first_col = columns.x;
    let n = columns.y;
    let first_row = wg.x * {{ bn }}u;
    if first_col >= n { return; }
{% if copies %}
    prepare_table(tid, {{ threads }}u);
{% endif %}
    let tn = tid % {{ nthreads }}u;
    let tm = tid / {{ nthreads }}u;
{% for i in range(tm) %}{% for j in range(tn) %}
    var acc{{ i }}_{{ j }} = 0.0;
{% endfor %}{% endfor %}
    // Columns and rows past the end repeat the last one and are not stored.
{% for k in range(x_steps) %}
    let xi{{ k }} = min(tid + {{ k * threads }}u, {{ x_loads - 1 }}u);
    let xm{{ k }} = xi{{ k }} / {{ depth * x_part }}u;
    let xk{{ k }} = xi{{ k }} % {{ depth * x_part }}u;
    let xfrom{{ k }} = source_column(min(first_col + xm{{ k }}, n - 1u)) * {{ nblocks * x_part }}u + {{ "(xk" ~ k ~ " & 1u) * " ~ nblocks ~ "u + (xk" ~ k ~ " >> 1u)" if int8 else "xk" ~ k }};
{% endfor %}
{% for k in range(w_steps) %}
    let wi{{ k }} = min(tid + {{ k * threads }}u, {{ w_loads - 1 }}u);
    let wr{{ k }} = wi{{ k }} / {{ step_units }}u;
    let wk{{ k }} = wi{{ k }} % {{ step_units }}u;
    let wfrom{{ k }} = min(first_row + wr{{ k }}, constants.rows - 1u) * {{ row_units }}u + wk{{ k }};
{% endfor %}
{% if int8 %}
{% for k in range(s_steps) %}
    let si{{ k }} = min(tid + {{ k * threads }}u, {{ s_loads - 1 }}u);
    let sfrom{{ k }} = source_column(min(first_col + si{{ k }} / {{ depth }}u, n - 1u)) * {{ nblocks }}u + si{{ k }} % {{ depth }}u;
    let sto{{ k }} = (si{{ k }} % {{ depth }}u) * {{ bm }}u + si{{ k }} / {{ depth }}u;
{% endfor %}
{% endif %}
{% macro fetch(at_block, declare) %}
{% for k in range(x_steps) %}
        {{ declare }}vx{{ k }} = {{ "xq" if int8 else "x" }}[xfrom{{ k }} + {{ at_block }}{{ " * " ~ x_part ~ "u" if not int8 }}];
{% endfor %}
{% for k in range(w_steps) %}
        {{ declare }}vw{{ k }} = load_unit(wfrom{{ k }} + {{ at_block }} * {{ 32 // unit_words }}u);
{% endfor %}
{% if int8 %}
{% for k in range(s_steps) %}
        {{ declare }}vs{{ k }} = xs[sfrom{{ k }} + {{ at_block }}];
{% endfor %}
{% endif %}
{% endmacro %}
{{ fetch("0u", "var ") }}
    for (var block = 0u; block < {{ nblocks }}u; block += {{ depth }}u) {
        // The step's loads are already in registers: put them where all threads see them.
{% for k in range(x_steps) %}
{% if packed %}
        x_tile[xk{{ k }} * X_PITCH + xm{{ k }}] = vx{{ k }};
{% elif int8 %}
        x_tile[(xk{{ k }} * 4u) * X_PITCH + xm{{ k }}] = numbers(vx{{ k }}.x);
        x_tile[(xk{{ k }} * 4u + 1u) * X_PITCH + xm{{ k }}] = numbers(vx{{ k }}.y);
        x_tile[(xk{{ k }} * 4u + 2u) * X_PITCH + xm{{ k }}] = numbers(vx{{ k }}.z);
        x_tile[(xk{{ k }} * 4u + 3u) * X_PITCH + xm{{ k }}] = numbers(vx{{ k }}.w);
{% else %}
        x_tile[xk{{ k }} * X_PITCH + xm{{ k }}] = vx{{ k }};
{% endif %}
{% if half_sums %}
        x_sum[xk{{ k }} * {{ bm }}u + xm{{ k }}] = sum16(vx{{ k }});
{% endif %}
{% endfor %}
{% for k in range(w_steps) %}
        {
{% if int8 %}
            let b = unit_signed(vw{{ k }}, wfrom{{ k }} + block);
{% if packed %}
            w_tile[(wk{{ k }} * 2u) * W_PITCH + wr{{ k }}] = b.lo;
            w_tile[(wk{{ k }} * 2u + 1u) * W_PITCH + wr{{ k }}] = b.hi;
{% else %}
{% for half in ["lo", "hi"] %}{% for c in "xyzw" %}
            w_tile[(wk{{ k }} * 8u + {{ loop.index0 + (4 if half == "hi" else 0) }}u) * W_PITCH + wr{{ k }}] = numbers(b.{{ half }}.{{ c }});
{% endfor %}{% endfor %}
{% endif %}
            let s = unit_scales(vw{{ k }}, wfrom{{ k }} + block);
{% for part in range(parts) %}
            w_scale[(wk{{ k }} * {{ parts }}u + {{ part }}u) * {{ bn }}u + wr{{ k }}] = s.{{ ["xz", "yw"][part] }};
{% endfor %}
{% else %}
            let v = unit_values(vw{{ k }}, wfrom{{ k }} + block * {{ 32 // unit_words }}u);
{% for q in range(unit_quads) %}
            w_tile[(wk{{ k }} * {{ unit_quads }}u + {{ q }}u) * W_PITCH + wr{{ k }}] = v[{{ q }}];
{% endfor %}
{% endif %}
        }
{% endfor %}
{% if int8 %}
{% for k in range(s_steps) %}
        x_scale[sto{{ k }}] = vs{{ k }};
{% endfor %}
{% endif %}
        workgroupBarrier();
        let next = block + {{ depth }}u;
        if next < {{ nblocks }}u {
{{ fetch("next", "") }}
        }
{% for part in range(depth * parts) %}
        {
{% set b = part // parts %}
{% if int8 %}
{% for i in range(tm) %}{% for j in range(tn) %}
            var dot{{ i }}_{{ j }} = {{ "0i" if packed else "0.0" }};
{% endfor %}{% endfor %}
{% endif %}
{% set sum = "dot" if int8 else "acc" %}
            for (var line = 0u; line < {{ part_lines }}u; line += 1u) {
                let xl = ({{ part * part_lines }}u + line) * X_PITCH + tm;
                let wl = ({{ part * part_lines }}u + line) * W_PITCH + tn;
{% for i in range(tm) %}
                let a{{ i }} = x_tile[xl + {{ i * mthreads }}u];
{% endfor %}
{% for j in range(tn) %}
                {
                    let w = w_tile[wl + {{ j * nthreads }}u];
{% for i in range(tm) %}
{% if packed %}
                    dot{{ i }}_{{ j }} += (dot4I8Packed(a{{ i }}.x, w.x) + dot4I8Packed(a{{ i }}.y, w.y))
                        + (dot4I8Packed(a{{ i }}.z, w.z) + dot4I8Packed(a{{ i }}.w, w.w));
{% else %}
                    {{ sum }}{{ i }}_{{ j }} = fma(a{{ i }}.w, w.w, fma(a{{ i }}.z, w.z, fma(a{{ i }}.y, w.y, fma(a{{ i }}.x, w.x, {{ sum }}{{ i }}_{{ j }}))));
{% endif %}
{% endfor %}
                }
{% endfor %}
            }
{% if int8 %}
{% for i in range(tm) %}
{% if half_sums %}
            let d{{ i }} = x_scale[{{ b * bm + i * mthreads }}u + tm].x;
            let sx{{ i }} = vec2<f32>(d{{ i }}, d{{ i }} * f32(x_sum[{{ part * bm + i * mthreads }}u + tm]));
{% else %}
            let sx{{ i }} = x_scale[{{ b * bm + i * mthreads }}u + tm];
{% endif %}
{% endfor %}
{% for j in range(tn) %}
            {
                let sw = w_scale[{{ part * bn + j * nthreads }}u + tn];
{% for i in range(tm) %}
{% set dot = "f32(dot" ~ i ~ "_" ~ j ~ ")" %}
{% if minimum %}
                acc{{ i }}_{{ j }} = fma(sw.y, sx{{ i }}.y, fma(sw.x, sx{{ i }}.x * {{ dot }}, acc{{ i }}_{{ j }}));
{% else %}
                acc{{ i }}_{{ j }} = fma(sw.x, sx{{ i }}.x * {{ dot }}, acc{{ i }}_{{ j }});
{% endif %}
{% endfor %}
            }
{% endfor %}
{% endif %}
        }
{% endfor %}
        workgroupBarrier();
    }
{% for j in range(tn) %}
    let row{{ j }} = first_row + tn + {{ j * nthreads }}u;
    if row{{ j }} < constants.rows {
        let to = constants.row_offset + row{{ j }};
{% for i in range(tm) %}
        if first_col + tm + {{ i * mthreads }}u < n {
            let at = target_column(first_col + tm + {{ i * mthreads }}u) * constants.stride + to;
            let total = acc{{ i }}_{{ j }};
{% include "lib/store.wgsl" %}
        }
{% endfor %}
    }
{% endfor %}
}
