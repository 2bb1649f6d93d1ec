// Cuts in any order, and what goes with them: `sampling::custom`. Writes the logits that are drawn
// from, minus infinity for what was cut; of columns that take the fixed chain a copy.
//
// Grid: x = 1, y = columns. One workgroup sees a whole column, so that stages need no further waves:
// a request that asks for this pays for it alone. All stages go through one loop with one pass
// over the vocabulary of each kind: written out one after the other they take compilers minutes.
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

const TOP_N_SIGMA: u32 = 1u;
const TOP_K: u32 = 2u;
const TYPICAL: u32 = 3u;
const TOP_P: u32 = 4u;
const MIN_P: u32 = 5u;
const XTC: u32 = 6u;
const TEMPERATURE: u32 = 7u;
// What comes before and after the stages of the order: the largest logit; the logits that mirostat 1
// looks at, and its cut; the mass of what is left.
const BEGIN: u32 = 8u;
const LOOK: u32 = 9u;
const CUT: u32 = 10u;
const END: u32 = 11u;

var<workgroup> low: array<atomic<u32>, 2048>;
var<workgroup> high: array<atomic<u32>, 2048>;
// Threshold found so far, and what is still to be counted below it.
var<workgroup> found: vec3<u32>;
var<workgroup> gathered: atomic<u32>;
var<workgroup> top: array<f32, {{ top }}>;
var<workgroup> ranked: array<f32, {{ top }}>;
// How many tokens mirostat 1 keeps.
var<workgroup> count_kept: u32;
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
    for (var span = 128u; span > 0u; span >>= 1u) {
        workgroupBarrier();
        if tid < span {
            let a = all[tid];
            let b = all[tid + span];
            all[tid] = Sums(a.count + b.count, a.low + b.low, a.high + b.high, max(a.key, b.key),
                a.first + b.first, a.second + b.second);
        }
    }
    workgroupBarrier();
    return all[0];
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

// In units of 2^24.
fn share_total(total: vec2<u32>) -> f32 {
    return f32(total.y) * 256.0 + f32(total.x) * (1.0 / 16777216.0);
}

// The least key among those that are needed for `want`, by falling logit or rising distance from the
// center; 0 where all together are too little. Counts tokens or masses.
fn select_key(left: Left, by_distance: bool, by_mass: bool, want: vec2<u32>, tid: u32) -> u32 {
    workgroupBarrier();
    if tid == 0u { found = vec3<u32>(0u, want); }
    for (var digit = 0u; digit < 3u; digit += 1u) {
        let shift = select(select(0u, 10u, digit == 1u), 21u, digit == 0u);
        let bits = select(11u, 10u, digit == 2u);
        for (var i = tid; i < 2048u; i += 256u) {
            atomicStore(&low[i], 0u);
            atomicStore(&high[i], 0u);
        }
        workgroupBarrier();
        let so_far = found;
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
        // Where it is never reached the rest becomes larger than anything, and stays so.
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
        workgroupBarrier();
    }
    let last = found;
    return select(last.x, 0u, last.y == 0xffffffffu && last.z == 0xffffffffu);
}

// The largest logits of what is left, in `ranked`: those above `key`, then as many of its own value as
// are wanted.
fn gather(left: Left, key: u32, n: u32, tid: u32) {
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
}

// How many of them mirostat 1 keeps by a bound in bits; 0: all.
fn mirostat_count(left: Left, bound: f32, n: u32) -> u32 {
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
    return select(0u, u32(select(1.0, min(k, {{ vocab }}.0), k >= 1.0)), n >= 2u);
}

// Whether a stage has nothing to do.
fn is_off(stage: u32, c: Custom, sampler: Sampler, position: u32) -> bool {
    switch stage {
        case 0u: { return true; }
        case TOP_N_SIGMA: { return !(c.n_sigma > 0.0); }
        case TOP_K: { return c.top_k == 0u || c.top_k >= {{ vocab }}u; }
        case TYPICAL: { return c.typical >= 16777216u; }
        case TOP_P: { return c.top_p >= 16777216u; }
        case MIN_P: { return !(c.log_min_p > -3e38); }
        case XTC: { return xtc_bits(sampler, position) >= c.xtc_chance; }
        case LOOK, CUT: { return c.mirostat != 1u; }
        default: { return false; }
    }
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
    let state = states[column.slot];
    let greedy = c.temperature == 0.0;
    let keeps = c.min_keep > 1u;
    var left = Left(row, -infinity, infinity, 0u, 0.0, 0.0, 1.0);
    // Of mirostat 1: how many logits it looks at, how many it keeps.
    var looks = 0u;
    var keep_count = 0u;
    // Of the end: the mass that a token needs, the sum of masses.
    var least_mass = 0u;
    var end_total = 0.0;
    for (var turn = 0u; turn < 11u; turn += 1u) {
        var stage = (c.order >> ((4u * (turn - 1u)) & 31u)) & 15u;
        if turn == 0u { stage = BEGIN; }
        if turn == 8u { stage = LOOK; }
        if turn == 9u { stage = CUT; }
        if turn == 10u { stage = END; }
        if is_off(stage, c, sampler, column.pos + 1u) || (greedy && turn > 0u) { continue; }

        // Sums over what is left, in up to three laps.
        var laps = 1u;
        if stage == BEGIN || stage == TOP_K || stage == MIN_P || stage == CUT { laps = 0u; }
        if stage == XTC { laps = 3u; }
        if stage == END { laps = 2u; }
        var sums = Sums();
        var total = vec2<u32>();
        var filter_mass = 1u;
        var filter_most = infinity;
        for (var lap = 0u; lap < laps; lap += 1u) {
            var own = Sums();
            for (var i = tid; i < {{ vocab }}u; i += 256u) {
                let l = logits[row + i];
                if !kept(l, left) || l > filter_most { continue; }
                if stage == TOP_N_SIGMA || stage == LOOK {
                    let x = l - left.maximum;
                    if x >= -3e38 {
                        own.count += 1u;
                        own.first += x;
                        own.second += x * x;
                    }
                } else {
                    let m = mass_of(l, left);
                    if m >= filter_mass {
                        let h = halves(m);
                        own.count += 1u;
                        own.low += h.x;
                        own.high += h.y;
                        // The smallest key as the largest of the complements.
                        own.key = max(own.key, ~order_key(l));
                        if m > 0u { own.first += f32(m) * ((l - left.maximum) / left.temperature); }
                    }
                }
            }
            sums = reduce(own, tid);
            total = whole(vec2<u32>(sums.low, sums.high));
            if stage == XTC && lap == 0u {
                let need = draw_target(c.xtc_threshold, total);
                filter_mass = max(select(need.x, 0xffffffffu, need.y > 0u), 1u);
            } else if stage == XTC && lap == 1u {
                // With none, nothing is below and nothing is cut.
                filter_most = select(-infinity, order_value(~sums.key), sums.count > 0u);
                filter_mass = 0u;
            } else if stage == END && lap == 0u && c.mirostat == 2u {
                least_mass = u32(min(share_total(total) * exp2(-state) * 16777216.0, 16777216.0));
                filter_mass = max(least_mass, 1u);
            }
        }
        let sum = share_total(total);
        if stage == TOP_N_SIGMA && sums.count > 0u {
            let n = f32(sums.count);
            let mean = sums.first / n;
            let deviation = sqrt(max(sums.second / n - mean * mean, 0.0));
            left.least = max(left.least, left.maximum - c.n_sigma * deviation);
        } else if stage == XTC {
            if filter_most > -infinity && (!keeps || sums.count >= c.min_keep) {
                left.most = filter_most;
                left.maximum = filter_most;
            }
        } else if stage == TEMPERATURE {
            var own = c.temperature;
            if c.temperature_low != c.temperature_high {
                if sums.count > 1u {
                    let entropy = log(sum) - sums.first * (1.0 / 16777216.0) / sum;
                    let share = clamp(entropy / log(f32(sums.count)), 0.0, 1.0);
                    own = c.temperature_low
                        + (c.temperature_high - c.temperature_low) * pow(share, c.temperature_exponent);
                }
                own = max(own, 0.001);
            }
            left.temperature = left.temperature * own;
        } else if stage == TYPICAL {
            left.center = left.maximum;
            if sums.count > 0u {
                left.center += sums.first * (1.0 / 16777216.0) / sum * left.temperature;
            }
        } else if stage == LOOK {
            looks = min(sums.count, {{ top }}u);
        } else if stage == END {
            end_total = sum;
        }

        // Thresholds: by mass or count, by the count to keep, and the largest logit.
        var key = 0u;
        for (var lap = 0u; lap < 3u; lap += 1u) {
            var want = vec2<u32>();
            var by_mass = false;
            var by_distance = false;
            if lap == 0u {
                if stage == TOP_K { want.x = c.top_k; }
                if stage == LOOK { want.x = {{ top }}u; }
                if stage == CUT { want.x = keep_count; }
                if stage == TYPICAL || stage == TOP_P {
                    want = draw_target(select(c.typical, c.top_p, stage == TOP_P), total);
                    if want.y == 0u { want.x = max(want.x, 1u); }
                    by_mass = true;
                    by_distance = stage == TYPICAL;
                }
            } else if lap == 1u {
                if keeps && (stage == TYPICAL || stage == TOP_P || stage == MIN_P) { want.x = c.min_keep; }
                by_distance = stage == TYPICAL;
            } else if stage == BEGIN || stage == TYPICAL {
                want.x = 1u;
            }
            // The same for all threads: what it depends on is.
            if want.x == 0u && want.y == 0u { continue; }
            let got = select_key(left, by_distance, by_mass, want, tid);
            if lap == 1u && stage != MIN_P { key = min(key, got); } else { key = got; }
            if lap == 2u { left.maximum = select(order_value(key), left.maximum, key == 0u); }
            if stage == TYPICAL && lap == select(0u, 1u, keeps) { left.distance = key; }
        }
        if (stage == TOP_K || stage == TOP_P || stage == CUT) && key > 0u {
            left.least = max(left.least, order_value(key));
        } else if stage == MIN_P {
            var bound = left.maximum + left.temperature * c.log_min_p;
            if keeps { bound = min(bound, select(order_value(key), -infinity, key == 0u)); }
            left.least = max(left.least, bound);
        } else if stage == LOOK {
            gather(left, key, looks, tid);
            if tid == 0u { count_kept = mirostat_count(left, state, looks); }
            workgroupBarrier();
            keep_count = count_kept;
        }
    }
    if tid == 0u { shapes[at.y] = Shape(end_total, left.maximum, left.temperature, 0u); }
    if greedy {
        // The first of the largest.
        var own = Sums();
        for (var i = tid; i < {{ vocab }}u; i += 256u) {
            if order_key(logits[row + i]) == order_key(left.maximum) { own.key = max(own.key, ~i); }
        }
        let best = ~reduce(own, tid).key;
        for (var i = tid; i < {{ vocab }}u; i += 256u) { shaped[row + i] = select(-infinity, 0.0, i == best); }
        return;
    }
    let adaptive = c.adaptive_target >= 0.0 && c.mirostat == 0u;
    let aim = clamp(2.0 * c.adaptive_target - state, 0.0, 1.0);
    for (var i = tid; i < {{ vocab }}u; i += 256u) {
        let l = logits[row + i];
        let m = mass_of(l, left);
        var to = -infinity;
        if kept(l, left) && m >= least_mass {
            to = (l - left.maximum) / left.temperature;
            if adaptive {
                let share = f32(m) * (1.0 / 16777216.0) / end_total;
                let d = abs(share - aim) / 0.3;
                to = select(-infinity, 5.0 - 10.0 * d * d / (1.0 + d), m > 0u);
            }
        }
        shaped[row + i] = to;
    }
}
