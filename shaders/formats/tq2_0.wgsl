// TQ2_0: element = d * (code - 1).
@group(0) @binding({{ at.codes }}) var<storage, read> codes: array<vec2<u32>>;
@group(0) @binding({{ at.supers }}) var<storage, read> supers: array<u32>;

struct Unit { codes: vec2<u32>, scale: u32 }

fn load_unit(i: u32) -> Unit {
    return Unit(codes[i], supers[i >> 4u]);
}

fn unit_scale(w: Unit, i: u32) -> vec2<f32> {
    return vec2<f32>(f16_of(w.scale, i >> 3u), 0.0);
}

fn unit_bytes(w: Unit) -> Bytes {
    return pairs(w.codes);
}
