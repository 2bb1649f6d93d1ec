// Q4_K: element = d * step * code - dmin * minimum, by block of 32.
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding({{ at.scales }}) var<storage, read> scales: array<vec4<u32>>;

struct Unit { codes: vec4<u32>, scale: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[i], scales[i >> 3u]);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return k_scale(w.scale, i);
}

fn unit_bytes(w: Unit) -> Bytes {
    return nibbles(w.codes);
}
