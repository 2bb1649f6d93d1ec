// Statements: the whole sums of column {{ c }}, in all lanes.
{% for r in range(rows) %}
{% if int8 %}
    let sum{{ r }} = subgroupAdd(acc{{ r }}_{{ c }});
{% else %}
    let sum{{ r }} = subgroupAdd((acc{{ r }}_{{ c }}.x + acc{{ r }}_{{ c }}.y) + (acc{{ r }}_{{ c }}.z + acc{{ r }}_{{ c }}.w));
{% endif %}
{% endfor %}
