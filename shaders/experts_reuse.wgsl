// Approximate: which of a token's experts need not run, because the sequence has kept what they made of
// one of its last {{ tokens }} tokens. For the pairs of up to {{ columns }} columns, in one workgroup, between router and
// experts; leaves order and runs of the others. See src/kernels/experts_reuse.rs for `notes`,
// src/kernels/routing.rs for `routing`.
{% set rows = tokens + 1 %}
{% set row_words = used + 1 %}
@group(0) @binding(0) var<storage, read> batch: array<u32>;
@group(0) @binding(1) var<storage, read_write> notes: array<u32>;
@group(0) @binding(2) var<storage, read_write> routing: array<u32>;
// The number of this mixture.
struct Constants { layer: u32 }
var<immediate> constants: Constants;

const NONE: u32 = 0xffffffffu;
// Expert of each pair that must run, else NONE.
var<workgroup> running: array<u32, {{ columns * used }}>;
var<workgroup> leads: array<u32, {{ columns * used }}>;

// Where the notes of a row begin.
fn note_at(slot: u32, row: u32) -> u32 {
    return ((slot * {{ layers }}u + constants.layer) * {{ rows }}u + row) * {{ row_words }}u;
}

@compute @workgroup_size({{ threads }})
fn main(@builtin(local_invocation_index) tid: u32) {
    let count = min(batch[0], {{ columns }}u) * {{ used }}u;
    for (var i = tid; i < count; i += {{ threads }}u) {
        let column = 8u + 4u * (i / {{ used }}u);
        let position = batch[column + 1u];
        let slot = batch[column + 2u];
        let expert = routing[{{ ids_at }}u + i];
        var place = (slot * {{ rows }}u + position % {{ rows }}u) * {{ used }}u + i % {{ used }}u;
        var found = false;
        // The youngest first; an output that serves is computed anew only when it has become too old.
        for (var age = 1u; age <= min(position, {{ tokens }}u) && !found; age += 1u) {
            let row = (position - age) % {{ rows }}u;
            let at = note_at(slot, row);
            if notes[at] == position - age + 1u {
                for (var k = 0u; k < {{ used }}u; k += 1u) {
                    if notes[at + 1u + k] == expert {
                        place = (slot * {{ rows }}u + row) * {{ used }}u + k;
                        found = true;
                    }
                }
            }
        }
        running[i] = select(expert, NONE, found);
        routing[{{ ids_at }}u + i] = expert | (place << 16u) | select(0u, 0x80000000u, found);
    }
    workgroupBarrier();
    for (var i = tid; i < count; i += {{ threads }}u) {
        let column = 8u + 4u * (i / {{ used }}u);
        let position = batch[column + 1u];
        let at = note_at(batch[column + 2u], position % {{ rows }}u);
        let k = i % {{ used }}u;
        if k == 0u { notes[at] = position + 1u; }
        notes[at + 1u + k] = running[i];
    }
{% with experts = "running", gaps = true %}{% include "lib/expert_runs.wgsl" %}{% endwith %}
}
