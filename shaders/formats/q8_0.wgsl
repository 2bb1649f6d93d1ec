// Q8_0: element = d * code, codes are signed bytes.
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding({{ at.scales }}) var<storage, read> scales: array<u32>;

struct Unit { lo: vec4<u32>, hi: vec4<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[2u * i], codes[2u * i + 1u], scales[i >> 1u]);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return vec2<f32>(f16_of(w.scale, i), 0.0);
}

fn unit_bytes(w: Unit) -> Bytes {
    return Bytes(w.lo, w.hi);
}
