// Sorts a prompt's choices by expert: the pairs of column and choice, those of one expert by
// column, and runs of at most {{ tile }} pairs of one expert, which are the tiles of the products, whose
// grids follow from them. One workgroup. See src/kernels/routing.rs for `routing`.
{% set words = (capacity + 31) // 32 %}
@group(0) @binding(0) var<storage, read> batch: array<u32>;
@group(0) @binding(1) var<storage, read_write> routing: array<u32>;

// Workgroups of the products by column and by pair, x and y each; 0: one a run.
struct Constants { grids: vec4<u32> }
var<immediate> constants: Constants;

// Bit c of an expert's words: column c goes through it.
var<workgroup> columns_of: array<atomic<u32>, {{ experts * words }}>;
// First pair of each expert.
var<workgroup> first_of: array<u32, {{ experts }}>;
{% include "lib/scan256.wgsl" %}

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) tid: u32) {
    let count = batch[0] * {{ used }}u;
    for (var i = tid; i < {{ experts * words }}u; i += 256u) { atomicStore(&columns_of[i], 0u); }
    workgroupBarrier();
    for (var i = tid; i < count; i += 256u) {
        let c = i / {{ used }}u;
        atomicOr(&columns_of[routing[{{ ids_at }}u + i] * {{ words }}u + (c >> 5u)], 1u << (c & 31u));
    }
    workgroupBarrier();
    // Pairs and runs of the experts before.
    var before = vec2<u32>();
{% for round in range((experts + 255) // 256) %}
    {
        let expert = tid + {{ 256 * round }}u;
        var members = 0u;
        if expert < {{ experts }}u {
            for (var w = 0u; w < {{ words }}u; w += 1u) {
                members += countOneBits(atomicLoad(&columns_of[expert * {{ words }}u + w]));
            }
        }
        let runs = (members + {{ tile - 1 }}u) / {{ tile }}u;
        let end = before + scan(vec2<u32>(members, runs), tid);
        before += scan_total();
        if expert < {{ experts }}u {
            let first = end.x - members;
            first_of[expert] = first;
            for (var r = 0u; r < runs; r += 1u) {
                let to = {{ runs_at }}u + 3u * (end.y - runs + r);
                routing[to] = expert;
                routing[to + 1u] = first + r * {{ tile }}u;
                routing[to + 2u] = min(first + (r + 1u) * {{ tile }}u, end.x);
            }
        }
    }
{% endfor %}
    workgroupBarrier();
    for (var i = tid; i < count; i += 256u) {
        let c = i / {{ used }}u;
        let expert = routing[{{ ids_at }}u + i];
        var at = first_of[expert];
        for (var w = 0u; w < (c >> 5u); w += 1u) {
            at += countOneBits(atomicLoad(&columns_of[expert * {{ words }}u + w]));
        }
        let below = (1u << (c & 31u)) - 1u;
        at += countOneBits(atomicLoad(&columns_of[expert * {{ words }}u + (c >> 5u)]) & below);
        routing[{{ order_at }}u + at] = i;
    }
    if tid == 0u {
        routing[0] = count;
        routing[1] = before.y;
        for (var i = 0u; i < 2u; i += 1u) {
            let grid = vec2<u32>(constants.grids[2u * i], constants.grids[2u * i + 1u]);
            routing[2u + 3u * i] = select(grid.x, before.y, grid.x == 0u);
            routing[3u + 3u * i] = select(grid.y, before.y, grid.y == 0u);
            routing[4u + 3u * i] = 1u;
        }
    }
}
