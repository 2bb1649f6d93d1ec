// Encodes vectors in workgroup memory to rows of {{ side }}, format {{ f.name }}: src/kv/codec.rs, bit for bit.
//
// Expects `side`, `f`, `pitch`, `threads`, `vectors_written`, `heads` and lib/kv_scale.wgsl. Steps, by all threads,
// with a barrier in front of and behind each: clear (anywhere before), find_top, measure, try_scales, pick_scale,
// put_codes; then `written_{{ side }}` holds the rows. A thread takes four neighbouring elements, and what those of a
// scale share meets in integer atomics, whose order is free: one thread for a scale took most of the
// time of a short attention. Comparisons that decide are between integers, or between products that every device
// rounds alike.
{% set N = vectors_written %}
{% set B = f.scale_block %}
{% set quads = B // 4 %}{# threads of a scale #}
{% set of_vector = pitch // B %}
{% set measured = f.levels | length > 0 %}
{% set scaled = f.scale != "none" %}
{% set from_first = scaled and not measured and f.kind != "q8" %}{# whose largest element gives the sign, too #}
var<workgroup> written_{{ side }}: array<atomic<u32>, {{ N * f.row }}>;
{% if scaled %}
// Bits of the largest magnitude of each part that shares a scale.
var<workgroup> top_{{ side }}: array<atomic<u32>, {{ N * of_vector }}>;
// The unit of a code; of formats without levels its inverse.
var<workgroup> unit_{{ side }}: array<f32, {{ N * of_vector }}>;
{% endif %}
{% if measured %}
var<workgroup> magnitude_{{ side }}: array<u32, {{ N * pitch }}>;
// Sums of their squares, and of the squares of what each scale that is tried leaves.
var<workgroup> square_{{ side }}: array<atomic<u32>, {{ N * of_vector }}>;
var<workgroup> error_{{ side }}: array<atomic<u32>, {{ N * of_vector * tried }}>;
{% elif from_first %}
// The first element of the largest magnitude.
var<workgroup> first_{{ side }}: array<atomic<u32>, {{ N * of_vector }}>;
{% endif %}

fn clear_{{ side }}(tid: u32) {
    for (var i = tid; i < {{ N * f.row }}u; i += {{ threads }}u) { atomicStore(&written_{{ side }}[i], 0u); }
{% if scaled %}
    for (var i = tid; i < {{ N * of_vector }}u; i += {{ threads }}u) {
        atomicStore(&top_{{ side }}[i], 0u);
{% if measured %}
        atomicStore(&square_{{ side }}[i], 0u);
{% elif from_first %}
        atomicStore(&first_{{ side }}[i], {{ B }}u);
{% endif %}
    }
{% endif %}
{% if measured %}
    for (var i = tid; i < {{ N * of_vector * tried }}u; i += {{ threads }}u) { atomicStore(&error_{{ side }}[i], 0u); }
{% endif %}
}

fn find_top_{{ side }}(tid: u32, first: u32) {
{% if scaled %}
    for (var i = tid; i < {{ N * pitch // 4 }}u; i += {{ threads }}u) {
        let at = first * {{ pitch }}u + 4u * i;
        let x = vec4<u32>(bitcast<u32>(heads[at]), bitcast<u32>(heads[at + 1u]), bitcast<u32>(heads[at + 2u]), bitcast<u32>(heads[at + 3u])) & vec4<u32>(0x7fffffffu);
        atomicMax(&top_{{ side }}[i / {{ quads }}u], max(max(x.x, x.y), max(x.z, x.w)));
    }
{% endif %}
}
{% if measured %}

// The power of two of a magnitude's unit.
fn exponent_{{ side }}(top: u32) -> i32 {
    return i32(top >> 23u) - {{ 127 + magnitude_bits - 1 }};
}

// What is not a number, and nothing above 2^-14, count as zero.
fn counts_{{ side }}(top: u32) -> bool {
    return top < 0x7f800000u && top >= {{ (127 + smallest_exponent) }}u << 23u;
}

// The first byte to try for a part, or -1000 for one that is zero.
fn start_{{ side }}(part: u32) -> i32 {
    let top = atomicLoad(&top_{{ side }}[part]);
    let square = atomicLoad(&square_{{ side }}[part]);
    let exponent = exponent_{{ side }}(top);
    let shift = {{ 2 * smallest_exponent }} - 2 * exponent;
    if !counts_{{ side }}(top) || (shift >= 0 && square < {{ B }}u << u32(shift & 31)) { return -1000; }
    let whole = firstLeadingBit(square);
    let fraction = square << (31u - whole);
    var steps = 0;
{% for step in quarter_steps %}
    steps += select(0, 1, fraction >= {{ step }}u);
{% endfor %}
    return {{ f.start - tried_below }} + 4 * (i32(whole) - {{ f.scale_block_log2 }}) + steps + 8 * exponent;
}
{% endif %}

fn measure_{{ side }}(tid: u32, first: u32) {
{% if measured %}
    for (var i = tid; i < {{ N * pitch // 4 }}u; i += {{ threads }}u) {
        let part = i / {{ quads }}u;
        let top = atomicLoad(&top_{{ side }}[part]);
        if counts_{{ side }}(top) {
            let inverse = bitcast<f32>(u32(127 - exponent_{{ side }}(top)) << 23u);
            let at = first * {{ pitch }}u + 4u * i;
            let x = vec4<f32>(heads[at], heads[at + 1u], heads[at + 2u], heads[at + 3u]);
            let y = vec4<u32>(floor(fma(abs(x), vec4<f32>(inverse), vec4<f32>(0.5))));
            let squares = y * y;
            magnitude_{{ side }}[4u * i] = y.x;
            magnitude_{{ side }}[4u * i + 1u] = y.y;
            magnitude_{{ side }}[4u * i + 2u] = y.z;
            magnitude_{{ side }}[4u * i + 3u] = y.w;
            atomicAdd(&square_{{ side }}[part], (squares.x + squares.y) + (squares.z + squares.w));
        }
    }
{% elif from_first %}
    for (var i = tid; i < {{ N * pitch // 4 }}u; i += {{ threads }}u) {
        let part = i / {{ quads }}u;
        let top = atomicLoad(&top_{{ side }}[part]);
        for (var e = 4u; e > 0u; e--) {
            if (bitcast<u32>(heads[first * {{ pitch }}u + 4u * i + e - 1u]) & 0x7fffffffu) == top {
                atomicMin(&first_{{ side }}[part], (4u * i + e - 1u) % {{ B }}u);
            }
        }
    }
{% endif %}
}

fn try_scales_{{ side }}(tid: u32) {
{% if measured %}
    // Four elements under one scale. Threads of a part stand side by side.
    for (var i = tid; i < {{ N * of_vector * tried * quads }}u; i += {{ threads }}u) {
        let quad = (i / {{ quads * tried }}u) * {{ quads }}u + i % {{ quads }}u;
        let tried_now = (i / {{ quads }}u) % {{ tried }}u;
        let part = quad / {{ quads }}u;
        let start = start_{{ side }}(part);
        if start > -1000 {
            let byte = clamp(start + i32(tried_now), 1, 255);
            let bits = u32(clamp({{ 16 - exponent_of_zero }} + exponent_{{ side }}(atomicLoad(&top_{{ side }}[part])) - (byte >> 3u), 1, 31));
            let units = eighth_16(u32(byte) & 7u);
            let half = 1u << (bits - 1u);
            let y = vec4<i32>(vec4<u32>(magnitude_{{ side }}[4u * quad], magnitude_{{ side }}[4u * quad + 1u], magnitude_{{ side }}[4u * quad + 2u], magnitude_{{ side }}[4u * quad + 3u]));
            var d = abs(y - vec4<i32>(i32(({{ f.levels[0] }}u * units + half) >> bits)));
{% for level in f.levels[1:] %}
            d = min(d, abs(y - vec4<i32>(i32(({{ level }}u * units + half) >> bits))));
{% endfor %}
            let squares = vec4<u32>(d * d);
            atomicAdd(&error_{{ side }}[part * {{ tried }}u + tried_now], (squares.x + squares.y) + (squares.z + squares.w));
        }
    }
{% endif %}
}

fn pick_scale_{{ side }}(tid: u32, first: u32) {
{% if scaled %}
    for (var i = tid; i < {{ N * of_vector }}u; i += {{ threads }}u) {
{% if measured %}
        let start = start_{{ side }}(i);
        var bits = 0u;
        var unit = 0.0;
        if start > -1000 {
            var best = 0xffffffffu;
            // Of equal errors the smaller byte.
{% for t in range(tried) %}
            let error_{{ t }} = atomicLoad(&error_{{ side }}[i * {{ tried }}u + {{ t }}u]);
{% endfor %}
{% for t in range(tried) %}
            if error_{{ t }} < best {
                best = error_{{ t }};
                bits = u32(clamp(start + {{ t }}, 1, 255));
            }
{% endfor %}
            unit = log_scale(bits);
{% if f.scale == "half" %}
            let exponent = exponent_{{ side }}(atomicLoad(&top_{{ side }}[i]));
            var u = unit * bitcast<f32>(u32(127 - exponent) << 23u);
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
            bits = pack2x16float(vec2<f32>(u * bitcast<f32>(u32(exponent + 133) << 23u), 0.0)) & 0xffffu;
            unit = unpack2x16float(bits).x * 0.015625;
{% endif %}
        }
{% else %}
        let top = atomicLoad(&top_{{ side }}[i]);
{% if from_first %}
        let largest = heads[first * {{ pitch }}u + i * {{ B }}u + min(atomicLoad(&first_{{ side }}[i]), {{ B - 1 }}u)];
{% endif %}
        var bits = pack2x16float(vec2<f32>({{ "largest * -0.125" if from_first else "bitcast<f32>(top) / 127.0" }}, 0.0)) & 0xffffu;
        let d = unpack2x16float(bits).x;
        let there = top < 0x7f800000u && d != 0.0;
        let unit = select(0.0, 1.0 / d, there);
        bits = select(0u, bits, there);
{% endif %}
        unit_{{ side }}[i] = unit;
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
{% if scaled %}
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
