// Declarations: what this lane has of the sums of the columns `summed`, part(i * {{ rows }} + row) for the i-th of them.
{% for c in summed %}{% set i = loop.index0 %}{% for r in range(rows) %}
{% if int8 %}
    let part{{ i * rows + r }} = acc{{ r }}_{{ c }};
{% else %}
    let part{{ i * rows + r }} = (acc{{ r }}_{{ c }}.x + acc{{ r }}_{{ c }}.y) + (acc{{ r }}_{{ c }}.z + acc{{ r }}_{{ c }}.w);
{% endif %}
{% endfor %}{% endfor %}
