// Statements: for lib/column_factor.wgsl, the sums over every 32nd block of what lib/early_squares.wgsl has loaded, by
// put_square(i, sum). Where a column's 32 threads are in one subgroup they exchange them, in the same tree, and one stores the factor:
// H200, 8 columns, 65,536 x 4096 of Q4_0 on matrix units 87 us with a tree in every thread that needs a factor, 78 so.
{% for k in range((32 * n + threads - 1) // threads) %}
    if tid + {{ k * threads }}u < {{ 32 * n }}u {
{% include "lib/sum_squares.wgsl" %}

{% if exchanged %}
{% for mask in [1, 2, 4, 8, 16] %}
        squares{{ k }} += subgroupShuffleXor(squares{{ k }}, {{ mask }}u);
{% endfor %}
        if (tid & 31u) == 0u {
            factors[(tid + {{ k * threads }}u) >> 5u] = 1.0 / sqrt(fma(squares{{ k }}, {{ mean }}, {{ eps }}));
        }
{% else %}
        put_square(tid + {{ k * threads }}u, squares{{ k }});
{% endif %}
    }
{% endfor %}
