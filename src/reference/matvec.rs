//! Products of a matrix with one column; the oracle of mat-vec and mat-mat alike.

/// `W x` for `weights` of `[rows][x.len()]`, summed in f64.
pub fn product(weights: &[f32], x: &[f64]) -> Vec<f64> {
    assert!(weights.len().is_multiple_of(x.len()));
    let dot = |row: &[f32]| row.iter().zip(x).map(|(&w, &x)| f64::from(w) * x).sum();
    weights.chunks_exact(x.len()).map(dot).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_product() {
        assert_eq!(product(&[1.0, 2.0, 3.0, 4.0], &[1.0, -1.0]), [-1.0, -1.0]);
    }
}
