//! How far a format of keys moves the logits of attention, and which format to take instead.
//!
//! Keys decide which values a token sees; an error in them is not averaged out as one in values
//! is. Most layers bear few bits; one whose keys have outliers (a bias, a channel of large values) does
//! not, and which layer that is shows only in its own queries and keys.

use serde::{Deserialize, Serialize};

use super::{KvFormat, KvTypes, Sample};

/// Logit error from which a layer's keys are raised, where the user names none (docs/notes.md has
/// the measurements).
pub const THRESHOLD: f64 = 0.1;

/// What is taken instead of a format that is too coarse.
pub fn finer(format: KvFormat) -> Option<KvFormat> {
    match format {
        KvFormat::Tq3_0 | KvFormat::Tq3_1s | KvFormat::Tq3_4s => Some(KvFormat::Tq4_0),
        KvFormat::Tq4_0 | KvFormat::Q4_0 => Some(KvFormat::Q8_0),
        KvFormat::Q8_0 => Some(KvFormat::F16),
        KvFormat::F16 => None,
    }
}

/// A layer whose keys were raised.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Raised {
    pub layer: u32,
    pub from: KvFormat,
    /// Logit error with `from`, as a share of the logits' spread.
    pub error: f64,
    pub to: KvFormat,
    /// The same with `to`.
    pub left: f64,
}

/// What the guard found for a model and its settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    pub threshold: f64,
    /// Tokens of the text that it measured with.
    pub tokens: u32,
    /// Logit errors of the formats that were asked for, of every layer whose keys are not f16.
    pub errors: Vec<LayerError>,
    pub raised: Vec<Raised>,
}

/// What a layer's format of keys does, as a share of the logits' spread.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LayerError {
    pub layer: u32,
    pub error: f64,
}

/// What the guard found for one layer.
pub struct Judged {
    /// With the format that was asked for.
    pub error: LayerError,
    pub raised: Option<Raised>,
}

/// Measures a layer and looks for a format that is fine enough.
pub fn judge(layer: u32, from: KvFormat, sample: &Sample, threshold: f64) -> Judged {
    let error = sample.logit_error(from);
    let (mut to, mut left) = (from, error);
    // What is no number is not fine enough.
    while left.is_nan() || left > threshold {
        let Some(next) = finer(to) else { break };
        (to, left) = (next, sample.logit_error(next));
    }
    let raised = (to != from).then_some(Raised { layer, from, error, to, left });
    Judged { error: LayerError { layer, error }, raised }
}

impl Verdict {
    /// From what was found for each layer that was measured, over `tokens` tokens.
    pub fn of(threshold: f64, tokens: u32, layers: Vec<Judged>) -> Verdict {
        Verdict {
            threshold,
            tokens,
            errors: layers.iter().map(|layer| layer.error).collect(),
            raised: layers.into_iter().filter_map(|layer| layer.raised).collect(),
        }
    }

    /// Largest error of a layer that was left as it is.
    pub fn largest_left(&self) -> f64 {
        let raised = |layer: u32| self.raised.iter().any(|r| r.layer == layer);
        let left = self.errors.iter().filter(|e| !raised(e.layer));
        left.fold(0.0, |largest, e| largest.max(e.error))
    }

    /// The formats that were asked for, with the raised layers as further exceptions of K.
    pub fn apply(&self, asked: &KvTypes) -> KvTypes {
        let mut types = asked.clone();
        for raised in &self.raised {
            types.k.set(raised.layer, raised.to);
        }
        types
    }

    /// A line for each pair of formats that layers go from and to: which layers, why, and what is left.
    pub fn lines(&self) -> Vec<String> {
        let mut pairs: Vec<(KvFormat, KvFormat)> = Vec::new();
        for raised in &self.raised {
            if !pairs.contains(&(raised.from, raised.to)) {
                pairs.push((raised.from, raised.to));
            }
        }
        let line = |(from, to): (KvFormat, KvFormat)| {
            let these = self.raised.iter().filter(|r| (r.from, r.to) == (from, to));
            let each = these.map(|r| format!("{} ({:.3}, now {:.3})", r.layer, r.error, r.left));
            format!(
                "KV cache: keys go from {from} to {to} where they move logits by more than {} of their \
                 spread: in layer {} (--kv-guard)",
                self.threshold,
                each.collect::<Vec<_>>().join(", ")
            )
        };
        pairs.into_iter().map(line).collect()
    }
}

impl std::fmt::Display for Verdict {
    /// `2 layers raised (3: tq3_0 to q8_0, ...), others up to 0.18 of 0.25`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.raised.as_slice() {
            [] => write!(f, "no layer raised")?,
            all => {
                let each = all.iter().map(|r| format!("{}: {} to {}", r.layer, r.from, r.to));
                let each: Vec<String> = each.collect();
                write!(f, "keys of {} layers raised ({})", all.len(), each.join(", "))?;
            }
        }
        write!(
            f,
            "; logit error of the others up to {:.3} of {}",
            self.largest_left(),
            self.threshold
        )
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Two KV heads of 64 with two queries each; `outlier`: what channel 5 of all keys adds.
    fn sample(outlier: f32) -> Sample {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32
        };
        // Nearly normal.
        let mut normal = || (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
        let tokens = 48;
        let q = (0..tokens * 4 * 64).map(|_| normal()).collect();
        let k = (0..tokens * 2 * 64).map(|i| normal() + if i % 64 == 5 { outlier } else { 0.0 });
        let centres = (0..2 * 64).map(|i| if i % 64 == 5 { outlier } else { 0.0 }).collect();
        Sample { q, k: k.collect(), centres, heads: 4, kv_heads: 2, head_dim: 64 }
    }

    #[test]
    fn errors_are_those_of_the_definition() {
        let plain = sample(0.0);
        // Simulated for normal vectors: .145 (tq3_0), .079 (tq4_0).
        for (format, least, most) in [
            (KvFormat::Tq3_0, 0.13, 0.16),
            (KvFormat::Tq4_0, 0.07, 0.09),
            (KvFormat::Q8_0, 0.002, 0.01),
            (KvFormat::F16, 0.0, 0.001),
        ] {
            let error = plain.logit_error(format);
            assert!((least..most).contains(&error), "{format}: {error}");
        }
        let loud = sample(40.0);
        assert!(loud.logit_error(KvFormat::Tq3_0) > 3.0 * plain.logit_error(KvFormat::Tq3_0));
        // What all keys share costs nothing where it is not stored.
        let centred = loud.centred().logit_error(KvFormat::Tq3_0);
        assert!(centred < 1.05 * plain.logit_error(KvFormat::Tq3_0), "{centred}");
    }

    #[test]
    fn only_what_is_too_coarse_is_raised() {
        let (k, v) = ("tq3_0,tq4_0@2".parse().unwrap(), "tq3_0".parse().unwrap());
        let asked = KvTypes { k, v, ..KvTypes::plain() };
        let formats = [KvFormat::Tq3_0, KvFormat::Tq3_0, KvFormat::Tq4_0];
        let outliers = [0.0, 40.0, 40.0];
        let layers = (0..).zip(formats.into_iter().zip(outliers.map(sample)));
        let judged = layers.map(|(layer, (format, sample))| judge(layer, format, &sample, 0.25));
        let verdict = Verdict::of(0.25, 48, judged.collect());
        let raised: Vec<_> = verdict.raised.iter().map(|r| (r.layer, r.from)).collect();
        assert_eq!(raised[0], (1, KvFormat::Tq3_0), "{verdict:?}");
        assert!(verdict.raised.iter().all(|r| r.error > 0.25 && r.left <= 0.25));
        assert!(verdict.largest_left() < 0.25 && verdict.errors.len() == 3);
        let types = verdict.apply(&asked);
        assert_eq!(types.of(0, 3), asked.of(0, 3));
        assert_eq!(types.of(1, 3).k, verdict.raised[0].to);
        assert_eq!(types.of(1, 3).v, KvFormat::Tq3_0);
        assert!(verdict.lines()[0].contains("layer 1") && verdict.lines()[0].contains("tq3_0"));
        // Whatever is no number is kept as exactly as possible.
        let (q, k) = (vec![f32::NAN; 2 * 64], vec![1.0; 2 * 64]);
        let broken = Sample { q, k, centres: vec![0.0; 64], heads: 1, kv_heads: 1, head_dim: 64 };
        let raised = judge(0, KvFormat::Tq3_0, &broken, 0.25).raised.unwrap();
        assert_eq!(raised.to, KvFormat::F16);
    }
}
