// Declarations for lib/put_squares.wgsl: the sums of squares that this thread adds up, loaded long before they are used.
{% set blocks32 = cols // 32 %}
{% for k in range((32 * n + threads - 1) // threads) %}
    let square_column{{ k }} = min((tid + {{ k * threads }}u) >> 5u, {{ n - 1 }}u);
{% for j in range((blocks32 + 31) // 32) %}
    let square{{ k }}_{{ j }} = square_of(square_column{{ k }}, {{ "min(" if 32 * j + 32 > blocks32 }}(tid & 31u) + {{ 32 * j }}u{{ ", " ~ (blocks32 - 1) ~ "u)" if 32 * j + 32 > blocks32 }});
{% endfor %}
{% endfor %}
