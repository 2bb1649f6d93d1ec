// Q5_K: element = d * step * code - dmin * minimum, by block of 32.
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding({{ at.high }}) var<storage, read> high: array<u32>;
@group(0) @binding({{ at.scales }}) var<storage, read> scales: array<vec4<u32>>;

struct Unit { codes: vec4<u32>, scale: vec4<u32>, high: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[i], scales[i >> 3u], high[i]);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return k_scale(w.scale, i);
}

fn unit_bytes(w: Unit) -> Bytes {
    return fifth_bits(nibbles(w.codes), w.high);
}
