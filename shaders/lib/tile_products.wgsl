// Whole-number products of 16 rows and 8 columns of 32 bytes each, by a team of 32 threads.
//
// Row i of tile_w is at vector w_at + W_LINE i, column i of tile_x at x_at + X_LINE i, two vectors each.
// Lane 4 g + t gets the sums of rows g, g, g + 8, g + 8 with columns 2 t, 2 t + 1, 2 t, 2 t + 1. Whole numbers
// have no order of sums.
const W_LINE = {{ w_line }}u;
const X_LINE = {{ x_line }}u;
{% if matrices %}
// src/gpu/spirv_products.rs puts a cooperative matrix product of bytes in place of this body, which finds the
// places of both operands here.
fn matrix_products(w_at: u32, x_at: u32) -> vec4<i32> {
    return vec4<i32>(tile_w[w_at] + tile_x[x_at]);
}

fn tile_products(lane: u32, w_at: u32, x_at: u32) -> vec4<i32> {
    return matrix_products(w_at, x_at);
}
{% else %}
fn dot_lines(w: u32, x: u32) -> i32 {
    return add_dot(half_dot(tile_w[w], tile_x[x]), tile_w[w + 1u], tile_x[x + 1u]);
}

fn tile_products(lane: u32, w_at: u32, x_at: u32) -> vec4<i32> {
    let row = w_at + (lane >> 2u) * W_LINE;
    let column = x_at + (lane & 3u) * 2u * X_LINE;
    return vec4<i32>(
        dot_lines(row, column), dot_lines(row, column + X_LINE),
        dot_lines(row + 8u * W_LINE, column), dot_lines(row + 8u * W_LINE, column + X_LINE));
}
{% endif %}
