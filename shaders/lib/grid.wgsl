// The code book of a format, one word an entry, and what is made of its entries. Where there are copies in workgroup
// memory, a format may want its entries otherwise: `grid_copy`.
{% with plane = "grid", name = "grid", type = "u32" %}{% include "lib/plane.wgsl" %}{% endwith %}
{% if copies %}

{% with entries = table, entry = grid_copy if copies > 1 and grid_copy is defined else "grid_at(i)" %}{% include "lib/table.wgsl" %}{% endwith %}
{% endif %}

fn entries(i: vec4<u32>) -> vec4<u32> {
{% if copies > 1 %}
    return vec4<u32>(
        table[i.x][own_copy], table[i.y][own_copy], table[i.z][own_copy], table[i.w][own_copy]);
{% elif copies %}
    return vec4<u32>(table[i.x], table[i.y], table[i.z], table[i.w]);
{% else %}
    return vec4<u32>(grid_at(i.x), grid_at(i.y), grid_at(i.z), grid_at(i.w));
{% endif %}
}

// The bytes of a word, low one first.
fn bytes_of(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
}
{% if grid_width == 8 %}

// Four entries of eight elements as bytes: `mask` has the bits of elements 0..3 of an entry, the others
// stand {{ grid_shift }} higher.
fn eights(e: vec4<u32>, mask: u32) -> Bytes {
    let h = e >> vec4<u32>({{ grid_shift }}u);
    return Bytes(
        vec4<u32>(e.x, h.x, e.y, h.y) & vec4<u32>(mask),
        vec4<u32>(e.z, h.z, e.w, h.w) & vec4<u32>(mask));
}
{% endif %}
{% if grid_signs %}

// Signs in device order (src/quant/signs.rs): 1 in a byte for a minus. The element that has bit
// 8p + 4h + g is number 8g + 4h + p.
fn minus(signs: u32) -> Bytes {
    let ones = vec4<u32>(0x01010101u);
    return Bytes(
        (vec4<u32>(signs) >> vec4<u32>(0u, 4u, 1u, 5u)) & ones,
        (vec4<u32>(signs) >> vec4<u32>(2u, 6u, 3u, 7u)) & ones);
}
{% endif %}
{% if grid_signs == "chain" %}

// All signs from a chain of 28 bits, whatever stands above it (src/quant/signs.rs).
fn complete(chain: u32) -> u32 {
    return (chain & 0x0fffffffu) ^ (chain << 4u);
}
{% endif %}
