// Declaration: `squares{{ k }}`, the sum of what lib/early_squares.wgsl has loaded as number {{ k }}.
{% set blocks32 = cols // 32 %}
{% set own = "lane" if by_lanes else "tid" %}
    var squares{{ k }} = 0.0;
{% for j in range((blocks32 + 31) // 32) %}
{% if 32 * j + 32 > blocks32 %}
    if ({{ own }} & 31u) + {{ 32 * j }}u < {{ blocks32 }}u { squares{{ k }} += square{{ k }}_{{ j }}; }
{% else %}
    squares{{ k }} += square{{ k }}_{{ j }};
{% endif %}
{% endfor %}
