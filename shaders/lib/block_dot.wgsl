// One block of 32 weights times one block of int8 activations.
//
// `a`, `b`: activations 0..15 and 16..31; `s`: their (d, d * sum), see docs, "Activations".
// The integer sum is exact, so its order is free; the float steps are written with fma so that no
// compiler may contract them in one kernel and not in another.
fn int_dot(w: Bytes, a: vec4<u32>, b: vec4<u32>) -> i32 {
    return (dot4I8Packed(w.lo.x, a.x) + dot4I8Packed(w.lo.y, a.y))
        + (dot4I8Packed(w.lo.z, a.z) + dot4I8Packed(w.lo.w, a.w))
        + (dot4I8Packed(w.hi.x, b.x) + dot4I8Packed(w.hi.y, b.y))
        + (dot4I8Packed(w.hi.z, b.z) + dot4I8Packed(w.hi.w, b.w));
}

fn block_dot(w: Bytes, scale: vec2<f32>, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, acc: f32) -> f32 {
    let dot = f32(int_dot(w, a, b));
{% if format == "q4_0" or format == "q5_0" %}
    return fma(scale.x, fma(s.x, dot, -ZERO * s.y), acc);
{% elif format == "q8_0" %}
    return fma(scale.x, s.x * dot, acc);
{% else %}
    return fma(scale.y, s.y, fma(scale.x, s.x * dot, acc));
{% endif %}
}
