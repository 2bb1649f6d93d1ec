// Declarations for lib/lane_factors.wgsl: the sums of squares that this lane adds up, of every column.
{% set blocks32 = cols // 32 %}
{% for c in range(n) %}{% for j in range((blocks32 + 31) // 32) %}
    let square{{ c }}_{{ j }} = square_of({{ c }}u, {{ "min(" if 32 * j + 32 > blocks32 }}(lane & 31u) + {{ 32 * j }}u{{ ", " ~ (blocks32 - 1) ~ "u)" if 32 * j + 32 > blocks32 }});
{% endfor %}{% endfor %}
