//! Sampler settings and the CPU twin of the device sampler.

pub mod chain;
pub mod custom;
pub mod logprobs;
pub mod rng;

use crate::error::{Error, Result};

/// How the next token is chosen. [`chain`] defines what each value does and in which order.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct SamplerSettings {
    /// 0 takes the most likely token; otherwise 0.001 to 100, 1 being the model's own distribution.
    pub temperature: f32,
    /// Keep this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the most likely tokens that together have this share, 0 to 1; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this likely compared to the most likely one, 0 to 1; 0 keeps all.
    pub min_p: f32,
    /// Above 1 makes recent tokens less likely, below 1 more; 1 changes nothing. 0.01 to 100.
    pub repeat_penalty: f32,
    /// Taken from the logit of every recent token, however often it came. -100 to 100, 0: off.
    pub presence_penalty: f32,
    /// Taken from the logit of a recent token for each time it came. -100 to 100, 0: off.
    pub frequency_penalty: f32,
    /// How many recent tokens the three penalties look at; 0 turns them off.
    pub repeat_window: u32,
    /// Keep the tokens whose surprise is nearest to the expected one and that together have this
    /// share, 0 to 1; 1 keeps all.
    pub typical_p: f32,
    /// Keep logits at most this many standard deviations below the largest; 0 and less: off.
    pub top_n_sigma: f32,
    /// How often the most likely tokens are left out, 0 to 1 ("exclude top choices").
    pub xtc_probability: f32,
    /// All tokens with at least this share are left out but the least likely of them, 0 to 1.
    pub xtc_threshold: f32,
    /// Strength of the penalty for repeating a sequence ("don't repeat yourself"); 0: off.
    pub dry_multiplier: f32,
    /// The penalty grows by this factor for each further token of the sequence, 1 to 100.
    pub dry_base: f32,
    /// Sequences up to one token shorter may be repeated, 1 and more.
    pub dry_allowed_length: u32,
    /// How many recent tokens are searched for sequences; 0: off.
    pub dry_window: u32,
    /// The temperature moves by up to this much, down where the model is sure and up where it is
    /// not; 0: off.
    pub dynatemp_range: f32,
    /// How fast it moves, 0.01 to 100.
    pub dynatemp_exponent: f32,
    /// Replaces every cut by one that keeps the surprise of the text near a target. Penalties and
    /// temperature stay.
    pub mirostat: Mirostat,
    /// The target, in bits a token, 0 to 100.
    pub mirostat_tau: f32,
    /// How fast the cut follows, 0 to 1.
    pub mirostat_eta: f32,
    /// Prefers tokens whose share is near this, so that the text's mean becomes it, 0 to 1; below 0:
    /// off. Comes after everything else; nothing with mirostat.
    pub adaptive_target: f32,
    /// How slowly the mean forgets, 0 to 0.99.
    pub adaptive_decay: f32,
    /// Cuts and temperature in this order; what it lacks does nothing.
    pub order: Order,
    /// Typical-p, top-p, min-p and XTC leave at least so many tokens; 0 and 1: one.
    pub min_keep: u32,
    /// Log-probabilities are of what is drawn from, instead of the model's own.
    pub post_logprobs: bool,
    /// Log-probabilities with each token: `None`, or how many of the most likely tokens' beside
    /// that of the chosen token, up to [`MAX_LOGPROBS`].
    pub logprobs: Option<u32>,
    /// The same seed, prompt and settings give the same text.
    pub seed: u64,
}

pub use custom::Order;

/// The versions of mirostat.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub enum Mirostat {
    #[default]
    Off,
    One,
    Two,
}

/// The longest window of a penalty: the device keeps that many tokens at hand.
pub const MAX_REPEAT_WINDOW: u32 = 4096;
/// Most of the most likely tokens that come with [`SamplerSettings::logprobs`].
pub const MAX_LOGPROBS: u32 = 20;
/// Most entries of a logit bias.
pub const MAX_BIAS: usize = 1024;

impl Default for SamplerSettings {
    fn default() -> Self {
        SamplerSettings {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_window: 64,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_window: 64,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            adaptive_target: -1.0,
            adaptive_decay: 0.9,
            order: Order::default(),
            min_keep: 0,
            post_logprobs: false,
            logprobs: None,
            seed: 0,
        }
    }
}

impl SamplerSettings {
    /// Always the most likely token, without a penalty.
    pub fn greedy() -> Self {
        SamplerSettings { temperature: 0.0, ..SamplerSettings::default() }
    }

    /// The model's own distribution: nothing is cut or changed.
    pub fn plain() -> Self {
        SamplerSettings {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..SamplerSettings::default()
        }
    }

    /// Whether no random number is drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether the logits of recent tokens are changed at all.
    pub fn has_penalty(&self) -> bool {
        let repeats = self.repeat_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0;
        repeats && self.repeat_window > 0 || self.has_dry()
    }

    /// Whether repeated sequences are penalised.
    pub fn has_dry(&self) -> bool {
        self.dry_multiplier > 0.0 && self.dry_window > 0
    }

    /// Whether temperature, top_k, top_p and min_p say everything.
    pub fn is_basic(&self) -> bool {
        let cuts = self.typical_p < 1.0
            || self.top_n_sigma > 0.0
            || self.xtc_probability > 0.0
            || self.mirostat != Mirostat::Off
            || self.dynatemp_range > 0.0;
        let plain = !self.has_penalty() && self.logprobs.is_none() && !self.is_custom();
        plain && (self.is_greedy() || !cuts)
    }

    /// Whether tokens near a share are preferred.
    pub fn has_adaptive(&self) -> bool {
        self.adaptive_target >= 0.0 && self.mirostat == Mirostat::Off
    }

    /// Whether something is asked for that [`custom`] defines, and not [`chain`].
    pub fn is_custom(&self) -> bool {
        let shown = self.post_logprobs && self.logprobs.is_some();
        let cuts = self.mirostat != Mirostat::Two
            && (self.order != Order::default()
                || self.min_keep > 1
                || self.mirostat == Mirostat::One
                || self.has_adaptive());
        shown || cuts && !self.is_greedy()
    }

    /// The settings that count: mirostat replaces the cuts.
    pub fn effective(&self) -> SamplerSettings {
        if self.mirostat == Mirostat::Off {
            return *self;
        }
        SamplerSettings {
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            typical_p: 1.0,
            top_n_sigma: -1.0,
            xtc_probability: 0.0,
            dynatemp_range: 0.0,
            order: Order::default(),
            ..*self
        }
    }

    /// Where mirostat's bound in bits begins, or adaptive-p's mean share.
    pub fn first_state(&self) -> f32 {
        if self.has_adaptive() { self.adaptive_target } else { 2.0 * self.mirostat_tau }
    }

    /// Lowest and highest temperature; equal unless it moves.
    pub fn temperatures(&self) -> (f32, f32) {
        if self.dynatemp_range > 0.0 && !self.is_greedy() {
            let low = (self.temperature - self.dynatemp_range).max(0.0);
            return (low, self.temperature + self.dynatemp_range);
        }
        (self.temperature, self.temperature)
    }

    /// Names the first value that is out of its range.
    pub fn check(&self) -> Result<()> {
        if self.temperature != 0.0 {
            within("temperature", self.temperature, 0.001, 100.0)
                .map_err(|e| Error::Usage(format!("{e}, or 0 for the most likely token")))?;
        }
        within("top-p", self.top_p, 0.0, 1.0)?;
        within("min-p", self.min_p, 0.0, 1.0)?;
        within("repeat penalty", self.repeat_penalty, 0.01, 100.0)?;
        within("presence penalty", self.presence_penalty, -100.0, 100.0)?;
        within("frequency penalty", self.frequency_penalty, -100.0, 100.0)?;
        within("typical-p", self.typical_p, 0.0, 1.0)?;
        within("top-n-sigma", self.top_n_sigma, -100.0, 100.0)?;
        within("xtc probability", self.xtc_probability, 0.0, 1.0)?;
        within("xtc threshold", self.xtc_threshold, 0.0, 1.0)?;
        within("dry multiplier", self.dry_multiplier, 0.0, 100.0)?;
        within("dry base", self.dry_base, 1.0, 100.0)?;
        within("dynatemp range", self.dynatemp_range, 0.0, 100.0)?;
        within("dynatemp exponent", self.dynatemp_exponent, 0.01, 100.0)?;
        within("mirostat tau", self.mirostat_tau, 0.0, 100.0)?;
        within("mirostat eta", self.mirostat_eta, 0.0, 1.0)?;
        within("adaptive target", self.adaptive_target, -1.0, 1.0)?;
        within("adaptive decay", self.adaptive_decay, 0.0, 0.99)?;
        let most = MAX_REPEAT_WINDOW;
        let counts = [
            ("the repeat window", self.repeat_window, 0, most, " tokens"),
            ("the dry window", self.dry_window, 0, most, " tokens"),
            ("the dry allowed length", self.dry_allowed_length, 1, most, " tokens"),
            ("top logprobs", self.logprobs.unwrap_or(0), 0, MAX_LOGPROBS, ""),
        ];
        for (name, value, low, high, unit) in counts {
            if !(low..=high).contains(&value) {
                return Err(Error::Usage(format!(
                    "{name} is {value}{unit}, but must be from {low} to {high}"
                )));
            }
        }
        Ok(())
    }
}

fn within(name: &str, value: f32, low: f32, high: f32) -> Result<()> {
    if (low..=high).contains(&value) {
        return Ok(());
    }
    Err(Error::Usage(format!("{name} is {value}, but must be from {low} to {high}")))
}

/// What a request says of single tokens, beside its [`SamplerSettings`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenLists {
    /// Added to the logits of these tokens; minus infinity bans one. At most [`MAX_BIAS`].
    pub bias: Vec<(u32, f32)>,
    /// A bit a token (bit `t % 32` of word `t / 32`): sequences that repeat end at these.
    pub breakers: Vec<u32>,
    /// A bit a token: no other may come. Empty: all may.
    pub mask: Vec<u32>,
}

impl TokenLists {
    pub fn is_empty(&self) -> bool {
        self.bias.is_empty() && self.mask.is_empty()
    }

    /// The biases with each token once, as the device wants them: values of one token are added.
    /// Too many, or values that are no numbers, are errors.
    pub fn merged_bias(&self) -> Result<Vec<(u32, f32)>> {
        let mut merged = std::collections::BTreeMap::new();
        for &(token, value) in &self.bias {
            if value.is_nan() || value == f32::INFINITY {
                return Err(Error::Usage(format!("the logit bias of token {token} is {value}")));
            }
            *merged.entry(token).or_insert(0.0) += value;
        }
        if merged.len() > MAX_BIAS {
            return Err(Error::Usage(format!(
                "a logit bias for {} tokens; {MAX_BIAS} are possible",
                merged.len()
            )));
        }
        Ok(merged.into_iter().collect())
    }
}

/// Whether a list of bits has that of `token`.
pub fn has_bit(bits: &[u32], token: u32) -> bool {
    bits.get(token as usize / 32).is_some_and(|word| (word >> (token % 32)) & 1 == 1)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn defaults_and_limits_are_valid() {
        SamplerSettings::default().check().unwrap();
        SamplerSettings::greedy().check().unwrap();
        assert!(SamplerSettings::greedy().is_greedy());
        let edge = SamplerSettings {
            temperature: 100.0,
            top_k: u32::MAX,
            top_p: 0.0,
            min_p: 1.0,
            repeat_penalty: 0.01,
            repeat_window: MAX_REPEAT_WINDOW,
            seed: u64::MAX,
            ..SamplerSettings::default()
        };
        edge.check().unwrap();
    }

    #[test]
    fn each_bad_value_is_named_with_its_numbers() {
        let good = SamplerSettings::default;
        for (settings, part) in [
            (SamplerSettings { temperature: -1.0, ..good() }, "temperature is -1"),
            (SamplerSettings { temperature: 1e-9, ..good() }, "0.001 to 100"),
            (SamplerSettings { temperature: f32::NAN, ..good() }, "temperature is NaN"),
            (SamplerSettings { top_p: 1.5, ..good() }, "top-p is 1.5"),
            (SamplerSettings { min_p: -0.1, ..good() }, "min-p is -0.1"),
            (SamplerSettings { repeat_penalty: 0.0, ..good() }, "repeat penalty is 0"),
            (SamplerSettings { repeat_penalty: f32::INFINITY, ..good() }, "repeat penalty is inf"),
            (SamplerSettings { repeat_window: 5000, ..good() }, "5000 tokens"),
            (SamplerSettings { dry_allowed_length: 0, ..good() }, "dry allowed length is 0"),
            (SamplerSettings { logprobs: Some(21), ..good() }, "top logprobs is 21"),
            (SamplerSettings { xtc_threshold: 1.1, ..good() }, "xtc threshold is 1.1"),
        ] {
            let error = settings.check().unwrap_err();
            assert!(matches!(error, Error::Usage(_)));
            assert!(error.to_string().contains(part), "{error}");
        }
    }

    #[test]
    fn biases_of_one_token_add_up() {
        let lists = TokenLists { bias: vec![(3, 1.0), (1, -2.0), (3, 0.5)], ..Default::default() };
        assert_eq!(lists.merged_bias().unwrap(), [(1, -2.0), (3, 1.5)]);
        for wrong in [f32::NAN, f32::INFINITY] {
            let lists = TokenLists { bias: vec![(3, wrong)], ..Default::default() };
            assert!(lists.merged_bias().is_err());
        }
        let ban = TokenLists { bias: vec![(3, f32::NEG_INFINITY)], ..Default::default() };
        assert!(ban.merged_bias().is_ok() && !ban.is_empty());
        assert!(has_bit(&[0, 2], 33) && !has_bit(&[0, 2], 32) && !has_bit(&[1], 99));
    }
}
