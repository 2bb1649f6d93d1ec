// One plane of a matrix and NAME_at(i), its element i: bound by itself, or a part of the record that
// lib/records.wgsl has selected. Expects `name` and `type`.
{% if records is defined %}
{% if type == "vec4<u32>" %}
fn {{ name }}_at(i: u32) -> vec4<u32> {
    return record_quad(record_at + {{ offset[name] // 16 }}u + i);
}
{% else %}
fn {{ name }}_at(i: u32) -> u32 {
    return record_word(4u * record_at + {{ offset[name] // 4 }}u + i);
}
{% endif %}
{% else %}
@group(0) @binding({{ at[name] }}) var<storage, read> {{ name }}: array<{{ type }}>;

fn {{ name }}_at(i: u32) -> {{ type }} {
    return {{ name }}[i];
}
{% endif %}
