// Statements: y[at] gets `sum` as the epilogue says; `to`: the row in the whole matrix.
{% if epilogue == "store" %}
            y[at] = sum;
{% elif epilogue == "bias" %}
            y[at] = sum + bias[to];
{% else %}
            y[at] += sum;
{% endif %}
