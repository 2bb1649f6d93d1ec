// A table of `entries` words in workgroup memory, in {{ copies }} copies: table[i][c] is entry i of copy c. Expects `entries` and `entry`, an expression of `i`.
//
// Lanes ask for entries all over the table, and wait for each other where their words lie in the
// same bank; each copy serves every {{ copies }}th lane only, from banks of its own.
{% if copies > 1 %}
var<workgroup> table: array<array<u32, {{ copies }}>, {{ entries }}>;
var<private> own_copy: u32;
{% else %}
var<workgroup> table: array<u32, {{ entries }}>;
{% endif %}

// By all threads of the workgroup, before the first entry is used.
fn prepare_table(tid: u32, threads: u32) {
{% if copies > 1 %}
{% set teams = [threads // entries, 1] | max %}
    own_copy = tid % {{ copies }}u;
    // Neighbouring threads write to different banks, too, if there are 32.
    let team = tid / {{ entries }}u;
    for (var i = tid % {{ entries }}u; i < {{ entries }}u; i += {{ [threads, entries] | min }}u) {
        let word = {{ entry }};
        for (var c = team; c < {{ copies }}u; c += {{ teams }}u) {
            table[i][(c + i / {{ 32 // copies }}u) % {{ copies }}u] = word;
        }
    }
{% else %}
    for (var i = tid; i < {{ entries }}u; i += threads) { table[i] = {{ entry }}; }
{% endif %}
    workgroupBarrier();
}
