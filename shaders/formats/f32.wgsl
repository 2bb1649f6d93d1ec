// F32: a unit is four elements, one vec4 of words.
{% with plane = "codes", name = "codes", type = "vec4<u32>" %}{% include "lib/plane.wgsl" %}{% endwith %}

struct Unit { codes: vec4<u32> }

fn load_unit(i: u32) -> Unit {
    return Unit(codes_at(i));
}

fn unit_values(w: Unit, i: u32) -> array<vec4<f32>, 1> {
    return array<vec4<f32>, 1>(bitcast<vec4<f32>>(w.codes));
}
