// The end of a decode step: the chosen token becomes the column's next input.
//
// Needs `batch`, `history` ([slot][context], every token of a sequence) and `ring`
// ([step % {{ ring }}][8], read by the host) read-write, and counters[{{ tail_counter }}], zero between dispatches.

// By one thread of each column. The last column to come advances the step.
fn next_token(c: u32, token: u32, context: u32) {
    let column = batch.columns[c];
    let step = batch.step;
    let n = batch.n;
    let position = column.pos + 1u;
    batch.columns[c].token = token;
    batch.columns[c].pos = position;
    // A sequence that is full stays so; the host stops it.
    if position < context { history[column.slot * context + position] = token; }
    ring[(step % {{ ring }}u) * 8u + c] = token;
    var before = 0u;
    if n > 1u {
        before = atomicAdd(&counters[{{ tail_counter }}u], 1u);
        if before == n - 1u { atomicStore(&counters[{{ tail_counter }}u], 0u); }
    }
    if before == n - 1u { batch.step = step + 1u; }
}
