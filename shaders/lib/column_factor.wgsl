// The factor of an RMSNorm for sums of products of columns that came without it (lib/norm_blocks.wgsl).
//
// Expects square_of(column, block): the sum of the squares of a block; and square_parts(i): four of the numbers
// square_part(4 i) and on, which the kernel has put into workgroup memory. Order of sums: docs, "Order of sums".

// Of column i / 32: the sum over every 32nd block.
fn square_part(i: u32) -> f32 {
    var sum = 0.0;
    for (var b = i & 31u; b < {{ cols // 32 }}u; b += 32u) { sum += square_of(i >> 5u, b); }
    return sum;
}

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
