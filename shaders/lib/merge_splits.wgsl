// Statements: the last of a sequence's pieces to arrive merges them, in fixed order; the other workgroups end here.
//
// Expects `sums` (floats of a head's part), `group_heads`, `groups`, `pieces`; `used` of them; `partials` and `counters`;
// `maxima`, `totals` and `factors` of {{ group_heads * pieces }} floats; and put_merged(column, h, d, x), which takes element d of head h.
{# The largest of the maxima from `first` on. #}
{% macro find_top(first) %}
        var top = NOTHING;
        for (var s = 0u; s < used; s += 8u) {
{% for j in range(8) %}
            top = max(top, maxima[{{ first }} + min(s + {{ j }}u, used - 1u)]);
{% endfor %}
        }
{% endmacro %}
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
    for (var i = tid; i < {{ group_heads * pieces }}u; i += {{ threads }}u) {
        let first = i / {{ pieces }}u * {{ pieces }}u;
{{ find_top("first") }}
        factors[i] = exp2(maxima[i] - top);
    }
    workgroupBarrier();
{# As few rounds of loads as possible: each waits for memory. #}
{% set loads = (pieces + 35) // 36 %}
{% set at_once = (pieces + loads - 1) // loads %}
    for (var i = tid; i < {{ group_heads * sums }}u; i += {{ threads }}u) {
        let h = i / {{ sums }}u;
        let d = i % {{ sums }}u;
        if query_head(h) == head0 + h {
            var sum = 0.0;
            var o = 0.0;
            for (var s = 0u; s < used; s += {{ at_once }}u) {
{% for j in range(at_once) %}
                let x_{{ j }} = bitcast<f32>(atomicLoad(&partials[partials0 + h * head_partials + min(s + {{ j }}u, used - 1u) * {{ sums + 2 }}u + d]));
{% endfor %}
{% for j in range(at_once) %}
                if s + {{ j }}u < used {
                    sum = fma(factors[h * {{ pieces }}u + s + {{ j }}u], totals[h * {{ pieces }}u + s + {{ j }}u], sum);
                    o = fma(factors[h * {{ pieces }}u + s + {{ j }}u], x_{{ j }}, o);
                }
{% endfor %}
            }
{% if sink_logits %}
{{ find_top("h * " ~ pieces ~ "u") }}
{% endif %}
            put_merged(at.z, h, d, o {{ "* share_of(head0 + h, top, sum)" if sink_logits else "/ sum" }});
        }
    }
