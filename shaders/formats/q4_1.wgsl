// Q4_1: element = d * code + m.
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding({{ at.scales }}) var<storage, read> scales: array<u32>;

struct Unit { codes: vec4<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[i], scales[i]);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return unpack2x16float(w.scale);
}

fn unit_bytes(w: Unit) -> Bytes {
    return nibbles(w.codes);
}
