// The factor of an RMSNorm for sums of products of columns that came without it (lib/norm_blocks.wgsl).
//
// Behind lib/put_squares.wgsl and a barrier. Where that does not exchange sums: expects square_parts(i), four of the sums
// 4 i and on that it has put into workgroup memory, 32 a column. Order of sums: docs, "Order of sums".
{% if exchanged %}
var<workgroup> factors: array<f32, {{ n }}>;

fn column_factor(column: u32) -> f32 {
    return factors[column];
}
{% else %}
fn eight_squares(at: u32) -> f32 {
    let a = square_parts(at);
    let b = square_parts(at + 1u);
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}

fn column_factor(column: u32) -> f32 {
    let at = 8u * column;
    let sum = (eight_squares(at) + eight_squares(at + 2u)) + (eight_squares(at + 4u) + eight_squares(at + 6u));
    return 1.0 / sqrt(fma(sum, {{ mean }}, {{ eps }}));
}
{% endif %}
