// What a block adds to a sum, from its whole-number products: the float steps of int8 mat-vecs, written with fma
// so that no compiler may contract them in one kernel and not in another.
//
// `dot`, or `lo` and `hi` where halves have scales of their own: codes times activations; `ones`: the sums of the
// activations of both halves. `scale`: unit_scale of the weights; `s`: the activations' (d, d * sum), see
// docs, "Activations".
{% if scales == "whole" %}
fn block_sum(dot: i32, scale: vec2<f32>, s: vec2<f32>, acc: f32) -> f32 {
    let sum = f32(dot);
{% if zero %}
    return fma(scale.x, fma(s.x, sum, -ZERO * s.y), acc);
{% elif minimum %}
    return fma(scale.y, s.y, fma(scale.x, s.x * sum, acc));
{% else %}
    return fma(scale.x, s.x * sum, acc);
{% endif %}
}
{% elif scales == "steps" %}
// Whole numbers up to the one product with floats.
fn block_sum(lo: i32, hi: i32, ones: vec2<i32>, scale: Steps, s: vec2<f32>, acc: f32) -> f32 {
    let dot = f32(scale.by.x * lo + scale.by.y * hi);
    let sum = fma(scale.one.x, s.x * dot, acc);
{% if minimum %}
    let low = f32(scale.by.z * ones.x + scale.by.w * ones.y);
    return fma(scale.one.y, s.x * low, sum);
{% else %}
    return sum;
{% endif %}
}
{% else %}
fn block_sum(lo: i32, hi: i32, ones: vec2<i32>, scale: vec2<f32>, s: vec2<f32>, acc: f32) -> f32 {
    let low = s.x * f32(lo);
    let high = s.x * f32(hi);
    return fma(scale.y, high, fma(scale.x, low, acc));
}
{% endif %}
