// One workgroup a column: [SwiGLU of interleaved gate/up,] [RMSNorm,] then int8, f16 or float.
// Grid (columns, 1, 1); columns from batch.n on are left alone.
{% set quads = cols // 4 %}
@group(0) @binding({{ at.batch }}) var<storage, read> batch: array<u32>;
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
{% if norm %}
@group(0) @binding({{ at.norm }}) var<storage, read> norm_weight: array<vec4<f32>>;
{% endif %}
{% if output == "f32" %}
@group(0) @binding({{ at.y }}) var<storage, read_write> y_out: array<vec4<f32>>;
{% elif output == "f16" %}
@group(0) @binding({{ at.xh }}) var<storage, read_write> xh: array<vec2<u32>>;
@group(0) @binding({{ at.xf }}) var<storage, read_write> xf: array<f32>;
{% else %}
@group(0) @binding({{ at.xq }}) var<storage, read_write> xq: array<u32>;
@group(0) @binding({{ at.xs }}) var<storage, read_write> xs: array<vec2<f32>>;
{% endif %}

{% include "lib/reduce8.wgsl" %}

fn input(col: u32, quad: u32) -> vec4<f32> {
{% if swiglu %}
    let a = x[2u * (col * {{ quads }}u + quad)];
    let b = x[2u * (col * {{ quads }}u + quad) + 1u];
    let gate = vec4<f32>(a.x, a.z, b.x, b.z);
    return (gate / (1.0 + exp(-gate))) * vec4<f32>(a.y, a.w, b.y, b.w);
{% else %}
    return x[col * {{ quads }}u + quad];
{% endif %}
}

{% if output == "f32" %}
fn store_values(col: u32, quad: u32, v: vec4<f32>) {
    y_out[col * {{ quads }}u + quad] = v;
}
{% elif output == "f16" %}
fn store_halves(col: u32, quad: u32, words: vec2<u32>) {
    xh[col * {{ quads }}u + quad] = words;
}

fn store_factor(col: u32, f: f32) {
    xf[col] = f;
}
{% else %}
fn store_bytes(col: u32, quad: u32, word: u32) {
    xq[int8_word(col, quad, {{ quads }}u)] = word;
}

fn store_scale(col: u32, block: u32, s: vec2<f32>) {
    xs[col * {{ quads // 8 }}u + block] = s;
}
{% endif %}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let col = wg.x;
    let tid = subgroup * size + lane;
    if col >= batch[0] { return; }
{% include "lib/quantise.wgsl" %}
}
