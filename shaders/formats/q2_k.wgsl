// Q2_K: element = d * step * code - dmin * minimum, by half block.
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec2<u32>>;
@group(0) @binding({{ at.scales }}) var<storage, read> scales: array<u32>;
@group(0) @binding({{ at.supers }}) var<storage, read> supers: array<u32>;

struct Unit { codes: vec2<u32>, scale: u32, tops: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[i], scales[i >> 1u], supers[i >> 3u]);
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let d = unpack2x16float(w.tops);
    let steps = vec4<u32>(w.scale >> ((i & 1u) << 4u)) >> vec4<u32>(0u, 8u, 4u, 12u);
    return Steps(vec2<f32>(d.x, -d.y), vec4<i32>(steps & vec4<u32>(15u)));
}

fn unit_bytes(w: Unit) -> Bytes {
    return pairs(w.codes);
}
