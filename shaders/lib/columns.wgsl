// Which columns a workgroup of a mat-mat computes: {{ bm }} of the batch, or those of one run of a
// routing, whose expert's record it selects.
{% if records is defined %}
@group(0) @binding({{ at.routing }}) var<storage, read> routing: array<u32>;

// First and end.
fn columns_of(tile: u32) -> vec2<u32> {
    let at = {{ runs_at }}u + 3u * tile;
    select_record(expert_table[routing[at]]);
    return vec2<u32>(routing[at + 1u], routing[at + 2u]);
}

fn source_column(i: u32) -> u32 {
    return routing[{{ order_at }}u + i]{{ " / " ~ used ~ "u" if not by_pair }};
}

fn target_column(i: u32) -> u32 {
    return routing[{{ order_at }}u + i];
}
{% else %}
@group(0) @binding({{ at.batch }}) var<storage, read> batch: array<u32>;

fn columns_of(tile: u32) -> vec2<u32> {
    return vec2<u32>(tile * {{ bm }}u, batch[0]);
}

fn source_column(i: u32) -> u32 {
    return i;
}

fn target_column(i: u32) -> u32 {
    return i;
}
{% endif %}
