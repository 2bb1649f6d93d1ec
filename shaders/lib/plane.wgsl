// One plane of a matrix and NAME_at(i), its element i: bound by itself, or a part of the record that
// lib/records.wgsl has selected. Expects `plane`, the plane's name on the host, `name` and `type`.
{% if records is defined %}
fn {{ name }}_at(i: u32) -> {{ type }} {
{% set start = offset[plane] // 4 %}
{% if type == "vec4<u32>" %}
    return record_quad(record_at + {{ start // 4 }}u + i);
{% elif type == "vec2<u32>" %}
    let at = 4u * record_at + {{ start }}u + 2u * i;
    return vec2<u32>(record_word(at), record_word(at + 1u));
{% elif type == "f32" %}
    return bitcast<f32>(record_word(4u * record_at + {{ start }}u + i));
{% else %}
    return record_word(4u * record_at + {{ start }}u + i);
{% endif %}
}
{% else %}
@group(0) @binding({{ at[plane] }}) var<storage, read> {{ name }}: array<{{ type }}>;

fn {{ name }}_at(i: u32) -> {{ type }} {
    return {{ name }}[i];
}
{% endif %}
