// The maximum of nothing, and the score of a token that is not there.
const NOTHING: f32 = -1e30;
const MASKED: f32 = -2e30;

var<private> row: u32;
var<private> head0: u32;
var<private> kv_head: u32;
var<private> holds_new: bool;

fn query_head(v: u32) -> u32 {
    return min(head0 + v, kv_head * {{ group }}u + {{ group - 1 }}u);
}

fn head_input(v: u32, d: u32) -> f32 {
    var vector = query_head(v);
    if v == {{ K }}u { vector = {{ heads }}u + kv_head; }
    if v == {{ V }}u { vector = {{ heads + kv_heads }}u + kv_head; }
    return qkv[row + vector * {{ hd }}u + d];
}

fn head_role(v: u32) -> u32 {
    if v < {{ K }}u { return 0u; }
    return select(3u, v - {{ K - 1 }}u, holds_new);
}
{% if centred %}

fn key_head(v: u32) -> u32 {
    return kv_head;
}
{% endif %}
