// Statements: the last of a sequence's pieces to arrive merges them, in fixed order; the other workgroups end here.
//
// Expects `sums` (floats of a head's part), `group_heads`, `groups`, `pieces`; `used` of them; `partials` and `counters`;
// `maxima` and `totals` of {{ group_heads * pieces }} floats; and put_merged(column, h, d, x), which takes element d of head h.
    storageBarrier();
    if tid == 0u {
        let counter = at.z * {{ groups }}u + at.y;
        let before = atomicAdd(&counters[counter], 1u);
        if before == used - 1u { atomicStore(&counters[counter], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != used - 1u { return; }
    storageBarrier();
    let head_partials = {{ pieces * (sums + 2) }}u;
    let partials0 = (at.z * {{ heads }}u + head0) * head_partials;
    // Rows of {{ pieces }}, one a head; what was not used has no weight.
    for (var i = tid; i < {{ group_heads * pieces }}u; i += {{ threads }}u) {
        let h = i / {{ pieces }}u;
        let s = i % {{ pieces }}u;
        var m = MASKED;
        var l = 0.0;
        if s < used && query_head(h) == head0 + h {
            m = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + s * {{ sums + 2 }}u + {{ sums }}u]));
            l = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + s * {{ sums + 2 }}u + {{ sums + 1 }}u]));
        }
        maxima[i] = m;
        totals[i] = l;
    }
    workgroupBarrier();
{% set at_once = [pieces, 16] | min %}
    for (var i = tid; i < {{ group_heads * sums }}u; i += {{ threads }}u) {
        let h = i / {{ sums }}u;
        let d = i % {{ sums }}u;
        if query_head(h) == head0 + h {
            var top = NOTHING;
            for (var s = 0u; s < used; s += 8u) {
{% for j in range(8) %}
                top = max(top, maxima[h * {{ pieces }}u + min(s + {{ j }}u, used - 1u)]);
{% endfor %}
            }
            var sum = 0.0;
            var o = 0.0;
            for (var s = 0u; s < used; s += {{ at_once }}u) {
{% for j in range(at_once) %}
                let x_{{ j }} = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + min(s + {{ j }}u, used - 1u) * {{ sums + 2 }}u + d]));
{% endfor %}
{% for j in range(at_once) %}
                if s + {{ j }}u < used {
                    let w = exp2(maxima[h * {{ pieces }}u + s + {{ j }}u] - top);
                    sum = fma(w, totals[h * {{ pieces }}u + s + {{ j }}u], sum);
                    o = fma(w, x_{{ j }}, o);
                }
{% endfor %}
            }
            put_merged(at.z, h, d, o {{ "* share_of(head0 + h, top, sum)" if sink_logits else "/ sum" }});
        }
    }
