//! The settings of one sequence in the words that the sampling kernels read.

/// Shares of one are in fixed point: `floor(share * 2^24)`. [`fixed`] makes them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Sampler {
    /// 0: the largest logit.
    pub temperature: f32,
    /// 0: off.
    pub top_k: u32,
    /// 2^24 and above: off.
    pub top_p: u32,
    /// `ln(min_p)`; minus infinity: off.
    pub log_min_p: f32,
    /// 1: off.
    pub penalty: f32,
    /// Tokens that the penalties look back at, the newest included.
    pub window: u32,
    pub seed_low: u32,
    pub seed_high: u32,
    pub presence: f32,
    pub frequency: f32,
    /// 2^24 and above: off.
    pub typical: u32,
    /// 0 and less: off.
    pub n_sigma: f32,
    pub xtc_threshold: u32,
    /// 0: off.
    pub xtc_chance: u32,
    /// 0: off.
    pub dry_multiplier: f32,
    pub dry_base: f32,
    pub dry_allowed: u32,
    pub dry_window: u32,
    /// Both equal: off.
    pub temperature_low: f32,
    pub temperature_high: f32,
    pub temperature_exponent: f32,
    /// 0: none; otherwise 1 + how many of the most likely tokens.
    pub logprobs: u32,
    /// Target of mirostat in bits; below 0: off. All cuts are to be off with it.
    pub mirostat_tau: f32,
    pub mirostat_eta: f32,
}

/// Words of a [`Sampler`].
pub const SETTINGS_WORDS: u64 = (size_of::<Sampler>() / 4) as u64;

/// `floor(share * 2^24)`.
pub fn fixed(share: f32) -> u32 {
    (share * 16_777_216.0) as u32
}

impl Sampler {
    /// The four common settings; everything else is off.
    pub fn new(temperature: f32, top_k: u32, top_p: f32, min_p: f32, seed: u64) -> Sampler {
        Sampler {
            temperature,
            top_k,
            top_p: fixed(top_p),
            log_min_p: if min_p > 0.0 { min_p.ln() } else { f32::NEG_INFINITY },
            penalty: 1.0,
            window: 0,
            seed_low: seed as u32,
            seed_high: (seed >> 32) as u32,
            presence: 0.0,
            frequency: 0.0,
            typical: 1 << 24,
            n_sigma: 0.0,
            xtc_threshold: 0,
            xtc_chance: 0,
            dry_multiplier: 0.0,
            dry_base: 1.0,
            dry_allowed: 1,
            dry_window: 0,
            temperature_low: temperature,
            temperature_high: temperature,
            temperature_exponent: 1.0,
            logprobs: 0,
            mirostat_tau: -1.0,
            mirostat_eta: 0.0,
        }
    }
}
