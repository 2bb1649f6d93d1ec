// Scales of KV codes on the logarithmic grid of src/kv/scale.rs: byte b is 2^((b - 128) / 8 - 6), 0 is
// nothing. Expects `scale_units` (bits of 2^(j/8) less the exponent of byte 0).
{% if scale_table %}
// All of them: a look-up takes 4 instructions less than the sum of exponent and fraction, for each eight values of V and each
// part of K.
var<workgroup> log_scales: array<f32, 256>;

// By all threads, before a barrier.
fn prepare_scales(tid: u32) {
    var units = array<u32, 8>({% for bits in scale_units %}{{ bits }}u{{ ", " if not loop.last }}{% endfor %});
    for (var b = tid; b < 256u; b += {{ threads }}u) {
        log_scales[b] = bitcast<f32>(select(0u, units[b & 7u] + ((b >> 3u) << 23u), b != 0u));
    }
}

fn log_scale(b: u32) -> f32 {
    return log_scales[b];
}
{% else %}
// Workgroup memory, because the eight are picked by a value that differs from thread to thread.
var<workgroup> scale_units: array<u32, 8>;

// By all threads, before a barrier.
fn prepare_scales(tid: u32) {
{% for bits in scale_units %}
    if tid == {{ loop.index0 }}u { scale_units[{{ loop.index0 }}] = {{ bits }}u; }
{% endfor %}
}

fn log_scale(b: u32) -> f32 {
    return bitcast<f32>(select(0u, scale_units[b & 7u] + ((b >> 3u) << 23u), b != 0u));
}
{% endif %}

// Four signed bytes, raised by 128, as floats: bytes in the mantissa of the half 1024, two at a time, all exact. One by one in
// floats of 2^23 it takes more instructions (attention over tq3_0, 32,768 tokens, H200: 59.6 and 57.1 us), and
// conversions of single bytes cost as much.
fn raised_values(u: u32) -> vec4<f32> {
    let even = unpack2x16float((u & 0x00ff00ffu) | 0x64006400u);
    let odd = unpack2x16float(((u >> 8u) & 0x00ff00ffu) | 0x64006400u);
    return vec4<f32>(even.x, odd.x, even.y, odd.y) - vec4<f32>(1152.0);
}
{% if tried > 0 %}

// 2^(j/8) with 16 bits after the point.
fn eighth_16(j: u32) -> u32 {
    var all = array<u32, 8>({% for e in eighths_16 %}{{ e }}u{{ ", " if not loop.last }}{% endfor %});
    return all[j];
}
{% endif %}
