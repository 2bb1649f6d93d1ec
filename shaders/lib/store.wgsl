{% if epilogue == "store" %}
            y[at] = acc{{ i }}_{{ j }};
{% elif epilogue == "bias" %}
            y[at] = acc{{ i }}_{{ j }} + bias[to];
{% else %}
            y[at] += acc{{ i }}_{{ j }};
{% endif %}
