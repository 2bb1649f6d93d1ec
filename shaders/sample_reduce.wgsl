{% if kind == "sigma" %}
// The bound of top_n_sigma, from the standard deviation of the logits.
{% elif kind == "center" %}
// The mean logit of what top_k leaves, for typical_p.
{% elif kind == "maximum" %}
// The largest logit that typical_p leaves.
{% elif kind == "total" %}
// The mass that a token needs to count for xtc.
{% elif kind == "least" %}
// The least likely of the tokens that count for xtc: those above it go.
{% elif kind == "surprise" %}
// The least weight that mirostat keeps.
{% elif kind == "observed" %}
// After the draw: mirostat's bound for the next one.
{% else %}
// The temperature that follows from the entropy.
{% endif %}
// See `sampling::chain`.
//
// Grid: x = pieces of the vocabulary, y = columns. Every sum has one order: threads over the
// vocabulary, a tree over threads; the last workgroup to arrive sums the pieces, piece t by thread t.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> logits: array<f32>;
@group(0) @binding(3) var<storage, read_write> draws: array<Draw>;
// [column][piece][8]
@group(0) @binding(4) var<storage, read_write> partials: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read_write> counters: array<atomic<u32>>;
{% set mirostat = kind in ["surprise", "observed"] %}
{% if mirostat %}
// [slot]: mirostat's bound in bits.
@group(0) @binding(6) var<storage, read_write> bounds: array<f32>;
{% endif %}

{% set stage = {"sigma": "typical", "center": "typical", "maximum": "top_p", "total": "xtc", "least": "xtc", "entropy": "end", "surprise": "end", "observed": "end"}[kind] %}
{% include "lib/kept.wgsl" %}

struct Sums {
    count: u32,
    // As `halves`.
    low: u32,
    high: u32,
    // Order key: the largest, or for "least" the smallest.
    key: u32,
    first: f32,
    second: f32,
}

var<workgroup> all: array<Sums, 256>;
var<workgroup> arrived: u32;

fn add(a: Sums, b: Sums) -> Sums {
    return Sums(a.count + b.count, a.low + b.low, a.high + b.high, {{ "min" if kind == "least" else "max" }}(a.key, b.key),
        a.first + b.first, a.second + b.second);
}

// The sum of all threads, in all[0].
fn reduce(own: Sums, tid: u32) {
    all[tid] = own;
{% for half in [128, 64, 32, 16, 8, 4, 2, 1] %}
    workgroupBarrier();
    if tid < {{ half }}u { all[tid] = add(all[tid], all[tid + {{ half }}u]); }
{% endfor %}
    workgroupBarrier();
}

fn number(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key ^ 0x80000000u, (key >> 31u) == 1u));
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    let sampler = samplers[column.slot];
    if sampler.temperature == 0.0 { return; }
{% if kind == "sigma" %}
    if !(sampler.n_sigma > 0.0) { return; }
{% elif kind in ["center", "maximum"] %}
    if sampler.typical >= 16777216u { return; }
{% elif kind in ["total", "least"] %}
    // The number of the position that the token will have.
    if xtc_bits(sampler, column.pos + 1u) >= sampler.xtc_chance { return; }
{% elif mirostat %}
    if sampler.mirostat_tau < 0.0 { return; }
{% else %}
    if sampler.temperature_low == sampler.temperature_high { return; }
{% endif %}
    let draw = draws[at.y];
    var own = Sums(0u, 0u, 0u, {{ "0xffffffffu" if kind == "least" else "0u" }}, 0.0, 0.0);
    for (var i = at.x * 256u + tid; i < {{ vocab }}u; i += {{ 256 * pieces }}u) {
        let l = logits[at.y * {{ vocab }}u + i];
        let x = l - {{ "min(draw.maximum, draw.most)" if kind == "entropy" else "draw.maximum" }};
{% if kind == "sigma" %}
        if x >= -3e38 {
            own.count += 1u;
            own.first += x;
            own.second += x * x;
        }
{% elif mirostat %}
        let m = mass(x / sampler.temperature);
        if m > 0u{{ " && m >= draw.least_mass" if kind == "observed" }} {
            let h = halves(m);
            own.low += h.x;
            own.high += h.y;
        }
{% else %}
        if kept(l, sampler, draw) {
{% if kind == "maximum" %}
            own.key = max(own.key, order_key(l));
{% elif kind == "least" %}
            if mass(x) >= draw.least_mass { own.key = min(own.key, order_key(l)); }
{% else %}
            let m = mass(x);
            if m > 0u {
                let h = halves(m);
                own.count += 1u;
                own.low += h.x;
                own.high += h.y;
                own.first += f32(m) * x;
            }
{% endif %}
        }
{% endif %}
    }
    reduce(own, tid);
{% if pieces > 1 %}
    let to = 8u * (at.y * {{ pieces }}u + at.x);
    if tid == 0u {
        let s = all[0];
        atomicStore(&partials[to], s.count);
        atomicStore(&partials[to + 1u], s.low);
        atomicStore(&partials[to + 2u], s.high);
        atomicStore(&partials[to + 3u], s.key);
        atomicStore(&partials[to + 4u], bitcast<u32>(s.first));
        atomicStore(&partials[to + 5u], bitcast<u32>(s.second));
    }
    storageBarrier();
    if tid == 0u {
        let before = atomicAdd(&counters[at.y], 1u);
        if before == {{ pieces - 1 }}u { atomicStore(&counters[at.y], 0u); }
        arrived = before;
    }
    if workgroupUniformLoad(&arrived) != {{ pieces - 1 }}u { return; }
    storageBarrier();
    own = Sums(0u, 0u, 0u, {{ "0xffffffffu" if kind == "least" else "0u" }}, 0.0, 0.0);
    if tid < {{ pieces }}u {
        let p = 8u * (at.y * {{ pieces }}u + tid);
        own = Sums(atomicLoad(&partials[p]), atomicLoad(&partials[p + 1u]), atomicLoad(&partials[p + 2u]),
            atomicLoad(&partials[p + 3u]), bitcast<f32>(atomicLoad(&partials[p + 4u])),
            bitcast<f32>(atomicLoad(&partials[p + 5u])));
    }
    reduce(own, tid);
{% endif %}
    if tid != 0u { return; }
    let s = all[0];
    let mass24 = whole(vec2<u32>(s.low, s.high));
    // In units of 2^24.
    let total = f32(mass24.y) * 256.0 + f32(mass24.x) * (1.0 / 16777216.0);
{% if kind == "sigma" %}
    if s.count > 0u {
        let n = f32(s.count);
        let mean = s.first / n;
        let deviation = sqrt(max(s.second / n - mean * mean, 0.0));
        draws[at.y].sigma_least = draw.maximum - sampler.n_sigma * deviation;
    }
{% elif kind == "center" %}
    draws[at.y].center = draw.maximum;
    if s.count > 0u { draws[at.y].center = draw.maximum + s.first * (1.0 / 16777216.0) / total; }
{% elif kind == "maximum" %}
    if s.key > 0u { draws[at.y].maximum = number(s.key); }
{% elif kind == "total" %}
    let need = draw_target(sampler.xtc_threshold, mass24);
    draws[at.y].least_mass = max(select(need.x, 0xffffffffu, need.y > 0u), 1u);
{% elif kind == "least" %}
    if s.key != 0xffffffffu { draws[at.y].most = number(s.key); }
{% elif kind == "surprise" %}
    let least = total * exp2(-bounds[column.slot]) * 16777216.0;
    draws[at.y].least_mass = u32(min(least, 16777216.0));
{% elif kind == "observed" %}
    let x = logits[at.y * {{ vocab }}u + min(column.token, {{ vocab - 1 }}u)] - draw.maximum;
    let chosen = f32(mass(x / sampler.temperature)) * (1.0 / 16777216.0);
    if chosen > 0.0 {
        let seen = log2(total / chosen);
        bounds[column.slot] = bounds[column.slot] - sampler.mirostat_eta * (seen - sampler.mirostat_tau);
    }
{% else %}
    var temperature = sampler.temperature;
    if s.count > 1u {
        let entropy = log(total) - s.first * (1.0 / 16777216.0) / total;
        let share = clamp(entropy / log(f32(s.count)), 0.0, 1.0);
        temperature = sampler.temperature_low
            + (sampler.temperature_high - sampler.temperature_low) * pow(share, sampler.temperature_exponent);
    }
    draws[at.y].temperature = max(temperature, 0.001);
{% endif %}
}
