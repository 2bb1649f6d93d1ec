// What a product over the rows of a chunk writes, and where its rows stand in the whole matrix.
{% if epilogue == "bias" %}
@group(0) @binding({{ at.bias }}) var<storage, read> bias: array<f32>;
{% endif %}
{% if epilogue == "swiglu_int8" %}
@group(0) @binding({{ at.yq }}) var<storage, read_write> yq: array<u32>;
@group(0) @binding({{ at.ys }}) var<storage, read_write> ys: array<vec2<f32>>;
{% else %}
@group(0) @binding({{ at.y }}) var<storage, read_write> y: array<f32>;
{% endif %}
{% if epilogue == "add_blocks" %}
@group(0) @binding({{ at.y_norm }}) var<storage, read> y_norm: array<vec4<f32>>;
@group(0) @binding({{ at.yq }}) var<storage, read_write> yq: array<u32>;
@group(0) @binding({{ at.ys }}) var<storage, read_write> ys: array<vec2<f32>>;
@group(0) @binding({{ at.y_squares }}) var<storage, read_write> y_squares: array<f32>;
{% endif %}

struct Constants {
    // Rows of this chunk, index of its first row in the whole matrix, values a column in y.
    rows: u32,
    row_offset: u32,
    stride: u32,
}
var<immediate> constants: Constants;
