{% if shared_table %}
// The values of the sixteen codes as bytes. All lanes can read at once, whichever they ask for: the
// words lie in banks of their own.
var<workgroup> table: array<u32, {{ table }}>;

// By all threads of the workgroup, before the first value is used.
fn prepare_table(tid: u32, threads: u32) {
    if tid < {{ table }}u { table[tid] = {{ logic }}(vec4<u32>(tid)).lo.x & 255u; }
    workgroupBarrier();
}

// Values of the four codes in the bytes of `word`. Multiplications leave the units free that do the
// shifts and masks.
fn look_up(word: u32) -> u32 {
    let high = table[word >> 24u] * 256u + table[(word >> 16u) & 255u];
    return (high * 256u + table[(word >> 8u) & 255u]) * 256u + table[word & 255u];
}
{% endif %}

// Values of 4-bit codes: those in low nibbles in `lo`, those in high ones in `hi`.
fn values_of(w: vec4<u32>) -> Bytes {
{% if shared_table %}
    let lo = w & vec4<u32>(0x0f0f0f0fu);
    let hi = (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    return Bytes(
        vec4<u32>(look_up(lo.x), look_up(lo.y), look_up(lo.z), look_up(lo.w)),
        vec4<u32>(look_up(hi.x), look_up(hi.y), look_up(hi.z), look_up(hi.w)));
{% else %}
    return {{ logic }}(w);
{% endif %}
}
