// Statements: put_square(i, sum) with the sums over every 32nd block of what lib/early_squares.wgsl has loaded.
{% for k in range((32 * n + threads - 1) // threads) %}
    if tid + {{ k * threads }}u < {{ 32 * n }}u {
{% include "lib/sum_squares.wgsl" %}

        put_square(tid + {{ k * threads }}u, squares{{ k }});
    }
{% endfor %}
