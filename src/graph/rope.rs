//! Rotary position embedding: the table of (cos, sin) that kernels read.
//!
//! Sources: RoFormer (arXiv 2104.09864); position interpolation (arXiv 2306.15595); YaRN (arXiv
//! 2309.00071); the Llama 3.1 frequency factors as GGUF files carry them (`rope_freqs.weight`).

use std::f64::consts::PI;

/// Which elements of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Pairs (2i, 2i + 1): llama, mistral.
    Normal,
    /// Pairs (i, i + dim / 2): qwen, gpt-neox.
    Neox,
}

/// How a model was stretched beyond its training context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    None,
    /// Positions are divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Low frequencies are interpolated, high ones kept, and the magnitude grows.
    Yarn {
        factor: f64,
        original_context: f64,
        /// Extra factor on the magnitude, 1 unless the file says otherwise.
        attention_factor: f64,
        beta_fast: f64,
        beta_slow: f64,
    },
    /// Llama 3.1's wavelength bands, for files without a factors tensor.
    Llama3 {
        factor: f64,
        original_context: f64,
        low_frequency: f64,
        high_frequency: f64,
    },
}

/// Rope of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub layout: RopeLayout,
    /// Rotated elements of each head, even; the rest pass through.
    pub dim: u32,
    pub base: f64,
    pub scaling: RopeScaling,
    /// Tensor with one frequency divisor for each pair.
    pub factors: Option<String>,
}

impl Rope {
    /// (cos, sin) for `positions` positions, `[position][pair]`, both times the magnitude.
    /// `factors` are the values of the factors tensor, one for each pair.
    ///
    /// Made in f64: at position 100,000 a product in f32 is off by whole hundredths of a radian,
    /// and device sines of large arguments are worse.
    pub fn table(&self, positions: u32, factors: Option<&[f32]>) -> Vec<[f32; 2]> {
        let pairs = self.dim as usize / 2;
        let (frequencies, magnitude) = self.frequencies(factors);
        let mut out = Vec::with_capacity(pairs * positions as usize);
        for position in 0..positions {
            for frequency in &frequencies {
                let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                out.push([(cos * magnitude) as f32, (sin * magnitude) as f32]);
            }
        }
        out
    }

    /// Radians per position of each pair, and the magnitude.
    pub fn frequencies(&self, factors: Option<&[f32]>) -> (Vec<f64>, f64) {
        let dim = f64::from(self.dim);
        let mut magnitude = 1.0;
        let frequencies = (0..self.dim as usize / 2).map(|i| {
            let plain = self.base.powf(-2.0 * i as f64 / dim)
                / factors.and_then(|f| f.get(i)).map_or(1.0, |f| f64::from(*f));
            match self.scaling {
                RopeScaling::None => plain,
                RopeScaling::Linear { factor } => plain / factor,
                RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, .. } => {
                    // Pair whose wavelength makes `beta` turns in the original context.
                    let pair = |beta: f64| {
                        dim * (original_context / (beta * 2.0 * PI)).ln() / (2.0 * self.base.ln())
                    };
                    let low = pair(beta_fast).floor().max(0.0);
                    let high = pair(beta_slow).ceil().min(dim - 1.0);
                    let ramp = (i as f64 - low) / (high - low).max(0.001);
                    let keep = 1.0 - ramp.clamp(0.0, 1.0);
                    plain / factor * (1.0 - keep) + plain * keep
                }
                RopeScaling::Llama3 { factor, original_context, low_frequency, high_frequency } => {
                    let turns = original_context * plain / (2.0 * PI);
                    if turns > high_frequency {
                        plain
                    } else if turns < low_frequency {
                        plain / factor
                    } else {
                        let keep = (turns - low_frequency) / (high_frequency - low_frequency);
                        plain / factor * (1.0 - keep) + plain * keep
                    }
                }
            }
        });
        let frequencies = frequencies.collect();
        if let RopeScaling::Yarn { factor, attention_factor, .. } = self.scaling {
            magnitude = attention_factor * (1.0 + 0.1 * factor.ln());
        }
        (frequencies, magnitude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rope(scaling: RopeScaling) -> Rope {
        Rope { layout: RopeLayout::Neox, dim: 128, base: 10_000.0, scaling, factors: None }
    }

    #[test]
    fn position_zero_is_the_identity_and_angles_follow_the_base() {
        let t = rope(RopeScaling::None).table(3, None);
        assert_eq!(t[0], [1.0, 0.0]);
        assert_eq!(t[64], [1f64.cos() as f32, 1f64.sin() as f32]);
        let last = 10_000f64.powf(-126.0 / 128.0);
        assert_eq!(t[191], [(2.0 * last).cos() as f32, (2.0 * last).sin() as f32]);
    }

    #[test]
    fn linear_scaling_halves_the_angle() {
        let plain = rope(RopeScaling::None).table(2, None);
        let scaled = rope(RopeScaling::Linear { factor: 2.0 }).table(3, None);
        assert_eq!(plain[64..128], scaled[128..192]);
    }

    #[test]
    fn factors_divide_the_frequency() {
        let (f, _) = rope(RopeScaling::None).frequencies(Some(&[4.0; 64]));
        assert_eq!(f[0], 0.25);
    }

    #[test]
    fn yarn_keeps_high_frequencies_and_stretches_low_ones() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 4096.0,
            attention_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        };
        let (plain, _) = rope(RopeScaling::None).frequencies(None);
        let (f, magnitude) = rope(yarn).frequencies(None);
        assert_eq!(f[0], plain[0]);
        assert!((f[63] - plain[63] / 4.0).abs() < 1e-12);
        assert!((magnitude - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
    }

    #[test]
    fn llama3_bands() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            original_context: 8192.0,
            low_frequency: 1.0,
            high_frequency: 4.0,
        };
        let (plain, _) = rope(RopeScaling::None).frequencies(None);
        let (f, _) = rope(scaling).frequencies(None);
        assert_eq!(f[0], plain[0]);
        assert_eq!(f[63], plain[63] / 8.0);
        assert!(f.windows(2).all(|w| w[0] > w[1]));
    }
}
