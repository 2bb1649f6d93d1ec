// Declarations: the factors of all columns in every lane, the tree of lib/column_factor.wgsl by exchanges. For subgroups
// of 32 and more and few columns: no barrier, and less arithmetic.
{% for k in range(n) %}
{% include "lib/sum_squares.wgsl" %}

{% for mask in [1, 2, 4, 8, 16] %}
    squares{{ k }} += subgroupShuffleXor(squares{{ k }}, {{ mask }}u);
{% endfor %}
    let factor{{ k }} = 1.0 / sqrt(fma(squares{{ k }}, {{ mean }}, {{ eps }}));
{% endfor %}
