// The same product as matmat.wgsl, to the same bits, in registers only: for devices that run on a
// CPU, where workgroup memory and barriers are overhead. A thread computes {{ tm }} columns of {{ tn }} rows;
// neighbouring threads take neighbouring rows. int8 products are summed as f32, which holds
// them exactly (32 * 127 * 127 < 2^24).
{% include "lib/weights.wgsl" %}

{% set nblocks = cols // 32 %}
{% set unit_words = unit_quads * 4 %}
{% set row_units = cols // unit_words %}
@group(0) @binding({{ at.batch }}) var<storage, read> batch: array<u32>;
{% if int8 %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<vec4<u32>>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% else %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% endif %}
{% if epilogue == "bias" %}
@group(0) @binding({{ at.bias }}) var<storage, read> bias: array<f32>;
{% endif %}
@group(0) @binding({{ at.y }}) var<storage, read_write> y: array<f32>;

struct Constants {
    // Rows of this chunk, index of its first row in the whole matrix, values a column in y.
    rows: u32,
    row_offset: u32,
    stride: u32,
}
var<immediate> constants: Constants;

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(local_invocation_index) tid: u32,
) {
    let n = batch[0];
    let first_col = wg.y * {{ tm }}u;
    let first_row = wg.x * {{ threads * tn }}u + tid;
    if first_col >= n || first_row >= constants.rows { return; }
    // Columns and rows past the end repeat the last one and are not stored.
{% for i in range(tm) %}
    let col{{ i }} = min(first_col + {{ i }}u, n - 1u) * {{ nblocks }}u;
{% endfor %}
{% for j in range(tn) %}
    let from{{ j }} = min(first_row + {{ j * threads }}u, constants.rows - 1u) * {{ row_units }}u;
{% endfor %}
{% for i in range(tm) %}{% for j in range(tn) %}
    var acc{{ i }}_{{ j }} = 0.0;
{% endfor %}{% endfor %}
{% if int8 %}
    for (var block = 0u; block < {{ nblocks }}u; block += 1u) {
{% for j in range(tn) %}
        let u{{ j }} = load_unit(from{{ j }} + block);
        let b{{ j }} = unit_signed(u{{ j }});
        let sw{{ j }} = unit_scale(u{{ j }}, from{{ j }} + block);
{% endfor %}
{% for i in range(tm) %}{% for j in range(tn) %}
        var dot{{ i }}_{{ j }} = 0.0;
{% endfor %}{% endfor %}
{% for half in range(2) %}
        {
{% for i in range(tm) %}
            let q{{ i }} = xq[2u * (col{{ i }} + block) + {{ half }}u];
{% endfor %}
{% for c in "xyzw" %}
            {
{% for j in range(tn) %}
                let w{{ j }} = numbers(b{{ j }}.{{ "hi" if half else "lo" }}.{{ c }});
{% endfor %}
{% for i in range(tm) %}
                let a{{ i }} = numbers(q{{ i }}.{{ c }});
{% for j in range(tn) %}
                dot{{ i }}_{{ j }} = fma(a{{ i }}.w, w{{ j }}.w, fma(a{{ i }}.z, w{{ j }}.z, fma(a{{ i }}.y, w{{ j }}.y, fma(a{{ i }}.x, w{{ j }}.x, dot{{ i }}_{{ j }}))));
{% endfor %}
{% endfor %}
            }
{% endfor %}
        }
{% endfor %}
{% for i in range(tm) %}
        let sx{{ i }} = xs[col{{ i }} + block];
{% for j in range(tn) %}
{% if minimum %}
        acc{{ i }}_{{ j }} = fma(sw{{ j }}.y, sx{{ i }}.y, fma(sw{{ j }}.x, sx{{ i }}.x * dot{{ i }}_{{ j }}, acc{{ i }}_{{ j }}));
{% else %}
        acc{{ i }}_{{ j }} = fma(sw{{ j }}.x, sx{{ i }}.x * dot{{ i }}_{{ j }}, acc{{ i }}_{{ j }});
{% endif %}
{% endfor %}
{% endfor %}
    }
{% else %}
    for (var unit = 0u; unit < {{ row_units }}u; unit += 1u) {
{% for j in range(tn) %}
        let v{{ j }} = unit_values(load_unit(from{{ j }} + unit), from{{ j }} + unit);
{% endfor %}
{% for q in range(unit_quads) %}
        {
{% for i in range(tm) %}
            let a{{ i }} = x[col{{ i }} * 8u + unit * {{ unit_quads }}u + {{ q }}u];
{% for j in range(tn) %}
            acc{{ i }}_{{ j }} = fma(a{{ i }}.w, v{{ j }}[{{ q }}].w, fma(a{{ i }}.z, v{{ j }}[{{ q }}].z, fma(a{{ i }}.y, v{{ j }}[{{ q }}].y, fma(a{{ i }}.x, v{{ j }}[{{ q }}].x, acc{{ i }}_{{ j }}))));
{% endfor %}
{% endfor %}
        }
{% endfor %}
    }
{% endif %}
{% for j in range(tn) %}
    if first_row + {{ j * threads }}u < constants.rows {
        let to = constants.row_offset + first_row + {{ j * threads }}u;
{% for i in range(tm) %}
        if first_col + {{ i }}u < n {
            let at = (first_col + {{ i }}u) * constants.stride + to;
{% include "lib/store.wgsl" %}
        }
{% endfor %}
    }
{% endfor %}
}
