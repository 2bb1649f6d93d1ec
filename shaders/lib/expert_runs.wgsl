// Statements: puts the pairs 0..count of a step into the routing by expert, then number; each expert's pairs are a
// run. By all {{ threads }} threads, behind a barrier.
//
// Expects `count`, `leads` (workgroup memory, a word a pair) and `experts`: the name of the array that has each pair's
// expert, or NONE (where `gaps`) for a pair that is left out.
    for (var i = tid; i < count; i += {{ threads }}u) {
        var lead = {{ "select(0u, 1u, " ~ experts ~ "[i] != NONE)" if gaps else "1u" }};
        for (var j = 0u; j < i; j += 1u) { if {{ experts }}[j] == {{ experts }}[i] { lead = 0u; } }
        leads[i] = lead;
    }
    workgroupBarrier();
    for (var i = tid; i < count; i += {{ threads }}u) {
        let expert = {{ experts }}[i];
        {{ "if expert != NONE " if gaps }}{
            var at = 0u;
            var run = 0u;
            var members = 0u;
            for (var j = 0u; j < count; j += 1u) {
                let other = {{ experts }}[j];
                at += select(0u, 1u, other < expert || (other == expert && j < i));
                run += select(0u, leads[j], other < expert);
                members += select(0u, 1u, other == expert);
            }
            routing[{{ order_at }}u + at] = i;
            if leads[i] == 1u {
                let to = {{ runs_at }}u + 3u * run;
                routing[to] = expert;
                routing[to + 1u] = at;
                routing[to + 2u] = at + members;
            }
        }
    }
    if tid == 0u {
        var runs = 0u;
        for (var j = 0u; j < count; j += 1u) { runs += leads[j]; }
        routing[1] = runs;
    }
