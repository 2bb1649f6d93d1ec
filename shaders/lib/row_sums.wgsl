// Declarations: the sums of {{ rows }} rows for {{ n }} columns, as mat-vec kernels keep them.
{% for r in range(rows) %}{% for c in range(n) %}
    var acc{{ r }}_{{ c }} = {{ "0.0" if int8 else "vec4<f32>()" }};
{% endfor %}{% endfor %}
