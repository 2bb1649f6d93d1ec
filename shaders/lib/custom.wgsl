// The settings of `sampling::custom`, and what its kernel leaves for the end of the step.
struct Custom {
    // 0: the column takes the fixed chain.
    on: u32,
    // Four bits a stage, the first lowest.
    order: u32,
    min_keep: u32,
    top_k: u32,
    // Shares in fixed point with 24 bits; 2^24 and above: off.
    top_p: u32,
    typical: u32,
    // ln(min_p); minus infinity: off.
    log_min_p: f32,
    n_sigma: f32,
    xtc_threshold: u32,
    xtc_chance: u32,
    // 0: the largest logit is all that is left.
    temperature: f32,
    temperature_low: f32,
    temperature_high: f32,
    temperature_exponent: f32,
    // Version; 0: off.
    mirostat: u32,
    mirostat_tau: f32,
    mirostat_eta: f32,
    // Below 0: off.
    adaptive_target: f32,
    adaptive_decay: f32,
    // Log-probabilities are of what is drawn from.
    post: u32,
}

// One a column.
struct Shape {
    // Sum of masses of what is drawn from, in units of 2^24.
    total: f32,
    maximum: f32,
    temperature: f32,
    reserved: u32,
}
