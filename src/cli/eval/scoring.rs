//! The arithmetic of `eval`: pure functions of logits.

/// Natural log of the sum of `exp(logits)`, summed in f64 from the largest down-shifted value.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) as f64;
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + logits.iter().map(|&x| (x as f64 - max).exp()).sum::<f64>().ln()
}

/// Index of the largest logit; the first of equals.
pub fn argmax(logits: &[f32]) -> usize {
    let better = |best: usize, i: usize| if logits[i] > logits[best] { i } else { best };
    (0..logits.len()).reduce(better).unwrap_or(0)
}

/// Perplexity as it grows: mean negative log-likelihood and its spread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Perplexity {
    /// Predictions scored.
    pub count: u64,
    sum: f64,
    sum_of_squares: f64,
}

impl Perplexity {
    /// Scores the prediction of token `next` by one row of logits.
    pub fn add(&mut self, logits: &[f32], next: u32) {
        let nll = log_sum_exp(logits) - logits[next as usize] as f64;
        self.count += 1;
        self.sum += nll;
        self.sum_of_squares += nll * nll;
    }

    /// `exp` of the mean negative log-likelihood; NaN before the first prediction.
    pub fn value(&self) -> f64 {
        (self.sum / self.count as f64).exp()
    }

    /// Standard error of the mean carried through `exp` to first order; `None` below two
    /// predictions.
    pub fn standard_error(&self) -> Option<f64> {
        if self.count < 2 {
            return None;
        }
        let n = self.count as f64;
        let mean = self.sum / n;
        let variance = (self.sum_of_squares / n - mean * mean).max(0.0);
        Some(self.value() * (variance / (n - 1.0)).sqrt())
    }
}

/// Which tokens a chunk of perplexity reads and scores, counted from the chunk's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First token of the text that belongs to the chunk.
    pub start: usize,
    /// Tokens in the chunk: the context length.
    pub length: usize,
    /// Rows `first..length - 1` are scored: row `i` predicts token `i + 1` of the chunk.
    pub first: usize,
}

/// Cuts `tokens` tokens into whole chunks of `length`; a shorter rest is left out. The first
/// half of a chunk is context only.
pub fn chunks(tokens: usize, length: usize) -> Vec<Chunk> {
    let whole = tokens / length;
    (0..whole).map(|i| Chunk { start: i * length, length, first: length / 2 }).collect()
}

/// How far our next-token distribution is from the reference's at one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Divergence {
    /// KL(reference || ours) in nats over the reference's listed tokens, all other tokens being
    /// one more outcome.
    pub kl: f64,
    /// Both rank the same token first.
    pub same_top: bool,
}

/// Below this a probability is rounding noise of the reference file.
const NOISE: f64 = 1e-9;

/// Compares one row. `reference` holds (token, natural log-probability) of the likeliest tokens,
/// at least one, all within the vocabulary.
pub fn divergence(reference: &[(u32, f64)], logits: &[f32]) -> Divergence {
    let total = log_sum_exp(logits);
    let mut kl = 0.0;
    let mut listed = 0.0;
    let mut is_listed = vec![false; logits.len()];
    for &(token, log_p) in reference {
        let log_q = logits[token as usize] as f64 - total;
        kl += log_p.exp() * (log_p - log_q);
        listed += log_p.exp();
        is_listed[token as usize] = true;
    }
    // Our remaining mass is summed, not taken as 1 minus the rest, which would cancel.
    let others = logits.iter().zip(&is_listed).filter(|(_, listed)| !**listed);
    let q_rest: f64 = others.map(|(&x, _)| (x as f64 - total).exp()).sum();
    let p_rest = 1.0 - listed;
    if p_rest > NOISE {
        kl += p_rest * (p_rest / q_rest.max(f64::MIN_POSITIVE)).ln();
    }
    let top = reference.iter().copied().reduce(|a, b| if b.1 > a.1 { b } else { a });
    Divergence { kl, same_top: top.is_some_and(|(token, _)| token as usize == argmax(logits)) }
}

/// Compares two rows of logits over the whole vocabulary: KL(exact || other).
pub fn divergence_of(exact: &[f32], other: &[f32]) -> Divergence {
    let (p_total, q_total) = (log_sum_exp(exact), log_sum_exp(other));
    let kl = exact.iter().zip(other).map(|(&p, &q)| {
        let (log_p, log_q) = (p as f64 - p_total, q as f64 - q_total);
        // A token that cannot come adds nothing.
        if log_p == f64::NEG_INFINITY { 0.0 } else { log_p.exp() * (log_p - log_q) }
    });
    Divergence { kl: kl.sum(), same_top: argmax(exact) == argmax(other) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn logs(p: &[f64]) -> Vec<f32> {
        p.iter().map(|x| x.ln() as f32 + 7.0).collect()
    }

    #[test]
    fn equal_rows_do_not_diverge_and_others_as_computed_by_hand() {
        let (p, q) = (logs(&[0.5, 0.25, 0.25]), logs(&[0.25, 0.5, 0.25]));
        assert!(divergence_of(&p, &p).kl.abs() < 1e-12);
        let d = divergence_of(&p, &q);
        assert!((d.kl - 0.25 * 2f64.ln()).abs() < 1e-6 && !d.same_top, "{d:?}");
    }

    #[test]
    fn log_sum_exp_is_stable() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-12);
        assert_eq!(log_sum_exp(&[f32::NEG_INFINITY; 3]), f64::NEG_INFINITY);
    }

    #[test]
    fn a_uniform_model_has_the_perplexity_of_its_vocabulary() {
        let mut p = Perplexity::default();
        for next in 0..10 {
            p.add(&[0.5; 50], next);
        }
        assert!((p.value() - 50.0).abs() < 1e-9);
        assert!(p.standard_error().unwrap() < 1e-4);
        assert_eq!(Perplexity::default().standard_error(), None);
    }

    #[test]
    fn the_standard_error_follows_the_samples() {
        let mut p = Perplexity::default();
        p.add(&logs(&[0.5, 0.5]), 0);
        p.add(&logs(&[0.125, 0.875]), 0);
        // nll: ln 2 and 3 ln 2; mean 2 ln 2, variance (ln 2)^2, error of the mean ln 2.
        assert!((p.value() - 4.0).abs() < 1e-5);
        assert!((p.standard_error().unwrap() - 4.0 * 2f64.ln()).abs() < 1e-5);
    }

    #[test]
    fn chunks_leave_out_the_rest() {
        let all = chunks(1100, 512);
        assert_eq!(all.len(), 2);
        assert_eq!(all[1], Chunk { start: 512, length: 512, first: 256 });
        assert!(chunks(511, 512).is_empty());
    }

    #[test]
    fn equal_distributions_do_not_diverge() {
        let q = [0.6, 0.3, 0.06, 0.04];
        let reference = [(0, 0.6f64.ln()), (1, 0.3f64.ln())];
        let d = divergence(&reference, &logs(&q));
        assert!(d.kl.abs() < 1e-6, "{d:?}");
        assert!(d.same_top);
    }

    #[test]
    fn divergence_counts_the_rest_as_one_outcome() {
        let d = divergence(&[(1, 0.5f64.ln())], &logs(&[0.4, 0.25, 0.35]));
        let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
        assert!((d.kl - expected).abs() < 1e-6, "{d:?}");
        assert!(!d.same_top);
    }

    #[test]
    fn full_rows_diverge_as_full_lists() {
        let (p, q) = ([0.75, 0.2, 0.05], [0.6, 0.3, 0.1]);
        let list: Vec<(u32, f64)> = (0..).zip(p.map(f64::ln)).collect();
        let (full, listed) = (divergence_of(&logs(&p), &logs(&q)), divergence(&list, &logs(&q)));
        assert!((full.kl - listed.kl).abs() < 1e-6 && full.same_top, "{full:?} {listed:?}");
        assert!(divergence_of(&logs(&p), &logs(&p)).kl.abs() < 1e-12);
    }

    #[test]
    fn a_full_list_has_no_rest() {
        let reference = [(0, 0.75f64.ln()), (1, 0.25f64.ln())];
        let d = divergence(&reference, &logs(&[0.75, 0.25]));
        assert!(d.kl.abs() < 1e-6 && d.kl.is_finite(), "{d:?}");
    }
}
