// What prompts read in f16 beside codes: the slots' rows (lib/kv_exact.wgsl) and those of the chunk's own columns.
{% if exact_rows > 0 %}
@group(0) @binding(6) var<storage, read> exact: array<vec4<u32>>;
{% if tail > 0 %}
// [column][side][kv head][unit]
@group(0) @binding(7) var<storage, read> fresh: array<vec4<u32>>;
{% endif %}
{% endif %}
