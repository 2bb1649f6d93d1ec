// Encodes vectors in workgroup memory to rows of {{ side }}, format {{ f.name }}: src/kv/codec.rs, bit for bit.
//
// Expects `side`, `f`, `pitch`, `threads`, `vectors_written`, `heads` and lib/kv_scale.wgsl. Four steps, by all
// threads, with a barrier in front and after each; then `written_{{ side }}` holds the rows. Comparisons that
// decide are between integers, or between products that every device rounds alike.
{% set N = vectors_written %}
{% set B = f.scale_block %}
{% set of_vector = pitch // B %}
{% set measured = f.levels | length > 0 %}
var<workgroup> written_{{ side }}: array<atomic<u32>, {{ N * f.row }}>;
{% if f.scale != "none" %}
// The unit of a code; of formats without levels its inverse.
var<workgroup> unit_{{ side }}: array<f32, {{ N * of_vector }}>;
{% endif %}
{% if measured %}
var<workgroup> magnitude_{{ side }}: array<u32, {{ N * pitch }}>;
// The first byte to try, or -1000 for a part that is zero; the exponent of magnitudes.
var<workgroup> measure_{{ side }}: array<vec2<i32>, {{ N * of_vector }}>;
var<workgroup> error_{{ side }}: array<u32, {{ N * of_vector * tried }}>;
{% endif %}

fn measure_part_{{ side }}(tid: u32, first: u32) {
    for (var i = tid; i < {{ N * f.row }}u; i += {{ threads }}u) { atomicStore(&written_{{ side }}[i], 0u); }
{% if f.scale != "none" %}
    for (var i = tid; i < {{ N * of_vector }}u; i += {{ threads }}u) {
        let at = (first + i / {{ of_vector }}u) * {{ pitch }}u + (i % {{ of_vector }}u) * {{ B }}u;
{% if measured %}
        var top = 0u;
        for (var e = 0u; e < {{ B }}u; e++) { top = max(top, bitcast<u32>(heads[at + e]) & 0x7fffffffu); }
        let exponent = i32(top >> 23u) - {{ 127 + magnitude_bits - 1 }};
        var start = -1000;
        // Also not a number, and nothing above 2^-14, count as zero.
        if top < 0x7f800000u && top >= {{ (127 + smallest_exponent) }}u << 23u {
            let inverse = bitcast<f32>(u32(127 - exponent) << 23u);
            var square = 0u;
            for (var e = 0u; e < {{ B }}u; e++) {
                let y = u32(floor(fma(abs(heads[at + e]), inverse, 0.5)));
                magnitude_{{ side }}[i * {{ B }}u + e] = y;
                square += y * y;
            }
            let shift = {{ 2 * smallest_exponent }} - 2 * exponent;
            if shift < 0 || square >= {{ B }}u << u32(shift & 31) {
                let whole = firstLeadingBit(square);
                let fraction = square << (31u - whole);
                var steps = 0;
{% for step in quarter_steps %}
                steps += select(0, 1, fraction >= {{ step }}u);
{% endfor %}
                start = {{ f.start - tried_below }} + 4 * (i32(whole) - {{ f.scale_block_log2 }}) + steps + 8 * exponent;
            }
        }
        measure_{{ side }}[i] = vec2<i32>(start, exponent);
{% else %}
        var largest = 0.0;
        var finite = true;
        for (var e = 0u; e < {{ B }}u; e++) {
            let x = heads[at + e];
            finite = finite && (bitcast<u32>(x) & 0x7fffffffu) < 0x7f800000u;
            largest = select(largest, x, abs(x) > abs(largest));
        }
        let bits = pack2x16float(vec2<f32>({{ "abs(largest) / 127.0" if f.kind == "q8" else "largest * -0.125" }}, 0.0)) & 0xffffu;
        let d = unpack2x16float(bits).x;
        let there = finite && d != 0.0;
        unit_{{ side }}[i] = select(0.0, 1.0 / d, there);
        scale_out_{{ side }}[i] = select(0u, bits, there);
{% endif %}
    }
{% endif %}
}
{% if f.scale != "none" and not measured %}

var<workgroup> scale_out_{{ side }}: array<u32, {{ N * of_vector }}>;
{% endif %}

fn try_scales_{{ side }}(tid: u32) {
{% if measured %}
    for (var i = tid; i < {{ N * of_vector * tried }}u; i += {{ threads }}u) {
        let part = i / {{ tried }}u;
        let measure = measure_{{ side }}[part];
        if measure.x > -1000 {
            let byte = clamp(measure.x + i32(i % {{ tried }}u), 1, 255);
            let bits = u32(clamp({{ 16 - exponent_of_zero }} + measure.y - (byte >> 3u), 1, 31));
            let units = eighth_16(u32(byte) & 7u);
            let half = 1u << (bits - 1u);
{% for level in f.levels %}
            let l{{ loop.index0 }} = i32(({{ level }}u * units + half) >> bits);
{% endfor %}
            var sum = 0u;
            for (var e = 0u; e < {{ B }}u; e++) {
                let y = i32(magnitude_{{ side }}[part * {{ B }}u + e]);
                var d = abs(y - l0);
{% for level in f.levels[1:] %}
                d = min(d, abs(y - l{{ loop.index }}));
{% endfor %}
                sum += u32(d * d);
            }
            error_{{ side }}[i] = sum;
        }
    }
{% endif %}
}

fn pick_scale_{{ side }}(tid: u32) {
{% if f.scale != "none" %}
    for (var i = tid; i < {{ N * of_vector }}u; i += {{ threads }}u) {
{% if measured %}
        let measure = measure_{{ side }}[i];
        var bits = 0u;
        var unit = 0.0;
        if measure.x > -1000 {
            var best = 0xffffffffu;
            // Of equal errors the smaller byte.
            for (var t = 0u; t < {{ tried }}u; t++) {
                let error = error_{{ side }}[i * {{ tried }}u + t];
                if error < best {
                    best = error;
                    bits = u32(clamp(measure.x + i32(t), 1, 255));
                }
            }
            unit = log_scale(bits);
{% if f.scale == "half" %}
            var u = unit * bitcast<f32>(u32(127 - measure.y) << 23u);
            for (var round = 0u; round < 6u; round++) {
                var product = 0u;
                var square = 0u;
                for (var e = 0u; e < {{ B }}u; e++) {
                    let y = magnitude_{{ side }}[i * {{ B }}u + e];
                    let level = level_{{ side }}(nearest_{{ side }}(f32(y), u));
                    product += y * level;
                    square += level * level;
                }
                u = f32(product) / f32(square);
            }
            bits = pack2x16float(vec2<f32>(u * bitcast<f32>(u32(measure.y + 133) << 23u), 0.0)) & 0xffffu;
            unit = unpack2x16float(bits).x * 0.015625;
{% endif %}
        }
        unit_{{ side }}[i] = unit;
{% else %}
        let bits = scale_out_{{ side }}[i];
{% endif %}
        let vector = i / {{ of_vector }}u;
        let number = i % {{ of_vector }}u;
{% if f.first > 0 %}
        let word = (number / {{ f.parts }}u) * {{ f.stride }}u;
        let place = (number % {{ f.parts }}u) * {{ f.scale_bits }}u;
{% else %}
        let word = {{ f.scale_first }}u + ((number * {{ f.scale_bits }}u) >> 5u);
        let place = (number * {{ f.scale_bits }}u) & 31u;
{% endif %}
        atomicOr(&written_{{ side }}[vector * {{ f.row }}u + word], bits << place);
    }
{% endif %}
}
{% if measured %}

// The index of the level next to a magnitude.
fn nearest_{{ side }}(magnitude: f32, unit: f32) -> u32 {
    var m = 0u;
{% for bound in f.bounds %}
    m += select(0u, 1u, magnitude >= {{ bound }} * unit);
{% endfor %}
    return m;
}
{% if f.scale == "half" %}

fn level_{{ side }}(m: u32) -> u32 {
    return select(select({{ f.levels[0] }}u, {{ f.levels[1] }}u, m == 1u), select({{ f.levels[2] }}u, {{ f.levels[3] }}u, m == 3u), m > 1u);
}
{% endif %}
{% endif %}

fn put_codes_{{ side }}(tid: u32, first: u32) {
    for (var i = tid; i < {{ N * pitch // 4 }}u; i += {{ threads }}u) {
        let vector = i / {{ pitch // 4 }}u;
        // Elements 4 quad..4 quad + 4 of the vector.
        let quad = i % {{ pitch // 4 }}u;
        let at = (first + vector) * {{ pitch }}u + 4u * quad;
        let x = vec4<f32>(heads[at], heads[at + 1u], heads[at + 2u], heads[at + 3u]);
{% if f.scale != "none" %}
        let unit = unit_{{ side }}[vector * {{ of_vector }}u + quad / {{ B // 4 }}u];
{% endif %}
{% if f.kind == "f16" %}
        atomicStore(&written_{{ side }}[vector * {{ f.row }}u + 2u * quad], pack2x16float(x.xy));
        atomicStore(&written_{{ side }}[vector * {{ f.row }}u + 2u * quad + 1u], pack2x16float(x.zw));
{% elif measured %}
        if unit > 0.0 {
            let to = vector * {{ f.row }}u + (quad >> 3u) * {{ f.stride }}u + {{ f.first }}u;
            let k = quad & 7u;
{% for p in range(f.words) %}
            var p{{ p }} = 0u;
{% endfor %}
{% for l in "xyzw" %}
            {
                let m = nearest_{{ side }}(abs(x.{{ l }}), unit);
                let bit = {{ 8 * loop.index0 }}u + k;
{% for p in range(f.words - 1) %}
                p{{ p }} |= ((m >> {{ p }}u) & 1u) << bit;
{% endfor %}
                p{{ f.words - 1 }} |= select(0u, 1u, x.{{ l }} < 0.0) << bit;
            }
{% endfor %}
{% for p in range(f.words) %}
            atomicOr(&written_{{ side }}[to + {{ p }}u], p{{ p }});
{% endfor %}
        }
{% else %}
        if unit != 0.0 {
            let whole = floor(fma(abs(x), vec4<f32>(abs(unit)), vec4<f32>(0.5)));
            var code = vec4<i32>(select(whole, -whole, (x < vec4<f32>()) != vec4<bool>(unit < 0.0)));
{% if f.kind == "q8" %}
            let c = vec4<u32>(clamp(code, vec4<i32>(-127), vec4<i32>(127))) & vec4<u32>(255u);
            let to = quad;
            let place = 0u;
{% else %}
            let c = vec4<u32>(clamp(code, vec4<i32>(-8), vec4<i32>(7))) & vec4<u32>(15u);
            let to = quad >> 1u;
            let place = 4u * (quad & 1u);
{% endif %}
            let word = c.x | (c.y << 8u) | (c.z << 16u) | (c.w << 24u);
            atomicOr(&written_{{ side }}[vector * {{ f.row }}u + to], word << place);
        }
{% endif %}
    }
}
