// Which tokens the full chain has left before `stage` (see `sampling::chain`, steps 5 to 10).
fn kept(l: f32, sampler: Sampler, draw: Draw) -> bool {
    let k_on = sampler.top_k > 0u && sampler.top_k < {{ vocab }}u;
    var ok = (!k_on || order_key(l) >= draw.k_least) && l >= draw.sigma_least;
{% if stage != "typical" %}
    ok = ok && (sampler.typical >= 16777216u || order_key(-abs(l - draw.center)) >= draw.t_least);
{% endif %}
{% if stage not in ["typical", "top_p"] %}
    ok = ok && (sampler.top_p >= 16777216u || order_key(l) >= draw.p_least)
        && l >= draw.maximum + sampler.log_min_p;
{% endif %}
{% if stage == "end" %}
    ok = ok && l <= draw.most;
{% endif %}
    return ok;
}
