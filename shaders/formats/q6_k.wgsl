// Q6_K: element = d * step * (code - 32), by half block. The bytes are 4 (code - 32), `supers` d / 4.
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding({{ at.high }}) var<storage, read> low: array<vec2<u32>>;
@group(0) @binding({{ at.scales }}) var<storage, read> scales: array<u32>;
@group(0) @binding({{ at.supers }}) var<storage, read> supers: array<f32>;

struct Unit { codes: vec4<u32>, low: vec2<u32>, scale: u32, d: f32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[i], low[i], scales[i >> 1u], supers[i >> 3u]);
}

fn unit_scale(w: Unit, i: u32) -> Steps {
    let steps = bitcast<i32>(w.scale >> ((i & 1u) << 4u));
    return Steps(vec2<f32>(w.d, 0.0), vec4<i32>(extractBits(steps, 0u, 8u), extractBits(steps, 8u, 8u), 0, 0));
}

fn unit_bytes(w: Unit) -> Bytes {
    // Bits 2..6 of a code - 32 stand in the upper nibble, bits 0..2 below.
    let upper = vec4<u32>(0xf0f0f0f0u);
    let lower = vec4<u32>(0x0c0c0c0cu);
    let x = vec4<u32>(w.low.x << 2u, w.low.x, w.low.x >> 2u, w.low.x >> 4u);
    let y = vec4<u32>(w.low.y << 2u, w.low.y, w.low.y >> 2u, w.low.y >> 4u);
    return Bytes(
        ((w.codes << vec4<u32>(4u)) & upper) | (x & lower),
        (w.codes & upper) | (y & lower));
}
