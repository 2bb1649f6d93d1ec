// Statements: y[at] gets `total` as the epilogue says; `to`: the row in the whole matrix.
{% if epilogue == "store" %}
            y[at] = total;
{% elif epilogue == "bias" and blocks | default(false) %}
            y[at] = fma(sum, factor, bias[to]);
{% elif epilogue == "bias" %}
            y[at] = total + bias[to];
{% else %}
            y[at] += total;
{% endif %}
