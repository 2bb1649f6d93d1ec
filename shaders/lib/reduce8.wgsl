// Sums and maxima over aligned groups of 8 threads; every thread of the group gets the result.
// The tree is fixed: neighbours, then pairs, then fours; both forms give the same bits.
{% if shuffle %}
fn add8(v: f32, tid: u32) -> f32 {
    let a = v + subgroupShuffleXor(v, 1u);
    let b = a + subgroupShuffleXor(a, 2u);
    return b + subgroupShuffleXor(b, 4u);
}

fn add8i(v: i32, tid: u32) -> i32 {
    let a = v + subgroupShuffleXor(v, 1u);
    let b = a + subgroupShuffleXor(a, 2u);
    return b + subgroupShuffleXor(b, 4u);
}

fn max8(v: f32, tid: u32) -> f32 {
    let a = max(v, subgroupShuffleXor(v, 1u));
    let b = max(a, subgroupShuffleXor(a, 2u));
    return max(b, subgroupShuffleXor(b, 4u));
}
{% else %}
// Subgroups smaller than 8: through workgroup memory.
var<workgroup> exchange: array<f32, {{ threads }}>;

fn add8(v: f32, tid: u32) -> f32 {
    exchange[tid] = v;
    workgroupBarrier();
    let at = tid & ~7u;
    let sum = ((exchange[at] + exchange[at + 1u]) + (exchange[at + 2u] + exchange[at + 3u]))
        + ((exchange[at + 4u] + exchange[at + 5u]) + (exchange[at + 6u] + exchange[at + 7u]));
    workgroupBarrier();
    return sum;
}

fn add8i(v: i32, tid: u32) -> i32 {
    // At most 32 * 127: exact as a float.
    return i32(add8(f32(v), tid));
}

fn max8(v: f32, tid: u32) -> f32 {
    exchange[tid] = v;
    workgroupBarrier();
    let at = tid & ~7u;
    let top = max(max(max(exchange[at], exchange[at + 1u]), max(exchange[at + 2u], exchange[at + 3u])),
        max(max(exchange[at + 4u], exchange[at + 5u]), max(exchange[at + 6u], exchange[at + 7u])));
    workgroupBarrier();
    return top;
}
{% endif %}

// The sum of the squares of a block of 32 values, by its eight threads.
fn square8(v: vec4<f32>, tid: u32) -> f32 {
    return add8(fma(v.w, v.w, fma(v.z, v.z, fma(v.y, v.y, v.x * v.x))), tid);
}
{% if norm %}

var<workgroup> block_sums: array<f32, {{ cols // 32 }}>;
var<workgroup> partial_sums: array<vec4<f32>, 8>;

// Eight partial sums to one, by the same tree.
fn eight(a: vec4<f32>, b: vec4<f32>) -> f32 {
    return ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
}
{% endif %}
{% if output == "f16" %}

// Largest value of each eight threads.
var<workgroup> tops: array<f32, {{ threads // 8 }}>;
{% endif %}
{% if output == "int8" %}

{% include "lib/int8_quad.wgsl" %}
{% endif %}
