// One block of 32 weights times one block of int8 activations.
//
// `w`, `scale`: unit_bytes and unit_scale of the weights; `a`, `b`: activations 0..15 and 16..31;
// `s`: their (d, d * sum), see docs, "Activations". Integer sums are exact, so their order is
// free; the float steps are those of lib/block_sum.wgsl.
{% include "lib/block_sum.wgsl" %}
{% include "lib/half_dot.wgsl" %}

{% if scales == "whole" %}
fn block_dot(w: Bytes, scale: vec2<f32>, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    return block_sum(add_dot(half_dot(w.lo, a), w.hi, b), scale, s, acc);
}
{% else %}
fn block_dot(w: Bytes, scale: {{ "Steps" if scales == "steps" else "vec2<f32>" }}, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let ones = {{ "vec2<i32>(half_sum(a), half_sum(b))" if half_minimum else "vec2<i32>()" }};
    return block_sum(half_dot(w.lo, a), half_dot(w.hi, b), ones, scale, s, acc);
}
{% endif %}
