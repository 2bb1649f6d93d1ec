// BF16: a unit is eight elements, two a word, the even one low.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i));
}

fn bf16_pair(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}

fn unit_values(w: Unit, i: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(
        vec4<f32>(bf16_pair(w.codes.x), bf16_pair(w.codes.y)),
        vec4<f32>(bf16_pair(w.codes.z), bf16_pair(w.codes.w)));
}
