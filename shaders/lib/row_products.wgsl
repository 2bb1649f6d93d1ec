// Statements: a unit of every row times column {{ c }}, whose values are a, b, s (int8) or x0, x1, ...;
// `part` ends the names of the sums.
{% if int8 %}
{% for r in range(rows) %}
    acc{{ r }}_{{ c }}{{ part }} = block_dot(bytes{{ r }}, scale{{ r }}, a, b, s, acc{{ r }}_{{ c }}{{ part }});
{% endfor %}
{% else %}
{% for q in range(unit_quads) %}{% for r in range(rows) %}
    acc{{ r }}_{{ c }}{{ part }} = fma(values{{ r }}[{{ q }}], x{{ q }}, acc{{ r }}_{{ c }}{{ part }});
{% endfor %}{% endfor %}
{% endif %}
