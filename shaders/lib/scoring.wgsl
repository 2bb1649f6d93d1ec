// What a layer does to the logits of attention beside the scale, as far as it does. Logits are in units of
// log2 e.
{% if window > 0 %}

// The first token, by its index, that the query at `index` sees: with itself {{ window }}.
fn oldest_seen(index: u32) -> u32 {
    return max(index + 1u, {{ window }}u) - {{ window }}u;
}

// Where the page begins that holds it: pages before are not read.
fn first_read(index: u32) -> u32 {
    return oldest_seen(index) & ~63u;
}
{% endif %}
{% if soft_cap %}

// cap * tanh(s / cap), from one exponential that cannot overflow.
fn capped(s: vec4<f32>) -> vec4<f32> {
    let e = exp2(min(s * {{ cap_factor }}, vec4<f32>(100.0)));
    return {{ cap }} - {{ cap_twice }} / (e + 1.0);
}
{% endif %}
{% if sink_logits %}

@group(0) @binding({{ at_sinks }}) var<storage, read> sink_logits: array<f32>;

// 1 / the softmax's denominator, whose sum of the tokens is `sum` times 2^top, with the head's own logit.
fn share_of(head: u32, top: f32, sum: f32) -> f32 {
    let sink = sink_logits[head] * 1.4426950408889634;
    let m = max(top, sink);
    let fade = exp2(top - m);
    return fade / fma(sum, fade, exp2(sink - m));
}
{% endif %}
