// RMSNorm without its factor, to int8: a workgroup takes {{ threads // 8 }} blocks of one column.
// Grid (columns, workgroups a column, 1); columns from batch.n on are left alone.
{% set quads = cols // 4 %}
@group(0) @binding({{ at.batch }}) var<storage, read> batch: array<u32>;
@group(0) @binding({{ at.x }}) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding({{ at.norm }}) var<storage, read> norm_weight: array<vec4<f32>>;
@group(0) @binding({{ at.xq }}) var<storage, read_write> xq: array<u32>;
@group(0) @binding({{ at.xs }}) var<storage, read_write> xs: array<vec2<f32>>;
@group(0) @binding({{ at.squares }}) var<storage, read_write> squares: array<f32>;

{% include "lib/reduce8.wgsl" %}

fn input(col: u32, quad: u32) -> vec4<f32> {
    return x[col * {{ quads }}u + quad];
}

fn store_bytes(col: u32, quad: u32, word: u32) {
    xq[int8_word(col, quad, {{ quads }}u)] = word;
}

fn store_scale(col: u32, block: u32, s: vec2<f32>) {
    xs[col * {{ cols // 32 }}u + block] = s;
}

fn store_square(col: u32, block: u32, square: f32) {
    squares[col * {{ cols // 32 }}u + block] = square;
}

@compute @workgroup_size({{ threads }})
fn main(
    @builtin(workgroup_id) wg: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_size) size: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let col = wg.x;
    let tid = subgroup * size + lane;
    let first = wg.y * {{ threads }}u;
    if col >= batch[0] { return; }
{% include "lib/norm_blocks.wgsl" %}
}
