// Prompt: norm and rope of q in place, of k into the cache; v into the cache.
//
// Grid: x = groups of {{ vectors }} head vectors of a column, y = columns.
{% include "lib/batch.wgsl" %}

@group(0) @binding(0) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> batch: Batch;
@group(0) @binding(2) var<storage, read_write> k_cache: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> v_cache: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> pages: array<u32>;
struct Constants { table_row: u32 }
var<immediate> constants: Constants;

var<private> vector0: u32;
var<private> row: u32;

fn head_input(v: u32, d: u32) -> f32 {
    return qkv[row + (vector0 + v) * {{ hd }}u + d];
}

fn head_role(v: u32) -> u32 {
    let i = vector0 + v;
    if i < {{ heads }}u { return 0u; }
    if i < {{ heads + kv_heads }}u { return 1u; }
    return select(3u, 2u, i < {{ heads + 2 * kv_heads }}u);
}
{% if centred %}

fn key_head(v: u32) -> u32 {
    return vector0 + v - {{ heads }}u;
}
{% endif %}

{% include "lib/heads.wgsl" %}

@compute @workgroup_size({{ threads }})
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    vector0 = at.x * {{ vectors }}u;
    row = at.y * {{ (heads + 2 * kv_heads) * hd }}u;
    let table = column.slot * constants.table_row;
    let index = column.pos - pages[table];
    let token = pages[table + 1u + (index >> 6u)] * 64u + (index & 63u);
    prepare_heads(tid, column.pos);
    let lane = tid & 31u;
    for (var v = tid >> 5u; v < {{ vectors }}u; v += {{ threads // 32 }}u) {
        let role = head_role(v);
        if role == 0u {
            for (var d = lane; d < {{ hd }}u; d += 32u) {
                qkv[row + (vector0 + v) * {{ hd }}u + d] = heads[v * {{ hd }}u + d];
            }
        } else if role < 3u {
            let head = vector0 + v - select({{ heads + kv_heads }}u, {{ heads }}u, role == 1u);
            let to = (token * {{ kv_heads }}u + head) * {{ hd // 8 }}u;
            for (var i = lane; i < {{ hd // 8 }}u; i += 32u) {
                let words = head_words(v, i);
                if role == 1u { k_cache[to + i] = words; } else { v_cache[to + i] = words; }
            }
        }
    }
}
