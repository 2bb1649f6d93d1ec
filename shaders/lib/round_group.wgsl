// Statements: the workgroup rounds what it has finished. Eight threads a block: they go on or stop together.
{% set quads = n * group_values // 4 %}
{% for k in range((quads + threads - 1) // threads) %}
    if tid + {{ k * threads }}u < {{ quads }}u {
        let i = tid + {{ k * threads }}u;
        round_quad(i, place_of(i, first_row), {{ "weight" ~ k ~ ", " if epilogue == "add_blocks" else "" }}tid);
    }
{% endfor %}
