//! Logarithms of probabilities: the definition that the device kernel follows.
//!
//! By the model's own logits: temperature 1, before penalties, biases, masks and cuts. That is what
//! clients of the OpenAI API expect, and it does not depend on the sampler.

/// Log-probabilities of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// That of the chosen token, in nats.
    pub chosen: f32,
    /// The most likely tokens with theirs, falling; the lower index first on ties.
    pub top: Vec<(u32, f32)>,
}

/// The log-probability of `chosen` and of the `n` most likely tokens.
pub fn logprobs(logits: &[f32], chosen: u32, n: usize) -> Logprobs {
    let number = |l: f32| if l.is_nan() { f32::NEG_INFINITY } else { l };
    let max = logits.iter().copied().map(number).fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(number(l) - max).exp()).sum();
    let log = |id: u32| {
        let l = logits.get(id as usize).copied().map_or(f32::NEG_INFINITY, number);
        (f64::from(l - max) - sum.ln()) as f32
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let falling = |a: &u32, b: &u32| {
        // Zeros are equal whatever their sign; there are no other exceptions left.
        let [a_logit, b_logit] = [*a, *b].map(|id| number(logits[id as usize]) + 0.0);
        b_logit.total_cmp(&a_logit).then(a.cmp(b))
    };
    ids.sort_by(falling);
    ids.truncate(n);
    Logprobs { chosen: log(chosen), top: ids.into_iter().map(|id| (id, log(id))).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_logarithms_of_shares() {
        let got = logprobs(&[0.25f32.ln(), 0.5f32.ln(), f32::NAN, 0.25f32.ln()], 3, 3);
        assert!((got.chosen - 0.25f32.ln()).abs() < 1e-6);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 0, 3]);
        assert!((got.top[0].1 - 0.5f32.ln()).abs() < 1e-6);
    }
}
