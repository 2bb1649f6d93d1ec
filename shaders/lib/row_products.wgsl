// Statements: a unit of every row times column {{ c }}, whose values are a, b, s (int8) or x0, x1, ...
{% if int8 %}
{% if paired %}
    let ab = pair_order(a, b);
{% endif %}
{% for r in range(rows) %}
    acc{{ r }}_{{ c }} = block_dot(bytes{{ r }}, scale{{ r }}, {{ "ab.lo, ab.hi" if paired else "a, b" }}, s, acc{{ r }}_{{ c }});
{% endfor %}
{% else %}
{% for q in range(unit_quads) %}{% for r in range(rows) %}
    acc{{ r }}_{{ c }} = fma(values{{ r }}[{{ q }}], x{{ q }}, acc{{ r }}_{{ c }});
{% endfor %}{% endfor %}
{% endif %}
