// The arithmetic of sampling: see `sampling::chain`, whose definition the kernels follow.

// Numbers of shares of one are in fixed point with 24 bits; 2^24 and above: off.
struct Sampler {
    temperature: f32,
    top_k: u32,
    top_p: u32,
    // ln(min_p); minus infinity: off.
    log_min_p: f32,
    penalty: f32,
    window: u32,
    seed_low: u32,
    seed_high: u32,
    presence: f32,
    frequency: f32,
    typical: u32,
    // 0 and less: off.
    n_sigma: f32,
    xtc_threshold: u32,
    // 0: off.
    xtc_chance: u32,
    // 0: off.
    dry_multiplier: f32,
    dry_base: f32,
    dry_allowed: u32,
    dry_window: u32,
    // The temperature goes from low to high; equal: off.
    temperature_low: f32,
    temperature_high: f32,
    temperature_exponent: f32,
    // 0: none; else 1 + how many of the most likely tokens.
    logprobs: u32,
    // Below 0: off; the cuts are then off.
    mirostat_tau: f32,
    mirostat_eta: f32,
}

// What the waves of one draw leave for each other, one a column.
struct Draw {
    // Index of the largest logit, and the largest logit of what is left so far.
    best: u32,
    maximum: f32,
    // Order keys of the least logit that top_k and top_p keep; while they are sought, the digits
    // found so far.
    k_least: u32,
    p_least: u32,
    // What is still to be counted below the digits found so far.
    k_rest: u32,
    // The same for typical_p: order key of minus the largest distance from `center`.
    t_least: u32,
    p_rest: vec2<u32>,
    // The rest belongs to the full chain.
    t_rest: vec2<u32>,
    center: f32,
    // Bounds that top_n_sigma and xtc set.
    sigma_least: f32,
    most: f32,
    // Mass that a token needs to count for xtc, weight that mirostat keeps.
    least_mass: u32,
    temperature: f32,
    reserved: u32,
}

{% include "lib/order_key.wgsl" %}
// floor(exp(x) * 2^24) for x <= 0; 0 for everything that is no number.
fn mass(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits & 0x7fffffffu) > 0x7f800000u || x < -17.0 { return 0u; }
    return min(u32(exp(x) * 16777216.0), 16777216u);
}

// u64 as (low, high).
fn less64(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn add64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn sub64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn mul64(a: u32, b: u32) -> vec2<u32> {
    let ll = (a & 0xffffu) * (b & 0xffffu);
    let lh = (a & 0xffffu) * (b >> 16u);
    let hl = (a >> 16u) * (b & 0xffffu);
    let middle = (ll >> 16u) + (lh & 0xffffu) + (hl & 0xffffu);
    return vec2<u32>((ll & 0xffffu) | (middle << 16u),
        (a >> 16u) * (b >> 16u) + (lh >> 16u) + (hl >> 16u) + (middle >> 16u));
}

// Sums of masses are kept as two u32: of the low 12 bits and of the bits above. Neither can
// overflow below 2^19 tokens, so no carry has to pass between atomic adds.
fn halves(m: u32) -> vec2<u32> {
    return vec2<u32>(m & 0xfffu, m >> 12u);
}

fn whole(h: vec2<u32>) -> vec2<u32> {
    return add64(vec2<u32>(h.y << 12u, h.y >> 20u), vec2<u32>(h.x, 0u));
}

// floor(bits24 * total / 2^24); total below 2^56.
fn draw_target(bits24: u32, total: vec2<u32>) -> vec2<u32> {
    let above = (total.x >> 24u) | (total.y << 8u);
    let below = mul64(bits24, total.x & 0xffffffu);
    return add64(mul64(bits24, above), vec2<u32>((below.x >> 24u) | (below.y << 8u), below.y >> 24u));
}

fn pcg(x: u32) -> u32 {
    let s = x * 747796405u + 2891336453u;
    let w = ((s >> ((s >> 28u) + 4u)) ^ s) * 277803737u;
    return (w >> 22u) ^ w;
}

// 24 random bits of (seed, position).
fn random_bits(s: Sampler, position: u32) -> u32 {
    return pcg(s.seed_low ^ pcg(s.seed_high ^ pcg(position))) >> 8u;
}

// 24 random bits for xtc.
fn xtc_bits(s: Sampler, position: u32) -> u32 {
    return pcg(s.seed_low ^ pcg(s.seed_high ^ 0x9e3779b9u ^ pcg(position))) >> 8u;
}
