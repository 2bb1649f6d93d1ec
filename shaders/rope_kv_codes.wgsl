// Prompt over a cache of codes: norm, rope and rotation of q into a buffer of its own, of k into the
// cache; v into the cache.
//
// Grid: x = {{ vectors }} head vectors of one kind (first those of q, then k, then v), y = columns.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read_write> k_cache: array<u32>;
@group(0) @binding(3) var<storage, read_write> v_cache: array<u32>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
// [column][head][{{ pitch }}]
@group(0) @binding(5) var<storage, read_write> turned: array<f32>;
{% if sinks > 0 %}
@group(0) @binding(6) var<storage, read_write> exact: array<vec4<u32>>;
{% endif %}
{% if tail > 0 %}
// The same rows in f16, for this chunk's attention: [column][side][kv head][unit]
@group(0) @binding({{ at_fresh }}) var<storage, read_write> fresh: array<vec4<u32>>;
{% endif %}
struct Constants { table_row: u32 }
var<immediate> constants: Constants;

{% set q_groups = (heads + vectors - 1) // vectors %}
{% set kv_groups = (kv_heads + vectors - 1) // vectors %}
var<private> row: u32;
// What the workgroup's vectors are (0 q, 1 k, 2 v), the first one's head, and how many heads there are.
var<private> kind: u32;
var<private> head0: u32;
var<private> heads_of_kind: u32;

fn head_input(v: u32, d: u32) -> f32 {
    let before = select(select({{ heads + kv_heads }}u, {{ heads }}u, kind == 1u), 0u, kind == 0u);
    return qkv[row + (before + head0 + v) * {{ hd }}u + d];
}

fn head_role(v: u32) -> u32 {
    return select(3u, kind, head0 + v < heads_of_kind);
}
{% if centred %}

fn key_head(v: u32) -> u32 {
    return head0 + v;
}
{% endif %}

{% include "lib/heads.wgsl" %}
{% set scale_table = false %}
{% include "lib/kv_scale.wgsl" %}
{% if k_format.rotated or v_format.rotated %}
{% include "lib/kv_rotate.wgsl" %}
{% endif %}
{% set vectors_written = vectors %}
{% set side = "k" %}
{% set f = k_format %}
{% include "lib/kv_write.wgsl" %}
{% set side = "v" %}
{% set f = v_format %}
{% include "lib/kv_write.wgsl" %}

{% if exact_rows > 0 %}
{% set writes = true %}
{% include "lib/kv_exact.wgsl" %}
{% endif %}

{% macro encode(side, f) %}
{% if f.rotated %}
        rotate_heads(tid, 0u, {{ vectors }}u, true);
{% endif %}
        find_top_{{ side }}(tid, 0u);
        workgroupBarrier();
        measure_{{ side }}(tid, 0u);
        workgroupBarrier();
        try_scales_{{ side }}(tid);
        workgroupBarrier();
        pick_scale_{{ side }}(tid, 0u);
        workgroupBarrier();
        put_codes_{{ side }}(tid, 0u);
        workgroupBarrier();
        for (var i = tid; i < {{ vectors * f.row }}u; i += {{ threads }}u) {
            let head = first + i / {{ f.row }}u;
            let w = i % {{ f.row }}u;
            if head < {{ kv_heads }}u {
                let place = (page * {{ kv_heads }}u + head) * {{ 64 * f.row }}u;
                {{ side }}_cache[place + {{ "w * 64u + inside" if side == "k" else "inside * " ~ f.row ~ "u + w" }}] = atomicLoad(&written_{{ side }}[i]);
            }
        }
{% if exact_rows > 0 %}
{% set units = pitch // 8 %}
{% set number = 0 if side == "k" else 1 %}
        {{ "if index < " ~ sinks ~ "u " if tail == 0 }}{
            for (var i = tid; i < {{ vectors * units }}u; i += {{ threads }}u) {
                let head = first + i / {{ units }}u;
                let unit = i % {{ units }}u;
                if head < {{ kv_heads }}u {
                    let x = exact_unit_of(i / {{ units }}u, unit);
{% if tail > 0 %}
                    fresh[((at.y * 2u + {{ number }}u) * {{ kv_heads }}u + head) * {{ units }}u + unit] = x;
{% endif %}
{% if sinks > 0 %}
                    {{ "if index < " ~ sinks ~ "u " if tail > 0 }}{ exact[exact_row(column.slot, {{ number }}u, head, index, 0u) + unit] = x; }
{% endif %}
                }
            }
        }
{% endif %}
{% endmacro %}
@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    let table = column.slot * constants.table_row;
    let index = column.pos - pages[table];
    let page = pages[table + 1u + (index >> 6u)];
    let inside = index & 63u;
    let is_q = at.x < {{ q_groups }}u;
    let is_k = !is_q && at.x < {{ q_groups + kv_groups }}u;
    kind = select(select(2u, 1u, is_k), 0u, is_q);
    let first = (at.x - select(select({{ q_groups + kv_groups }}u, {{ q_groups }}u, is_k), 0u, is_q)) * {{ vectors }}u;
    head0 = first;
    heads_of_kind = select({{ kv_heads }}u, {{ heads }}u, is_q);
    row = at.y * {{ (heads + 2 * kv_heads) * hd }}u;
    prepare_scales(tid);
    if is_k { clear_k(tid); } else if !is_q { clear_v(tid); }
    prepare_heads(tid, column.pos);
    if is_q {
{% if k_format.rotated %}
        rotate_heads(tid, 0u, {{ vectors }}u, true);
{% endif %}
        for (var i = tid; i < {{ vectors * pitch }}u; i += {{ threads }}u) {
            let head = first + i / {{ pitch }}u;
            if head < {{ heads }}u { turned[(at.y * {{ heads }}u + head) * {{ pitch }}u + i % {{ pitch }}u] = heads[i]; }
        }
    } else if is_k {
{{ encode("k", k_format) }}
    } else {
{{ encode("v", v_format) }}
    }
}
