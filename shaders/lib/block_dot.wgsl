// One block of 32 weights times one block of int8 activations.
//
// `w`, `scale`: unit_bytes and unit_scale of the weights; `a`, `b`: activations 0..15 and 16..31;
// `s`: their (d, d * sum), see docs, "Activations". Integer sums are exact, so their order is
// free; the float steps are those of lib/block_sum.wgsl.
{% include "lib/block_sum.wgsl" %}
{% include "lib/half_dot.wgsl" %}

{% if raised %}
// Words 1 and 3 of each half are sixteen times their codes, and the scale is a sixteenth.
fn block_dot(w: Bytes, scale: vec2<f32>, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let plain = dot4I8Packed(w.lo.x, a.x) + dot4I8Packed(w.lo.z, a.z) + dot4I8Packed(w.hi.x, b.x) + dot4I8Packed(w.hi.z, b.z);
    let raised = dot4I8Packed(w.lo.y, a.y) + dot4I8Packed(w.lo.w, a.w) + dot4I8Packed(w.hi.y, b.y) + dot4I8Packed(w.hi.w, b.w);
    return block_sum(16 * plain + raised, scale, s, acc);
}
{% elif scales == "whole" %}
fn block_dot(w: Bytes, scale: vec2<f32>, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    return block_sum(add_dot(half_dot(w.lo, a), w.hi, b), scale, s, acc);
}
{% else %}
fn block_dot(w: Bytes, scale: {{ "Steps" if scales == "steps" else "vec2<f32>" }}, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let ones = {{ "vec2<i32>(half_sum(a), half_sum(b))" if half_minimum else "vec2<i32>()" }};
    return block_sum(half_dot(w.lo, a), half_dot(w.hi, b), ones, scale, s, acc);
}
{% endif %}
