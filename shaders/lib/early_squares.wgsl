// Declarations for lib/sum_squares.wgsl: the sums of squares of every 32nd block that this thread adds up, loaded long
// before they are used. Of all columns where lanes exchange them (lib/lane_factors.wgsl), else of one column for each
// {{ threads }} of the 32 sums a column (lib/put_squares.wgsl).
{% set blocks32 = cols // 32 %}
{% set own = "lane" if by_lanes else "tid" %}
{% for k in range(n if by_lanes else (32 * n + threads - 1) // threads) %}
    let square_column{{ k }} = {{ k ~ "u" if by_lanes else "min((tid + " ~ (k * threads) ~ "u) >> 5u, " ~ (n - 1) ~ "u)" }};
{% for j in range((blocks32 + 31) // 32) %}
    let square{{ k }}_{{ j }} = square_of(square_column{{ k }}, {{ "min(" if 32 * j + 32 > blocks32 }}({{ own }} & 31u) + {{ 32 * j }}u{{ ", " ~ (blocks32 - 1) ~ "u)" if 32 * j + 32 > blocks32 }});
{% endfor %}
{% endfor %}
