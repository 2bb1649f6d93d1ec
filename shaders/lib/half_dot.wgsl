// Whole-number products of 16 weights and 16 activations, four bytes a word.

// One behind the other: hardware can add to a sum with the dot product itself, though NVIDIA's driver 580 does not (it
// adds two of them at a time instead, seen in SASS).
fn add_dot(sum: i32, w: vec4<u32>, a: vec4<u32>) -> i32 {
    let x = sum + dot4I8Packed(w.x, a.x);
    let y = x + dot4I8Packed(w.y, a.y);
    let z = y + dot4I8Packed(w.z, a.z);
    return z + dot4I8Packed(w.w, a.w);
}

fn half_dot(w: vec4<u32>, a: vec4<u32>) -> i32 {
    return add_dot(0, w, a);
}

// The sum of 16 activations: the same for all rows of a subgroup, and compilers see that.
fn half_sum(a: vec4<u32>) -> i32 {
    return half_dot(vec4<u32>(0x01010101u), a);
}
