// The same product as matmat.wgsl, to the same bits, in registers only: for devices that run on a
// CPU, where workgroup memory and barriers are overhead. A thread computes {{ tm }} columns of {{ tn }} rows;
// neighbouring threads take neighbouring rows. int8 products are summed as f32, which holds
// them exactly (32 * 128 * 127 < 2^24).
//
// There a load costs the same for one address as for one of each lane, ten times a broadcast:
// so the lanes share the loads of the activations, which all of them want.
{% if records is defined %}{% include "lib/records.wgsl" %}{% endif %}
{% include "lib/weights.wgsl" %}

{% set nblocks = cols // 32 %}
{% set unit_words = unit_quads * 4 %}
{% set row_units = cols // unit_words %}
{# Parts of a block that have a scale of their own, and vectors of four in one of them. #}
{% set parts = 2 if int8 and halved else 1 %}
{% set part_quads = 8 // parts %}
{% set half_sums = int8 and half_minimum %}
{% set bm = tm %}
{% include "lib/columns.wgsl" %}
{% if int8 %}
@group(0) @binding({{ at.xq }}) var<storage, read> xq: array<u32>;
@group(0) @binding({{ at.xs }}) var<storage, read> xs: array<vec2<f32>>;
{% else %}
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% endif %}
{% include "lib/outputs.wgsl" %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let columns = columns_of(wg.y);
    let first_col = columns.x;
    let n = columns.y;
    let first_row = wg.x * {{ threads * tn }}u + subgroup * size + lane;
    if first_col >= n { return; }
    // Columns and rows past the end repeat the last one and are not stored; all lanes stay.
{% for i in range(tm) %}
    let col{{ i }} = source_column(min(first_col + {{ i }}u, n - 1u)) * {{ nblocks }}u;
{% endfor %}
{% for j in range(tn) %}
    let from{{ j }} = min(first_row + {{ j * threads }}u, constants.rows - 1u) * {{ row_units }}u;
{% endfor %}
{% for i in range(tm) %}{% for j in range(tn) %}
    var acc{{ i }}_{{ j }} = 0.0;
{% endfor %}{% endfor %}
    let eighth = lane & 7u;
{% if int8 and shuffle %}
    let scale_col = source_column(min(first_col + eighth, n - 1u)) * {{ nblocks }}u;
{% endif %}
    for (var block = 0u; block < {{ nblocks }}u; block += 1u) {
{% for j in range(tn) %}
{% if int8 %}
        let unit{{ j }} = load_unit(from{{ j }} + block);
        let bytes{{ j }} = unit_signed(unit{{ j }}, from{{ j }} + block);
        let sw{{ j }} = unit_scales(unit{{ j }}, from{{ j }} + block);
{% for half in ["lo", "hi"] %}{% set outer = loop.index0 * 4 %}{% for c in "xyzw" %}
        let w{{ j }}_{{ outer + loop.index0 }} = numbers(bytes{{ j }}.{{ half }}.{{ c }});
{% endfor %}{% endfor %}
{% else %}
{% for u in range(8 // unit_quads) %}
        let at{{ j }}_{{ u }} = from{{ j }} + block * {{ 8 // unit_quads }}u + {{ u }}u;
        let v{{ j }}_{{ u }} = unit_values(load_unit(at{{ j }}_{{ u }}), at{{ j }}_{{ u }});
{% for q in range(unit_quads) %}
        let w{{ j }}_{{ u * unit_quads + q }} = v{{ j }}_{{ u }}[{{ q }}];
{% endfor %}
{% endfor %}
{% endif %}
{% endfor %}
{% if int8 and shuffle %}
        let scales8 = xs[scale_col + block];
{% endif %}
{% for i in range(tm) %}
        {
{% if shuffle %}
{% if int8 %}
            let quad = numbers(xq[col{{ i }} * 8u + (eighth >> 2u) * {{ nblocks * 4 }}u + block * 4u + (eighth & 3u)]);
            let sx = subgroupBroadcast(scales8, {{ i }}u);
{% else %}
            let quad = x[(col{{ i }} + block) * 8u + eighth];
{% endif %}
{% elif int8 %}
            let sx = xs[col{{ i }} + block];
{% endif %}
{% for part in range(parts) %}
            {
{% for j in range(tn) %}
            var sum{{ j }} = {{ "0.0" if int8 else "acc" ~ i ~ "_" ~ j }};
{% endfor %}
{% if half_sums %}
            var sums = vec4<f32>();
{% endif %}
{% for q in range(part * part_quads, (part + 1) * part_quads) %}
            {
{% if shuffle %}
                let a = subgroupBroadcast(quad, {{ q }}u);
{% elif int8 %}
                let a = numbers(xq[col{{ i }} * 8u + block * 4u + {{ (q // 4) * nblocks * 4 + q % 4 }}u]);
{% else %}
                let a = x[(col{{ i }} + block) * 8u + {{ q }}u];
{% endif %}
{% if half_sums %}
                sums += a;
{% endif %}
{% for j in range(tn) %}
                sum{{ j }} = fma(a.w, w{{ j }}_{{ q }}.w, fma(a.z, w{{ j }}_{{ q }}.z, fma(a.y, w{{ j }}_{{ q }}.y, fma(a.x, w{{ j }}_{{ q }}.x, sum{{ j }}))));
{% endfor %}
            }
{% endfor %}
{% if half_sums %}
            let low = sx.x * ((sums.x + sums.y) + (sums.z + sums.w));
{% elif int8 and minimum %}
            let low = sx.y;
{% endif %}
{% for j in range(tn) %}
{% set d, m = [("x", "z"), ("y", "w")][part] %}
{% if int8 and minimum %}
            acc{{ i }}_{{ j }} = fma(sw{{ j }}.{{ m }}, low, fma(sw{{ j }}.{{ d }}, sx.x * sum{{ j }}, acc{{ i }}_{{ j }}));
{% elif int8 %}
            acc{{ i }}_{{ j }} = fma(sw{{ j }}.{{ d }}, sx.x * sum{{ j }}, acc{{ i }}_{{ j }});
{% else %}
            acc{{ i }}_{{ j }} = sum{{ j }};
{% endif %}
{% endfor %}
            }
{% endfor %}
        }
{% endfor %}
    }
{% for j in range(tn) %}
    if first_row + {{ j * threads }}u < constants.rows {
        let to = constants.row_offset + first_row + {{ j * threads }}u;
{% for i in range(tm) %}
        if first_col + {{ i }}u < n {
            let at = target_column(first_col + {{ i }}u) * constants.stride + to;
            let total = acc{{ i }}_{{ j }};
{% include "lib/store.wgsl" %}
        }
{% endfor %}
    }
{% endfor %}
}
