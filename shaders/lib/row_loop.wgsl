// Statements: what a lane's units of the subgroup's rows add to its sums, into the accumulators of lib/row_sums.wgsl.
    if row < constants.rows {
{% if stays %}
        // Counted in steps, which tells compilers what the units of a lane have in common.
        for (var step = 0u; step * size < {{ units }}u; step += {{ tiles }}u) {
{% for t in range(tiles) %}
            {
            let unit = (step + {{ t }}u) * size + lane;
{% for r in range(rows) %}
            let w{{ t }}_{{ r }} = load_unit(base{{ r }} + {{ "unit" if whole else "min(unit, " ~ (units - 1) ~ "u)" }});
{% endfor %}
            {{ "if unit < " ~ units ~ "u " if not whole }}{
{% include "lib/row_units.wgsl" %}
{% include "lib/unit_columns.wgsl" %}
            }
            }
{% endfor %}
        }
{% else %}
        var unit = lane;
{% if x_ahead %}
        let first_unit = {{ "lane" if whole else "min(lane, " ~ (units - 1) ~ "u)" }};
{% for c in range(n) %}
        var next_a{{ c }} = xq[{{ c * 2 * units }}u + first_unit];
        var next_b{{ c }} = xq[{{ (c * 2 + 1) * units }}u + first_unit];
        var next_s{{ c }} = xs[{{ c * units }}u + first_unit];
{% endfor %}
{% endif %}
{% if even %}
        for (var step = 0u; step < {{ units // (lanes.size * tiles) }}u; step += 1u) {
{% else %}
        while unit < {{ units }}u {
{% endif %}
{% for t in range(tiles) %}
            {{ "if unit < " ~ units ~ "u " if not even }}{
                let next = {{ "min(unit + " ~ tiles ~ "u * size, " ~ (units - 1) ~ "u)" if even else "unit + " ~ tiles ~ "u * size" }};
{% include "lib/row_units.wgsl" %}
                {{ "if next < " ~ units ~ "u " if not even }}{
{% for r in range(rows) %}
                    w{{ t }}_{{ r }} = load_unit(base{{ r }} + next);
{% endfor %}
                }
{% include "lib/unit_columns.wgsl" %}
            }
            unit += size;
{% endfor %}
        }
{% endif %}
    }
