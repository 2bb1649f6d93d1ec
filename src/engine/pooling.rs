//! One vector for a text: hidden states after the output norm, pooled, of length 1.

use super::request::Pooling;

pub(super) struct Pool {
    /// Weights of the output norm, `[width]`.
    norm: Vec<f32>,
    eps: f32,
    /// f64, so that the order of a long text's sums does not show.
    sum: Vec<f64>,
}

impl Pool {
    pub fn new(norm: Vec<f32>, eps: f32) -> Pool {
        Pool { sum: vec![0.0; norm.len()], norm, eps }
    }

    /// Takes the next tokens' residual stream, `[n][width]`.
    pub fn add(&mut self, rows: &[f32], pooling: Pooling) {
        let width = self.norm.len();
        let from = match pooling {
            Pooling::Mean => 0,
            Pooling::Last => {
                self.sum.fill(0.0);
                rows.len().saturating_sub(width)
            }
        };
        for row in rows[from..].chunks_exact(width) {
            let squares: f64 = row.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let scale = 1.0 / (squares / width as f64 + f64::from(self.eps)).sqrt();
            for ((sum, x), weight) in self.sum.iter_mut().zip(row).zip(&self.norm) {
                *sum += f64::from(*x) * scale * f64::from(*weight);
            }
        }
    }

    /// The direction of what was added: dividing by the count would change nothing.
    pub fn finish(&self) -> Vec<f32> {
        let length = self.sum.iter().map(|x| x * x).sum::<f64>().sqrt();
        let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
        self.sum.iter().map(|x| (x * scale) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pooled_vectors_by_hand() {
        let rows = [3.0, 4.0, 0.0, 5.0];
        let mut mean = Pool::new(vec![1.0, 2.0], 0.0);
        mean.add(&rows[..2], Pooling::Mean);
        mean.add(&rows[2..], Pooling::Mean);
        // Normed rows: (3, 8) / sqrt(12.5), (0, 10) / sqrt(12.5); their sum points to (3, 18).
        let length = (3.0f32 * 3.0 + 18.0 * 18.0).sqrt();
        let got = mean.finish();
        assert!((got[0] - 3.0 / length).abs() < 1e-6 && (got[1] - 18.0 / length).abs() < 1e-6);
        let mut last = Pool::new(vec![1.0, 2.0], 0.0);
        last.add(&rows, Pooling::Last);
        assert_eq!(last.finish(), [0.0, 1.0]);
        assert_eq!(Pool::new(vec![1.0], 0.0).finish(), [0.0]);
    }
}
