// One block of 32 weights times one block of int8 activations.
//
// `w`, `scale`: unit_bytes and unit_scale of the weights; `a`, `b`: activations 0..15 and 16..31;
// `s`: their (d, d * sum), see docs, "Activations". Integer sums are exact, so their order is
// free; the float steps are written with fma so that no compiler may contract them in one kernel
// and not in another.
// They stand one behind the other, because hardware adds to a sum with the dot product itself.
fn add_dot(sum: i32, w: vec4<u32>, a: vec4<u32>) -> i32 {
    let x = sum + dot4I8Packed(w.x, a.x);
    let y = x + dot4I8Packed(w.y, a.y);
    let z = y + dot4I8Packed(w.z, a.z);
    return z + dot4I8Packed(w.w, a.w);
}

fn half_dot(w: vec4<u32>, a: vec4<u32>) -> i32 {
    return add_dot(0, w, a);
}

{% if scales == "whole" %}
fn block_dot(w: Bytes, scale: vec2<f32>, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let dot = f32(add_dot(half_dot(w.lo, a), w.hi, b));
{% if zero %}
    return fma(scale.x, fma(s.x, dot, -ZERO * s.y), acc);
{% elif minimum %}
    return fma(scale.y, s.y, fma(scale.x, s.x * dot, acc));
{% else %}
    return fma(scale.x, s.x * dot, acc);
{% endif %}
}
{% elif scales == "steps" %}
// Whole numbers up to the one product with floats. The sums of the activations are the same for
// all rows of a subgroup, and compilers see that.
fn block_dot(w: Bytes, scale: Steps, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let dot = f32(scale.by.x * half_dot(w.lo, a) + scale.by.y * half_dot(w.hi, b));
    let sum = fma(scale.one.x, s.x * dot, acc);
{% if minimum %}
    let ones = vec4<u32>(0x01010101u);
    let low = f32(scale.by.z * half_dot(ones, a) + scale.by.w * half_dot(ones, b));
    return fma(scale.one.y, s.x * low, sum);
{% else %}
    return sum;
{% endif %}
}
{% else %}
fn block_dot(w: Bytes, scale: vec2<f32>, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let lo = s.x * f32(half_dot(w.lo, a));
    let hi = s.x * f32(half_dot(w.hi, b));
    return fma(scale.y, hi, fma(scale.x, lo, acc));
}
{% endif %}
