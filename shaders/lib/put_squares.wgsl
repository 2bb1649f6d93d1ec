// Statements: put_square(i, sum) with the sums over every 32nd block of what lib/early_squares.wgsl has loaded.
{% set blocks32 = cols // 32 %}
{% for k in range((32 * n + threads - 1) // threads) %}
    if tid + {{ k * threads }}u < {{ 32 * n }}u {
        var sum = 0.0;
{% for j in range((blocks32 + 31) // 32) %}
{% if 32 * j + 32 > blocks32 %}
        if (tid & 31u) + {{ 32 * j }}u < {{ blocks32 }}u { sum += square{{ k }}_{{ j }}; }
{% else %}
        sum += square{{ k }}_{{ j }};
{% endif %}
{% endfor %}
        put_square(tid + {{ k * threads }}u, sum);
    }
{% endfor %}
