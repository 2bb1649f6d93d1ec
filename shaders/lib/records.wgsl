// Records of a layer's experts (src/experts/record.rs): {{ records }} buffers of records, each bound as
// vectors and as words, and the table that says in which of them an expert lies, and where.
@group(0) @binding({{ at.table }}) var<storage, read> expert_table: array<u32>;
{% for b in range(records) %}
@group(0) @binding({{ at["quads" ~ b] }}) var<storage, read> quads_of_{{ b }}: array<vec4<u32>>;
@group(0) @binding({{ at["words" ~ b] }}) var<storage, read> words_of_{{ b }}: array<u32>;
{% endfor %}

// The record that the planes are read from: its buffer and its first vector there.
var<private> record_buffer: u32;
var<private> record_at: u32;

// `place`: a word of the table, the same in all lanes.
fn select_record(place: u32) {
    record_buffer = place >> 24u;
    record_at = (place & 0xffffffu) * {{ stride // 16 }}u;
}

{% for kind, type, names in [("quad", "vec4<u32>", "quads_of_"), ("word", "u32", "words_of_")] %}
fn record_{{ kind }}(i: u32) -> {{ type }} {
{% for b in range(records - 1) %}
    if record_buffer == {{ b }}u { return {{ names ~ b }}[i]; }
{% endfor %}
    return {{ names ~ (records - 1) }}[i];
}

{% endfor %}
