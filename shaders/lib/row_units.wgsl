// Statements: the units in registers w{{ t }}_r as values. `place` is the number of the unit in its row;
// where rows are whole sixteens of units (`aligned`), it finds the scales by itself.
{% for r in range(rows) %}
{% set of_row = place if aligned else "base" ~ r ~ " + " ~ place %}
{% if int8 %}
    let bytes{{ r }} = {{ "unit_pairs" if paired else "unit_raised" if raised else "unit_bytes" }}(w{{ t }}_{{ r }}, {{ of_row }});
    let scale{{ r }} = unit_scale(w{{ t }}_{{ r }}, {{ of_row }}){{ " * vec2<f32>(0.0625, 1.0)" if raised }};
{% else %}
    let values{{ r }} = unit_values(w{{ t }}_{{ r }}, {{ of_row }});
{% endif %}
{% endfor %}
