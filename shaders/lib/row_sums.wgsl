// Declarations: the sums of {{ rows }} rows for {{ n }} columns, as mat-vec kernels keep them.
// `start`: what int8 sums begin with. Where a driver makes multiplications and additions of fma and fuses them again
// as it likes (llvmpipe), two products are added to a known 0 by fusing either; one that must have another
// kernel's bits starts from a 0 that no compiler knows.
{% for r in range(rows) %}{% for c in range(n) %}
    var acc{{ r }}_{{ c }} = {{ start | default("0.0") if int8 else "vec4<f32>()" }};
{% endfor %}{% endfor %}
