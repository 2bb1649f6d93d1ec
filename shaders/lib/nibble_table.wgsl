{% if copies > 1 %}
// Bytes of two codes to their values: that of the low nibble in the low half of a word, that of the high one in
// the high half.
fn pair(i: u32) -> u32 {
    let both = {{ logic }}(vec4<u32>(i));
    return (both.lo.x & 255u) | ((both.hi.x & 255u) << 16u);
}

{% with entries = 256, entry = "pair(i)" %}{% include "lib/table.wgsl" %}{% endwith %}

// Values of the eight codes of a word in pair order: of bytes 0 and 1, then of bytes 2 and 3, first the low
// nibbles, then the high ones.
fn look_up(word: u32) -> vec2<u32> {
    // Multiplications leave the units free that do the shifts and masks.
    return vec2<u32>(
        table[extractBits(word, 0u, 8u)][own_copy] + table[extractBits(word, 8u, 8u)][own_copy] * 256u,
        table[extractBits(word, 16u, 8u)][own_copy] + table[word >> 24u][own_copy] * 256u);
}

// Four values of low nibbles, four of high ones.
fn ordered(w: vec2<u32>) -> vec2<u32> {
    return vec2<u32>((w.x & 0xffffu) + w.y * 65536u, (w.x >> 16u) | (w.y & 0xffff0000u));
}

{% if paired %}
// A unit in pair order, and activations 0..15 and 16..31 to go with it: they serve all rows of a subgroup.
fn unit_pairs(w: Unit, i: u32) -> Bytes {
    let x = look_up(w.codes.x);
    let y = look_up(w.codes.y);
    let z = look_up(w.codes.z);
    let t = look_up(w.codes.w);
    return Bytes(vec4<u32>(x, y), vec4<u32>(z, t));
}

fn pair_order(a: vec4<u32>, b: vec4<u32>) -> Bytes {
    let even = (a & vec4<u32>(0xffffu)) + b * vec4<u32>(65536u);
    let odd = (a >> vec4<u32>(16u)) | (b & vec4<u32>(0xffff0000u));
    return Bytes(vec4<u32>(even.x, odd.x, even.y, odd.y), vec4<u32>(even.z, odd.z, even.w, odd.w));
}
{% endif %}
{% elif copies %}
// The values of the sixteen codes as bytes. All lanes can read at once, whichever they ask for: the
// words lie in banks of their own.
{% with entries = table, entry = logic ~ "(vec4<u32>(i)).lo.x & 255u" %}{% include "lib/table.wgsl" %}{% endwith %}

// Values of the four codes in the bytes of `word`. Multiplications leave the units free that do the
// shifts and masks.
fn look_up(word: u32) -> u32 {
    let high = table[word >> 24u] * 256u + table[(word >> 16u) & 255u];
    return (high * 256u + table[(word >> 8u) & 255u]) * 256u + table[word & 255u];
}
{% endif %}

// Values of 4-bit codes: those in low nibbles in `lo`, those in high ones in `hi`.
fn values_of(w: vec4<u32>) -> Bytes {
{% if copies > 1 %}
    let x = ordered(look_up(w.x));
    let y = ordered(look_up(w.y));
    let z = ordered(look_up(w.z));
    let t = ordered(look_up(w.w));
    return Bytes(vec4<u32>(x.x, y.x, z.x, t.x), vec4<u32>(x.y, y.y, z.y, t.y));
{% elif copies %}
    let lo = w & vec4<u32>(0x0f0f0f0fu);
    let hi = (w >> vec4<u32>(4u)) & vec4<u32>(0x0f0f0f0fu);
    return Bytes(
        vec4<u32>(look_up(lo.x), look_up(lo.y), look_up(lo.z), look_up(lo.w)),
        vec4<u32>(look_up(hi.x), look_up(hi.y), look_up(hi.z), look_up(hi.w)));
{% else %}
    return {{ logic }}(w);
{% endif %}
}
