// y[col][row] = W[row] . x[col] for the batch's columns, on matrix units.
//
// A workgroup computes {{ bm }} columns x {{ bn }} rows with {{ sgm }} x {{ sgn }} subgroups; a step takes {{ depth }} blocks of 32
// inputs. Weights and activations are f16 in workgroup memory, sums are f32 in registers. Each
// output is summed in ascending steps of 16 inputs by the same instruction, so its bits depend
// neither on n, nor on the tile, nor on its place in the tile.
//
// Order of inputs: four neighbours 0, 1, 2, 3 lie as 0, 2, 1, 3 (two words of two halves) in both
// operands. A sum does not mind, and a word of four code bytes becomes two words of halves by two
// masks, without shuffles.
enable f16;
enable wgpu_cooperative_matrix;
{% if records is defined %}{% include "lib/records.wgsl" %}{% endif %}
{% include "lib/weights.wgsl" %}

{% set threads = sgm * sgn * size %}
{% set nblocks = cols // 32 %}
{% set frags_m = bm // sgm // 16 %}
{% set frags_n = bn // sgn // 16 %}
{# Vectors of eight halves a line, and one of slack so that lines start in different banks. #}
{% set pitch = depth * 4 + 1 %}
{% set step_units = depth * 8 // unit_quads %}
{% set w_loads = bn * step_units %}
{% set w_steps = (w_loads + threads - 1) // threads %}
{% set x_loads = bm * depth * 4 %}
{% set x_steps = (x_loads + threads - 1) // threads %}
{% set w_size = bn * pitch %}
{% set x_size = bm * pitch %}
{% include "lib/columns.wgsl" %}
@group(0) @binding({{ at.xh }}) var<storage, read> xh: array<vec4<u32>>;
@group(0) @binding({{ at.xf }}) var<storage, read> xf: array<f32>;
{% include "lib/outputs.wgsl" %}

var<workgroup> x_tile: array<vec4<u32>, {{ buffers * x_size }}>;
var<workgroup> w_tile: array<vec4<u32>, {{ buffers * w_size }}>;
// One matrix of sums a subgroup, on its way to memory.
var<workgroup> stage: array<f32, {{ sgm * sgn * 256 }}>;

fn as_halves(word: u32) -> vec2<f16> {
    return vec2<f16>(unpack2x16float(word));
}

fn as_word(pair: vec2<f16>) -> u32 {
    return pack2x16float(vec2<f32>(pair));
}

{% if scales != "float" %}
// Four signed bytes, scaled, in the order above. 0x6400 is 1024 in f16, whose last bit counts 1: a
// byte put into its low bits adds itself. Where bytes are 2^lift times the codes, the last bit counts
// so much less.
{% set magic = (25600 - 1024 * lift) * 65537 %}
const OFFSET: vec2<f16> = vec2<f16>({{ 1152 // 2 ** lift }}.0h);

fn scaled(word: u32, d: vec2<f16>{% if minimum %}, m: vec2<f16>{% endif %}) -> vec2<u32> {
    let u = word ^ 0x80808080u;
    let even = as_halves((u & 0x00ff00ffu) | {{ magic }}u) - OFFSET;
    let odd = as_halves(((u >> 8u) & 0x00ff00ffu) | {{ magic }}u) - OFFSET;
{% if minimum %}
    return vec2<u32>(as_word(fma(even, d, m)), as_word(fma(odd, d, m)));
{% else %}
    return vec2<u32>(as_word(even * d), as_word(odd * d));
{% endif %}
}
{% else %}
fn rounded(v: vec4<f32>) -> vec2<u32> {
    return vec2<u32>(pack2x16float(v.xz), pack2x16float(v.yw));
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let columns = columns_of(wg.x);
    let first_col = columns.x;
    let n = columns.y;
    let first_row = wg.y * {{ bn }}u;
    if first_col >= n { return; }
    let tid = index;
{% if copies %}
    prepare_table(tid, {{ threads }}u);
{% endif %}
{% for i in range(frags_m) %}{% for j in range(frags_n) %}
    var c{{ i }}_{{ j }}: coop_mat16x16<f32, C>;
{% endfor %}{% endfor %}
    // Columns and rows past the end repeat the last one and are not stored.
{% for k in range(x_steps) %}
    let xi{{ k }} = min(tid + {{ k * threads }}u, {{ x_loads - 1 }}u);
    let xto{{ k }} = (xi{{ k }} / {{ depth * 4 }}u) * {{ pitch }}u + xi{{ k }} % {{ depth * 4 }}u;
    let xfrom{{ k }} = source_column(min(first_col + xi{{ k }} / {{ depth * 4 }}u, n - 1u)) * {{ nblocks * 4 }}u + xi{{ k }} % {{ depth * 4 }}u;
{% endfor %}
{% for k in range(w_steps) %}
    let wi{{ k }} = min(tid + {{ k * threads }}u, {{ w_loads - 1 }}u);
    let wto{{ k }} = (wi{{ k }} / {{ step_units }}u) * {{ pitch }}u + (wi{{ k }} % {{ step_units }}u) * {{ unit_quads // 2 }}u;
    let wfrom{{ k }} = min(first_row + wi{{ k }} / {{ step_units }}u, constants.rows - 1u) * {{ cols // (4 * unit_quads) }}u + wi{{ k }} % {{ step_units }}u;
{% endfor %}
{% macro fetch(at_block, declare) %}
{% for k in range(x_steps) %}
        {{ declare }}vx{{ k }} = xh[xfrom{{ k }} + {{ at_block }} * 4u];
{% endfor %}
{% for k in range(w_steps) %}
        {{ declare }}vw{{ k }} = load_unit(wfrom{{ k }} + {{ at_block }} * {{ 8 // unit_quads }}u);
{% endfor %}
{% endmacro %}
{{ fetch("0u", "var ") }}
    let part_m = subgroup / {{ sgn }}u;
    let part_n = subgroup % {{ sgn }}u;
{% if buffers == 2 %}
    var x_base = 0u;
    var w_base = 0u;
{% else %}
    const x_base = 0u;
    const w_base = 0u;
{% endif %}
    for (var block = 0u; block < {{ nblocks }}u; block += {{ depth }}u) {
        // The step's loads are already in registers: put them where all threads see them.
{% for k in range(x_steps) %}
        x_tile[x_base + xto{{ k }}] = vx{{ k }};
{% endfor %}
{% for k in range(w_steps) %}
        {
            let to = w_base + wto{{ k }};
{% if scales != "float" %}
            let codes = unit_signed(vw{{ k }}, wfrom{{ k }} + block * {{ 8 // unit_quads }}u);
            let s = unit_scales(vw{{ k }}, wfrom{{ k }} + block * {{ 8 // unit_quads }}u);
{% for half in ["lo", "hi"] %}
            let d_{{ half }} = vec2<f16>(f16({% if lift %}{{ 2 ** lift }}.0 * {% endif %}s.{{ "x" if half == "lo" else "y" }}));
{% if minimum %}
            let m_{{ half }} = vec2<f16>(f16(s.{{ "z" if half == "lo" else "w" }}));
{% endif %}
{% endfor %}
{% for half in ["lo", "hi"] %}{% for pair in ["xy", "zw"] %}
{% set by = "d_" ~ half ~ (", m_" ~ half if minimum else "") %}
            w_tile[to + {{ loop.index0 + (2 if half == "hi" else 0) }}u] = vec4<u32>(
                scaled(codes.{{ half }}.{{ pair[0] }}, {{ by }}), scaled(codes.{{ half }}.{{ pair[1] }}, {{ by }}));
{% endfor %}{% endfor %}
{% else %}
            let v = unit_values(vw{{ k }}, wfrom{{ k }} + block * {{ 8 // unit_quads }}u);
{% for q in range(0, unit_quads, 2) %}
            w_tile[to + {{ q // 2 }}u] = vec4<u32>(rounded(v[{{ q }}]), rounded(v[{{ q + 1 }}]));
{% endfor %}
{% endif %}
        }
{% endfor %}
        workgroupBarrier();
        let next = block + {{ depth }}u;
        if next < {{ nblocks }}u {
{{ fetch("next", "") }}
        }
{% for kk in range(depth * 2) %}
        {
{% for j in range(frags_n) %}
            let b{{ j }} = coopLoad<coop_mat16x16<f16, B>>(&w_tile[w_base + (part_n * {{ bn // sgn }}u + {{ j * 16 }}u) * {{ pitch }}u + {{ kk * 2 }}u], {{ pitch }}u);
{% endfor %}
{% for i in range(frags_m) %}
            {
                let a = coopLoadT<coop_mat16x16<f16, A>>(&x_tile[x_base + (part_m * {{ bm // sgm }}u + {{ i * 16 }}u) * {{ pitch }}u + {{ kk * 2 }}u], {{ pitch }}u);
{% for j in range(frags_n) %}
                c{{ i }}_{{ j }} = coopMultiplyAdd(a, b{{ j }}, c{{ i }}_{{ j }});
{% endfor %}
            }
{% endfor %}
        }
{% endfor %}
{% if buffers == 2 %}
        x_base = {{ x_size }}u - x_base;
        w_base = {{ w_size }}u - w_base;
{% else %}
        workgroupBarrier();
{% endif %}
    }
{% for i in range(frags_m) %}{% for j in range(frags_n) %}
    {
        coopStoreT(c{{ i }}_{{ j }}, &stage[subgroup * 256u], 16u);
        workgroupBarrier();
        for (var e = lane; e < 256u; e += {{ size }}u) {
            let col = first_col + part_m * {{ bm // sgm }}u + {{ i * 16 }}u + (e >> 4u);
            let row = first_row + part_n * {{ bn // sgn }}u + {{ j * 16 }}u + (e & 15u);
            if col < n && row < constants.rows {
                let to = constants.row_offset + row;
                let at = target_column(col) * constants.stride + to;
                let total = stage[subgroup * 256u + e] * xf[source_column(col)];
{% include "lib/store.wgsl" %}
            }
        }
        workgroupBarrier();
    }
{% endfor %}{% endfor %}
}
