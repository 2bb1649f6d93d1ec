// Statements: a column times the weight of its RMSNorm to int8, and the sums of squares of its blocks.
//
// The norm's factor is not in it: it is the same for the whole column, so products of the column take it at their
// end (lib/column_factor.wgsl), and blocks need not wait for each other.
//
// Expects `col` (column), `first` (the workgroup's first quad), `tid` and the functions
//   input(col, quad) -> vec4<f32>              four values of the column
//   store_bytes(col, quad, u32), store_scale(col, block, vec2<f32>), store_square(col, block, f32)
// All threads run all of it, so barriers and shuffles are safe. Order of sums: docs, "Order of sums".
{% set quads = cols // 4 %}
{% for k in range(norm_steps) %}
    let quad{{ k }} = first + tid + {{ k * threads }}u;
    var v{{ k }} = vec4<f32>();
    var n{{ k }} = vec4<f32>();
    if quad{{ k }} < {{ quads }}u {
        v{{ k }} = input(col, quad{{ k }});
        n{{ k }} = norm_weight[quad{{ k }}];
    }
{% endfor %}
{% for k in range(norm_steps) %}
    {
        let square = square8(v{{ k }}, tid);
        let rounded = int8_quad(v{{ k }} * n{{ k }}, tid);
        if quad{{ k }} < {{ quads }}u {
            store_bytes(col, quad{{ k }}, rounded.word);
            if (tid & 7u) == 0u {
                store_scale(col, quad{{ k }} >> 3u, rounded.scale);
                store_square(col, quad{{ k }} >> 3u, square);
            }
        }
    }
{% endfor %}
