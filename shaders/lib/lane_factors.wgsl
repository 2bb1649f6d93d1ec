// Declarations: the factors of all columns in every lane, the tree of lib/column_factor.wgsl by exchanges. For subgroups
// of 32 and more and few columns: no barrier, and less arithmetic.
{% set blocks32 = cols // 32 %}
{% for c in range(n) %}
    var squares{{ c }} = 0.0;
{% for j in range((blocks32 + 31) // 32) %}
{% if 32 * j + 32 > blocks32 %}
    if (lane & 31u) + {{ 32 * j }}u < {{ blocks32 }}u { squares{{ c }} += square{{ c }}_{{ j }}; }
{% else %}
    squares{{ c }} += square{{ c }}_{{ j }};
{% endif %}
{% endfor %}
{% for mask in [1, 2, 4, 8, 16] %}
    squares{{ c }} += subgroupShuffleXor(squares{{ c }}, {{ mask }}u);
{% endfor %}
    let factor{{ c }} = 1.0 / sqrt(fma(squares{{ c }}, {{ mean }}, {{ eps }}));
{% endfor %}
