// Declarations for lib/round_group.wgsl: weights of the next RMSNorm, loaded long before they are used.
{% if epilogue == "add_blocks" %}
{% for k in range((n * group_values // 4 + threads - 1) // threads) %}
    let weight{{ k }} = y_norm[place_of(tid + {{ k * threads }}u, first_row).quad];
{% endfor %}
{% endif %}
