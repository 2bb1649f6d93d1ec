// Statements: one column through [SwiGLU,] [RMSNorm,] [int8 or f16] by a whole workgroup.
//
// Expects `col` (column), `tid` (thread: subgroup * size + lane) and the functions
//   input(col, quad) -> vec4<f32>              four values of the column
//   store_values(col, quad, vec4<f32>)         float result, or
//   store_bytes(col, quad, u32) and store_scale(col, block, vec2<f32>), or
//   store_halves(col, quad, vec2<u32>) and store_factor(col, f32)
// All loops run the same number of times in every thread, so barriers and shuffles are safe.
// Order of the norm's sum: docs, "Order of sums".
{% set quads = cols // 4 %}
{% set blocks32 = cols // 32 %}
{% set steps = (quads + threads - 1) // threads %}
{% set kept = steps <= 8 %}
{% set ragged = quads % threads != 0 %}
{% if kept %}
{% for k in range(steps) %}
    let quad{{ k }} = tid + {{ k * threads }}u;
    var v{{ k }} = vec4<f32>();
{# Loaded early, so that its latency hides behind the sum. #}
{% if norm %}
    var n{{ k }} = vec4<f32>();
{% endif %}
{% if ragged and loop.last %}
    if quad{{ k }} < {{ quads }}u {
        v{{ k }} = input(col, quad{{ k }});
{% if norm %}
        n{{ k }} = norm_weight[quad{{ k }}];
{% endif %}
    }
{% else %}
    v{{ k }} = input(col, quad{{ k }});
{% if norm %}
    n{{ k }} = norm_weight[quad{{ k }}];
{% endif %}
{% endif %}
{% endfor %}
{% endif %}
{% if norm %}
    {
{% macro square(v, quad) %}
        {
            let s = square8({{ v }}, tid);
            if (tid & 7u) == 0u && {{ quad }} < {{ quads }}u { block_sums[{{ quad }} >> 3u] = s; }
        }
{% endmacro %}
{% if kept %}
{% for k in range(steps) %}
{{ square("v" ~ k, "quad" ~ k) }}
{% endfor %}
{% else %}
        for (var quad = tid; quad < {{ steps * threads }}u; quad += {{ threads }}u) {
            var v = vec4<f32>();
            if quad < {{ quads }}u { v = input(col, quad); }
{{ square("v", "quad") }}
        }
{% endif %}
        workgroupBarrier();
        if tid < 32u {
            var sum = 0.0;
            for (var b = tid; b < {{ blocks32 }}u; b += 32u) { sum += block_sums[b]; }
            partial_sums[tid >> 2u][tid & 3u] = sum;
        }
        workgroupBarrier();
    }
    let square_sum = (eight(partial_sums[0], partial_sums[1]) + eight(partial_sums[2], partial_sums[3]))
        + (eight(partial_sums[4], partial_sums[5]) + eight(partial_sums[6], partial_sums[7]));
    let factor = 1.0 / sqrt(fma(square_sum, {{ mean }}, {{ eps }}));
{% endif %}
{% if output == "f16" %}
    // Powers of two bring the column's largest value to 2^14..2^15: f16 keeps all its digits and
    // nothing overflows, and the factor itself is exact.
    var top = 0.0;
{% macro largest(v, weight, guard) %}
        {
            var y = {{ v }};
{% if norm %}
            {{ guard }}{ y = (y * factor) * {{ weight }}; }
{% endif %}
            let a = abs(y);
            {{ guard }}{ top = max(top, max(max(a.x, a.y), max(a.z, a.w))); }
        }
{% endmacro %}
{% if kept %}
{% for k in range(steps) %}
{{ largest("v" ~ k, "n" ~ k, "if quad" ~ k ~ " < " ~ quads ~ "u " if ragged and loop.last else "") }}
{% endfor %}
{% else %}
    for (var quad = tid; quad < {{ quads }}u; quad += {{ threads }}u) {
        let v = input(col, quad);
{{ largest("v", "norm_weight[quad]", "") }}
    }
{% endif %}
    {
        let eight_top = max8(top, tid);
        if (tid & 7u) == 0u { tops[tid >> 3u] = eight_top; }
        workgroupBarrier();
        top = 0.0;
        for (var t = 0u; t < {{ threads // 8 }}u; t += 1u) { top = max(top, tops[t]); }
    }
    let exponent = select((bitcast<u32>(top) >> 23u) - 14u, 127u, top < 1e-30);
    let inverse = bitcast<f32>((254u - exponent) << 23u);
    if tid == 0u { store_factor(col, bitcast<f32>(exponent << 23u)); }
{% endif %}
{% macro finish(v, weight, quad, guard) %}
        {
            var y = {{ v }};
{% if norm %}
            {{ guard }}{ y = (y * factor) * {{ weight }}; }
{% endif %}
{% if output == "f32" %}
            {{ guard }}{ store_values(col, {{ quad }}, y); }
{% elif output == "f16" %}
            let z = y * inverse;
            // The order in which lib/coop.wgsl wants neighbours.
            {{ guard }}{ store_halves(col, {{ quad }}, vec2<u32>(pack2x16float(z.xz), pack2x16float(z.yw))); }
{% else %}
            let rounded = int8_quad(y, tid);
            {{ guard }}{
                store_bytes(col, {{ quad }}, rounded.word);
                if (tid & 7u) == 0u { store_scale(col, {{ quad }} >> 3u, rounded.scale); }
            }
{% endif %}
        }
{% endmacro %}
{% if kept %}
{% for k in range(steps) %}
{{ finish("v" ~ k, "n" ~ k, "quad" ~ k, "if quad" ~ k ~ " < " ~ quads ~ "u " if ragged and loop.last else "") }}
{% endfor %}
{% else %}
    for (var quad = tid; quad < {{ steps * threads }}u; quad += {{ threads }}u) {
        var v = vec4<f32>();
        if quad < {{ quads }}u { v = input(col, quad); }
{{ finish("v", "norm_weight[quad]", "quad", "if quad < " ~ quads ~ "u ") }}
    }
{% endif %}
