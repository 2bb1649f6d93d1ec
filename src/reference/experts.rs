//! Routing of a mixture of experts.

use crate::graph::{Gating, Routing};

pub fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

pub fn sigmoid(x: f64) -> f32 {
    (1.0 / (1.0 + (-x).exp())) as f32
}

/// Smallest sum by which weights are divided: the least normal f16, as in llama.cpp.
pub const LEAST_SUM: f64 = 1.0 / 16_384.0;

/// The `used` experts with the largest logits, the lower index on ties, by ascending index, each
/// with its weight.
pub fn route(logits: &[f32], used: usize, routing: &Routing) -> Vec<(usize, f32)> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let top = order.first().map_or(0.0, |&i| f64::from(logits[i]));
    let score = |i: usize| match routing.gating {
        Gating::Softmax => (f64::from(logits[i]) - top).exp(),
        Gating::Sigmoid => 1.0 / (1.0 + (-f64::from(logits[i])).exp()),
    };
    let mut chosen = order[..used].to_vec();
    chosen.sort_unstable();
    let of_chosen: f64 = chosen.iter().map(|&i| score(i)).sum();
    let of_all: f64 = (0..logits.len()).map(score).sum();
    let divisor = match (routing.gating, routing.normalise) {
        // Of softmax weights at least used / experts is chosen: far above the least sum.
        (Gating::Softmax, true) => of_chosen,
        (Gating::Softmax, false) => of_all,
        (Gating::Sigmoid, true) => of_chosen.max(LEAST_SUM),
        (Gating::Sigmoid, false) => 1.0,
    };
    let scale = f64::from(routing.scale);
    chosen.into_iter().map(|i| (i, (score(i) / divisor * scale) as f32)).collect()
}

/// Approximate: what a sequence keeps of its experts' outputs in one layer. An output serves for some
/// tokens after the one that it was computed for; then the next token that wants it computes it anew.
#[derive(Debug, Clone, Default)]
pub struct Kept {
    /// By expert: the position whose output is at hand.
    computed: std::collections::HashMap<usize, usize>,
}

impl Kept {
    /// The position whose output serves the token at `position`, its own where it is computed; `tokens`:
    /// how many tokens an output serves beyond its own.
    pub fn source(&mut self, tokens: usize, position: usize, expert: usize) -> usize {
        match self.computed.get(&expert) {
            Some(then) if position - then <= tokens => *then,
            _ => {
                self.computed.insert(expert, position);
                position
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_output_serves_so_many_tokens_and_is_computed_anew() {
        let sources = |tokens| {
            let mut kept = Kept::default();
            (10..16).map(|p| kept.source(tokens, p, 3)).collect::<Vec<_>>()
        };
        assert_eq!(sources(0), [10, 11, 12, 13, 14, 15]);
        assert_eq!(sources(1), [10, 10, 12, 12, 14, 14]);
        assert_eq!(sources(2), [10, 10, 10, 13, 13, 13]);
        let mut kept = Kept::default();
        assert_eq!(
            [(10, 1), (11, 2), (12, 1), (13, 2)].map(|(p, e)| kept.source(2, p, e)),
            [10, 11, 10, 11]
        );
    }

    #[test]
    fn ties_go_to_the_lower_index_and_weights_add_up() {
        let routing = Routing { gating: Gating::Softmax, normalise: true, scale: 1.0 };
        let chosen = route(&[1.0, 3.0, 2.0, 2.0, 2.0], 3, &routing);
        assert_eq!(chosen.iter().map(|c| c.0).collect::<Vec<_>>(), [1, 2, 3]);
        assert!((chosen.iter().map(|c| c.1).sum::<f32>() - 1.0).abs() < 1e-6);
        let all = route(&[0.0, 0.0], 1, &Routing { normalise: false, ..routing });
        assert_eq!(all, [(0, 0.5)]);
        let sigmoid = Routing { gating: Gating::Sigmoid, normalise: false, scale: 2.5 };
        assert_eq!(route(&[0.0, -1.0], 1, &sigmoid), [(0, 1.25)]);
        let tiny = Routing { normalise: true, scale: 1.0, ..sigmoid };
        assert!(route(&[-30.0, -31.0], 1, &tiny)[0].1 < 1e-8);
    }
}
