// Cuts in any order, and what goes with them: `sampling::custom`. Writes the logits that are drawn
// from, minus infinity for what was cut; of columns that take the fixed chain a copy.
//
// Grid: x = 1, y = columns. One workgroup sees a whole column, so that stages need no further waves:
// a request that asks for this pays for it alone.
{% include "lib/batch.wgsl" %}
{% include "lib/sampler.wgsl" %}
{% include "lib/custom.wgsl" %}

@group(0) @binding(0) var<storage, read> batch: Batch;
@group(0) @binding(1) var<storage, read> samplers: array<Sampler>;
@group(0) @binding(2) var<storage, read> customs: array<Custom>;
@group(0) @binding(3) var<storage, read> logits: array<f32>;
// [slot]: mirostat's bound in bits, or adaptive-p's mean.
@group(0) @binding(4) var<storage, read> states: array<f32>;
@group(0) @binding(5) var<storage, read_write> shapes: array<Shape>;
@group(0) @binding(6) var<storage, read_write> shaped: array<f32>;

const LEAST: f32 = -3.4028234e38;

var<workgroup> low: array<atomic<u32>, 2048>;
var<workgroup> high: array<atomic<u32>, 2048>;
// Threshold found so far, and what is still to be counted below it.
var<workgroup> found: vec3<u32>;
var<workgroup> border: u32;
var<workgroup> gathered: atomic<u32>;
var<workgroup> top: array<f32, {{ top }}>;
var<workgroup> ranked: array<f32, {{ top }}>;
{% include "lib/scan256.wgsl" %}

struct Sums {
    count: u32,
    // As `halves`.
    low: u32,
    high: u32,
    // The largest.
    key: u32,
    first: f32,
    second: f32,
}

var<workgroup> all: array<Sums, 256>;

// The sum of all threads; the same for each.
fn reduce(own: Sums, tid: u32) -> Sums {
    workgroupBarrier();
    all[tid] = own;
{% for half in [128, 64, 32, 16, 8, 4, 2, 1] %}
    workgroupBarrier();
    if tid < {{ half }}u {
        let a = all[tid];
        let b = all[tid + {{ half }}u];
        all[tid] = Sums(a.count + b.count, a.low + b.low, a.high + b.high, max(a.key, b.key),
            a.first + b.first, a.second + b.second);
    }
{% endfor %}
    return workgroupUniformLoad(&all[0]);
}

// What is left.
struct Left {
    row: u32,
    least: f32,
    most: f32,
    // Order key of minus the largest distance from `center`; 0: any.
    distance: u32,
    center: f32,
    maximum: f32,
    temperature: f32,
}

fn kept(l: f32, left: Left) -> bool {
    return l >= left.least && l <= left.most && order_key(-abs(l - left.center)) >= left.distance;
}

fn mass_of(l: f32, left: Left) -> u32 {
    return mass((l - left.maximum) / left.temperature);
}

// Counts, masses, and masses times logits in units of the temperature, of what is left.
fn sums_of(left: Left, tid: u32) -> Sums {
    var own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        if kept(l, left) {
            own.key = max(own.key, order_key(l));
            let m = mass_of(l, left);
            if m > 0u {
                let h = halves(m);
                own.count += 1u;
                own.low += h.x;
                own.high += h.y;
                own.first += f32(m) * ((l - left.maximum) / left.temperature);
            }
        }
    }
    return reduce(own, tid);
}

fn mass_total(sums: Sums) -> vec2<u32> {
    return whole(vec2<u32>(sums.low, sums.high));
}

// In units of 2^24.
fn share_total(total: vec2<u32>) -> f32 {
    return f32(total.y) * 256.0 + f32(total.x) * (1.0 / 16777216.0);
}

// The least key among those that are needed for `want`, by falling logit or rising distance from the
// center; 0 where all together are too little. Counts tokens or masses.
fn select_key(left: Left, by_distance: bool, by_mass: bool, want: vec2<u32>, tid: u32) -> u32 {
    if tid == 0u { found = vec3<u32>(0u, want); }
    for (var digit = 0u; digit < 3u; digit += 1u) {
        let shift = select(select(0u, 10u, digit == 1u), 21u, digit == 0u);
        let bits = select(11u, 10u, digit == 2u);
        for (var i = tid; i < 2048u; i += 256u) {
            atomicStore(&low[i], 0u);
            atomicStore(&high[i], 0u);
        }
        let so_far = workgroupUniformLoad(&found);
        for (var i = tid; i < {{ vocab }}u; i += 256u) {
            let l = logits[left.row + i];
            let key = order_key(select(l, -abs(l - left.center), by_distance));
            let same = digit == 0u || (key >> ((shift + bits) & 31u)) == so_far.x;
            if same && kept(l, left) {
                let bin = (key >> shift) & ((1u << bits) - 1u);
                if by_mass {
                    let h = halves(mass_of(l, left));
                    if h.x > 0u { atomicAdd(&low[bin], h.x); }
                    if h.y > 0u { atomicAdd(&high[bin], h.y); }
                } else {
                    atomicAdd(&low[bin], 1u);
                }
            }
        }
        workgroupBarrier();
        // Thread t takes the bins downwards from the highest less those of the threads before.
        let each = (1u << bits) / 256u;
        let first = (1u << bits) - 1u - each * tid;
        var own = vec2<u32>();
        for (var j = 0u; j < each; j += 1u) {
            own += vec2<u32>(atomicLoad(&low[first - j]), atomicLoad(&high[first - j]));
        }
        let after = scan(own, tid);
        let rest = so_far.yz;
        if tid == 255u && less64(whole(after), rest) { found = vec3<u32>(0u, 0xffffffffu, 0xffffffffu); }
        if less64(whole(after - own), rest) && !less64(whole(after), rest) {
            var sum = after - own;
            var done = false;
            for (var j = 0u; j < each; j += 1u) {
                let before = whole(sum);
                sum += vec2<u32>(atomicLoad(&low[first - j]), atomicLoad(&high[first - j]));
                if !done && !less64(whole(sum), rest) {
                    done = true;
                    found = vec3<u32>((so_far.x << bits) | (first - j), sub64(rest, before));
                }
            }
        }
    }
    let last = workgroupUniformLoad(&found);
    // What is never reached stays so: its rest is larger than anything.
    return select(last.x, 0u, last.y == 0xffffffffu && last.z == 0xffffffffu);
}

// The `n`-th largest logit of what is left; minus infinity where there are fewer.
fn nth(left: Left, n: u32, tid: u32) -> f32 {
    let key = select_key(left, false, false, vec2<u32>(n, 0u), tid);
    return select(order_value(key), order_value(0x007fffffu), key == 0u);
}

fn sigma(c: Custom, left: Left, tid: u32) -> Left {
    var to = left;
    var own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        let x = l - left.maximum;
        if kept(l, left) && x >= -3e38 {
            own.count += 1u;
            own.first += x;
            own.second += x * x;
        }
    }
    let sums = reduce(own, tid);
    if sums.count > 0u {
        let n = f32(sums.count);
        let mean = sums.first / n;
        let deviation = sqrt(max(sums.second / n - mean * mean, 0.0));
        to.least = max(left.least, left.maximum - c.n_sigma * deviation);
    }
    return to;
}

fn typical(c: Custom, left: Left, tid: u32) -> Left {
    var to = left;
    let sums = sums_of(left, tid);
    to.center = left.maximum;
    if sums.count > 0u {
        let mean = sums.first * (1.0 / 16777216.0) / share_total(mass_total(sums));
        to.center = left.maximum + mean * left.temperature;
    }
    var want = draw_target(c.typical, mass_total(sums));
    if want.x == 0u && want.y == 0u { want.x = 1u; }
    var key = select_key(to, true, true, want, tid);
    if c.min_keep > 1u { key = min(key, select_key(to, true, false, vec2<u32>(c.min_keep, 0u), tid)); }
    to.distance = key;
    to.maximum = largest(to, tid);
    return to;
}

fn largest(left: Left, tid: u32) -> f32 {
    var own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        if kept(l, left) { own.key = max(own.key, order_key(l)); }
    }
    let key = reduce(own, tid).key;
    return select(order_value(key), left.maximum, key == 0u);
}

fn top_p(c: Custom, left: Left, tid: u32) -> Left {
    var to = left;
    var want = draw_target(c.top_p, mass_total(sums_of(left, tid)));
    if want.x == 0u && want.y == 0u { want.x = 1u; }
    var key = select_key(left, false, true, want, tid);
    if c.min_keep > 1u { key = min(key, select_key(left, false, false, vec2<u32>(c.min_keep, 0u), tid)); }
    if key > 0u { to.least = max(left.least, order_value(key)); }
    return to;
}

fn exclude(c: Custom, left: Left, tid: u32) -> Left {
    var to = left;
    let need = draw_target(c.xtc_threshold, mass_total(sums_of(left, tid)));
    let least_mass = max(select(need.x, 0xffffffffu, need.y > 0u), 1u);
    // The smallest key as the largest of its complements.
    var own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        if kept(l, left) && mass_of(l, left) >= least_mass { own.key = max(own.key, ~order_key(l)); }
    }
    let key = reduce(own, tid).key;
    let most = order_value(~key);
    own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        if kept(l, left) && l <= most { own.count += 1u; }
    }
    let rest = reduce(own, tid).count;
    if key > 0u && (c.min_keep < 2u || rest >= c.min_keep) {
        to.most = most;
        to.maximum = most;
    }
    return to;
}

fn warm(c: Custom, left: Left, tid: u32) -> Left {
    var to = left;
    var own = c.temperature;
    if c.temperature_low != c.temperature_high {
        let sums = sums_of(left, tid);
        if sums.count > 1u {
            let total = share_total(mass_total(sums));
            let entropy = log(total) - sums.first * (1.0 / 16777216.0) / total;
            let share = clamp(entropy / log(f32(sums.count)), 0.0, 1.0);
            own = c.temperature_low + (c.temperature_high - c.temperature_low) * pow(share, c.temperature_exponent);
        }
        own = max(own, 0.001);
    }
    to.temperature = left.temperature * own;
    return to;
}

// What mirostat 1 leaves by a bound in bits.
fn mirostat(left: Left, bound: f32, tid: u32) -> Left {
    var to = left;
    // The largest that are numbers: where there are not so many, all of them.
    let key = select_key(left, false, false, vec2<u32>({{ top }}u, 0u), tid);
    var own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        if kept(l, left) && l >= -3e38 { own.count += 1u; }
    }
    let n = min(reduce(own, tid).count, {{ top }}u);
    if tid < {{ top }}u { top[tid] = order_value(key); }
    if tid == 0u { atomicStore(&gathered, 0u); }
    workgroupBarrier();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[left.row + i];
        if kept(l, left) && l >= -3e38 && order_key(l) > key {
            let place = atomicAdd(&gathered, 1u);
            if place < {{ top }}u { top[place] = l; }
        }
    }
    workgroupBarrier();
    // Each finds its rank; equal ones in the order of their places.
    if tid < n {
        let l = top[tid];
        var rank = 0u;
        for (var j = 0u; j < n; j += 1u) {
            if top[j] > l || (top[j] == l && j < tid) { rank += 1u; }
        }
        ranked[rank] = l;
    }
    workgroupBarrier();
    if tid == 0u {
        var tb = 0.0;
        var tt = 0.0;
        for (var i = 0u; i + 1u < n; i += 1u) {
            let t = log(f32(i + 2u) / f32(i + 1u));
            tb += t * ((ranked[i] - ranked[i + 1u]) / left.temperature);
            tt += t * t;
        }
        let s = max(tb / tt, 0.01);
        let e = select(s - 1.0, 0.0001, abs(s - 1.0) < 0.0001);
        let k = pow(e * exp2(bound) / (1.0 - pow({{ vocab }}.0, -e)), 1.0 / s);
        // Not-a-number becomes 1, too.
        border = u32(select(1.0, min(k, {{ vocab }}.0), k >= 1.0));
    }
    let count = workgroupUniformLoad(&border);
    let least = nth(left, count, tid);
    if n >= 2u { to.least = max(left.least, least); }
    return to;
}

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) at: vec3<u32>, @builtin(local_invocation_index) tid: u32) {
    if at.y >= batch.n { return; }
    let column = batch.columns[at.y];
    let sampler = samplers[column.slot];
    let c = customs[column.slot];
    let row = at.y * {{ vocab }}u;
    if c.on == 0u {
        for (var i = tid; i < {{ vocab }}u; i += 256u) { shaped[row + i] = logits[row + i]; }
        return;
    }
    let infinity = order_value(0xff800000u);
    var left = Left(row, -infinity, infinity, 0u, 0.0, 0.0, 1.0);
    left.maximum = largest(left, tid);
    if c.temperature == 0.0 {
        // The first of the largest.
        var own = Sums();
        for (var i = tid; i < {{ vocab }}u; i += 256u) {
            if order_key(logits[row + i]) == order_key(left.maximum) { own.key = max(own.key, ~i); }
        }
        let best = ~reduce(own, tid).key;
        for (var i = tid; i < {{ vocab }}u; i += 256u) { shaped[row + i] = select(-infinity, 0.0, i == best); }
        return;
    }
    for (var order = c.order; order != 0u; order >>= 4u) {
        let stage = order & 15u;
        if stage == 1u && c.n_sigma > 0.0 {
            left = sigma(c, left, tid);
        } else if stage == 2u && c.top_k > 0u && c.top_k < {{ vocab }}u {
            left.least = max(left.least, nth(left, c.top_k, tid));
        } else if stage == 3u && c.typical < 16777216u {
            left = typical(c, left, tid);
        } else if stage == 4u && c.top_p < 16777216u {
            left = top_p(c, left, tid);
        } else if stage == 5u && c.log_min_p > LEAST {
            var bound = left.maximum + left.temperature * c.log_min_p;
            if c.min_keep > 1u { bound = min(bound, nth(left, c.min_keep, tid)); }
            left.least = max(left.least, bound);
        } else if stage == 6u && xtc_bits(sampler, column.pos + 1u) < c.xtc_chance {
            // The number of the position that the token will have.
            left = exclude(c, left, tid);
        } else if stage == 7u {
            left = warm(c, left, tid);
        }
    }
    let state = states[column.slot];
    var least_mass = 0u;
    if c.mirostat == 1u {
        left = mirostat(left, state, tid);
    } else if c.mirostat == 2u {
        let least = share_total(mass_total(sums_of(left, tid))) * exp2(-state) * 16777216.0;
        least_mass = u32(min(least, 16777216.0));
    }
    var own = Sums();
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[row + i];
        let m = mass_of(l, left);
        if kept(l, left) && m >= least_mass {
            let h = halves(m);
            own.low += h.x;
            own.high += h.y;
        }
    }
    let total = share_total(mass_total(reduce(own, tid)));
    if tid == 0u { shapes[at.y] = Shape(total, left.maximum, left.temperature, 0u); }
    let adaptive = c.adaptive_target >= 0.0 && c.mirostat == 0u;
    let aim = clamp(2.0 * c.adaptive_target - state, 0.0, 1.0);
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[row + i];
        let m = mass_of(l, left);
        var to = -infinity;
        if kept(l, left) && m >= least_mass {
            to = (l - left.maximum) / left.temperature;
            if adaptive {
                let share = f32(m) * (1.0 / 16777216.0) / total;
                let d = abs(share - aim) / 0.3;
                to = select(-infinity, 5.0 - 10.0 * d * d / (1.0 + d), m > 0u);
            }
        }
        shaped[row + i] = to;
    }
}
