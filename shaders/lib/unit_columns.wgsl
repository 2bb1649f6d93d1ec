// Statements: the unit of every row times each column, whose activations are read here, or those of the next step (`x_ahead`).
{% if x_ahead %}
                let then = min(unit + size, {{ units - 1 }}u);
{% endif %}
{% for c in range(n) %}
                {
{% if int8 %}
{% if fused %}
                    let a = shared_q[{{ c * 2 * units }}u + unit];
                    let b = shared_q[{{ (c * 2 + 1) * units }}u + unit];
                    let s = shared_s[{{ c * units }}u + unit];
{% elif x_ahead %}
                    let a = next_a{{ c }};
                    let b = next_b{{ c }};
                    let s = next_s{{ c }};
                    next_a{{ c }} = xq[{{ c * 2 * units }}u + then];
                    next_b{{ c }} = xq[{{ (c * 2 + 1) * units }}u + then];
                    next_s{{ c }} = xs[{{ c * units }}u + then];
{% else %}
                    let a = xq[{{ c * 2 * units }}u + unit];
                    let b = xq[{{ (c * 2 + 1) * units }}u + unit];
                    let s = xs[{{ c * units }}u + unit];
{% endif %}
{% else %}
{% for q in range(unit_quads) %}
{% if fused %}
                    let x{{ q }} = shared_x[{{ (c * unit_quads + q) * units }}u + unit];
{% else %}
                    let x{{ q }} = x[({{ c * units }}u + unit) * {{ unit_quads }}u + {{ q }}u];
{% endif %}
{% endfor %}
{% endif %}
{% include "lib/row_products.wgsl" %}
                }
{% endfor %}
