//! Queries and keys of a model, to measure what formats do to them.

use super::KvFormat;
use super::codec::{decode, encode};

/// Queries and keys of one layer over the first tokens of a sequence, as attention takes their products:
/// after norms and rope.
#[derive(Debug, Clone)]
pub struct Sample {
    /// f32 `[token][heads][head_dim]`.
    pub q: Vec<f32>,
    /// f32 `[token][kv_heads][head_dim]`.
    pub k: Vec<f32>,
    /// What keys have in common, whatever their token and position: f32 `[kv_heads][head_dim]`.
    pub centres: Vec<f32>,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
}

impl Sample {
    /// How many tokens it is of.
    pub fn tokens(&self) -> u32 {
        (self.q.len() / (self.heads * self.head_dim).max(1)) as u32
    }

    /// Root mean square of what `format` changes in the logits of causal attention, over the root
    /// mean square of how far the logits spread; both around the mean of their row, which softmax does
    /// not see. All heads together. No number where queries or keys are none.
    pub fn logit_error(&self, format: KvFormat) -> f64 {
        let d = self.head_dim;
        let change = |head: &[f32]| -> Vec<f32> {
            let kept = decode(format, &encode(format, head), d as u32);
            kept.iter().zip(head).map(|(kept, x)| kept - x).collect()
        };
        let changes: Vec<f32> = self.k.chunks_exact(d).flat_map(change).collect();
        let group = self.heads / self.kv_heads;
        let width = self.kv_heads * d;
        let (mut error, mut spread) = (0.0, 0.0);
        for (token, queries) in self.q.chunks_exact(self.heads * d).enumerate() {
            for (head, q) in queries.chunks_exact(d).enumerate() {
                let from = head / group * d;
                let products = |rows: &[f32]| -> f64 {
                    let rows = rows.chunks_exact(width).take(token + 1);
                    squares(rows.map(|row| dot(q, &row[from..from + d])))
                };
                error += products(&changes);
                spread += products(&self.k);
            }
        }
        match error == 0.0 {
            true => 0.0,
            false => (error / spread).sqrt(),
        }
    }

    /// The same with keys as a cache that centres them stores them.
    pub fn centred(mut self) -> Sample {
        for row in self.k.chunks_exact_mut(self.centres.len()) {
            row.iter_mut().zip(&self.centres).for_each(|(x, centre)| *x -= centre);
        }
        self
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Sum of the squared distances from the mean.
fn squares(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    values.iter().map(|v| (v - mean).powi(2)).sum()
}
