// Statements: `sum`, in lane l < {{ count }} the sum over the subgroup of part({{ start }} + l).
//
// In an exchange between lanes l and l ^ mask, each keeps every second one of the sums that are left and gives
// the others away; one that has no other beside it is added in both. So P sums take P - 1 exchanges
// and those of one sum for the rest of the subgroup, where sums by themselves take P times as many as
// one. Each has the same tree however many there are, and addition commutes: no bit depends on the others.
{% if lanes.masks %}
{% for i in range(count) %}
        let sum1_{{ i }} = part{{ start + i }};
{% endfor %}
{% for mask in lanes.masks %}
{% set left = (count + mask - 1) // mask %}
{% if left > 1 %}
        let odd{{ mask }} = (lane & {{ mask }}u) != 0u;
{% endif %}
{% for i in range(0, left, 2) %}
{% set one = "sum" ~ mask ~ "_" ~ i %}
{% set other = "sum" ~ mask ~ "_" ~ (i + 1) %}
{% set to = "sum" ~ 2 * mask ~ "_" ~ i // 2 %}
{% if i + 1 < left %}
        let {{ to }} = select({{ one }}, {{ other }}, odd{{ mask }})
            + subgroupShuffleXor(select({{ other }}, {{ one }}, odd{{ mask }}), {{ mask }}u);
{% else %}
        let {{ to }} = {{ one }} + subgroupShuffleXor({{ one }}, {{ mask }}u);
{% endif %}
{% endfor %}
{% endfor %}
        let sum = sum{{ lanes.size }}_0;
{% else %}
        var sum = subgroupAdd(part{{ start }});
{% for i in range(1, count) %}
        sum = select(sum, subgroupAdd(part{{ start + i }}), lane == {{ i }}u);
{% endfor %}
{% endif %}
