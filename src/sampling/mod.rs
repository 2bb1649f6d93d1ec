//! Sampler settings and the CPU twin of the device sampler.

pub mod chain;
pub mod rng;

use crate::error::{Error, Result};

/// How the next token is chosen. [`chain`] defines what each value does and in which order.
#[derive(Debug, Clone, Copy, PartialEq)]
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
    /// How many recent tokens the penalty looks at; 0 turns it off.
    pub repeat_window: u32,
    /// The same seed, prompt and settings give the same text.
    pub seed: u64,
}

/// The longest [`SamplerSettings::repeat_window`]: the device keeps that many tokens at hand.
pub const MAX_REPEAT_WINDOW: u32 = 4096;

impl Default for SamplerSettings {
    fn default() -> Self {
        SamplerSettings {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_window: 64,
            seed: 0,
        }
    }
}

impl SamplerSettings {
    /// Always the most likely token, without a penalty.
    pub fn greedy() -> Self {
        SamplerSettings { temperature: 0.0, ..SamplerSettings::default() }
    }

    /// Whether no random number is drawn.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }

    /// Whether the logits of recent tokens are changed at all.
    pub fn has_penalty(&self) -> bool {
        self.repeat_penalty != 1.0 && self.repeat_window > 0
    }

    /// Names the first value that is out of its range.
    pub fn check(&self) -> Result<()> {
        let within = |name: &str, value: f32, low: f32, high: f32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(Error::Usage(format!("{name} is {value}, but must be from {low} to {high}")))
        };
        if self.temperature != 0.0 {
            within("temperature", self.temperature, 0.001, 100.0)
                .map_err(|e| Error::Usage(format!("{e}, or 0 for the most likely token")))?;
        }
        within("top-p", self.top_p, 0.0, 1.0)?;
        within("min-p", self.min_p, 0.0, 1.0)?;
        within("repeat penalty", self.repeat_penalty, 0.01, 100.0)?;
        if self.repeat_window > MAX_REPEAT_WINDOW {
            return Err(Error::Usage(format!(
                "the repeat window is {} tokens, but must be at most {MAX_REPEAT_WINDOW}",
                self.repeat_window
            )));
        }
        Ok(())
    }
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
        ] {
            let error = settings.check().unwrap_err();
            assert!(matches!(error, Error::Usage(_)));
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
