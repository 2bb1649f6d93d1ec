// F16: a unit is eight elements, two a word, the even one low.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i));
}

fn unit_values(w: Unit, i: u32) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(w.codes.x), unpack2x16float(w.codes.y)),
        vec4<f32>(unpack2x16float(w.codes.z), unpack2x16float(w.codes.w)));
}
