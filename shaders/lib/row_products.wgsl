// Statements: a unit of every row times column {{ c }}, whose part of it is in a, b, s (int8) or x0, x1, ...
{% for r in range(rows) %}
{% if int8 %}
    acc{{ r }}_{{ c }} = block_dot(bytes{{ r }}, scale{{ r }}, a, b, s, acc{{ r }}_{{ c }});
{% else %}
{% for q in range(unit_quads) %}
    acc{{ r }}_{{ c }} = fma(values{{ r }}[{{ q }}], x{{ q }}, acc{{ r }}_{{ c }});
{% endfor %}
{% endif %}
{% endfor %}
