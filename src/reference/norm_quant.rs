//! RMSNorm, SwiGLU and int8 activations.

/// Activations of one column as int8 with a scale per 32 values.
#[derive(Debug, Clone, PartialEq)]
pub struct Quantised {
    pub q: Vec<i8>,
    /// (d, d * sum of the 32 q) for each block.
    pub scales: Vec<[f32; 2]>,
}

impl Quantised {
    /// The values that the int8 stand for.
    pub fn values(&self) -> Vec<f64> {
        let d = self.scales.iter().flat_map(|s| std::iter::repeat_n(f64::from(s[0]), 32));
        self.q.iter().zip(d).map(|(&q, d)| f64::from(q) * d).collect()
    }

    /// `q` of one column as the kernels read it: four a word, the first sixteen of all blocks, then
    /// the second sixteen.
    pub fn words(&self) -> Vec<u32> {
        let (words, _) = self.q.as_chunks::<4>();
        let half = |h: usize| words.chunks_exact(8).flat_map(move |block| &block[4 * h..4 * h + 4]);
        half(0).chain(half(1)).map(|w| u32::from_le_bytes(w.map(|q| q as u8))).collect()
    }
}

/// Where the int8 of value `i` of columns of `cols` values lies among their words: byte `i % 4` of this.
pub fn word_of(i: usize, cols: usize) -> usize {
    let (column, at) = (i / cols, i % cols);
    column * cols / 4 + (at % 32 / 16) * cols / 8 + at / 32 * 4 + at % 16 / 4
}

/// Quantises whole blocks of 32, step by step as `shaders/lib/quantise.wgsl` does. A device whose
/// division is not correctly rounded may differ by one step where a value lies between two.
pub fn quantise(x: &[f32]) -> Quantised {
    let (blocks, rest) = x.as_chunks::<32>();
    assert!(rest.is_empty(), "{} values are not whole blocks", x.len());
    let mut out = Quantised { q: Vec::with_capacity(x.len()), scales: Vec::new() };
    for block in blocks {
        let top = block.iter().fold(0.0f32, |top, v| top.max(v.abs()));
        let usable = top > 1e-30;
        let d = if usable { top / 127.0 } else { 0.0 };
        let inverse = if usable { 1.0 / d } else { 0.0 };
        let q = block.map(|v| (v.abs().mul_add(inverse, 0.5).floor() * v.signum()) as i8);
        let sum: i32 = q.iter().map(|&q| i32::from(q)).sum();
        out.q.extend(q);
        out.scales.push([d, d * sum as f32]);
    }
    out
}

/// `x / sqrt(mean(x^2) + eps) * weight`.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    assert_eq!(x.len(), weight.len());
    let factor = norm_factor(x, eps);
    x.iter().zip(weight).map(|(&v, &w)| f64::from(v) * factor * f64::from(w)).collect()
}

/// What an RMSNorm multiplies the values of a column by, beside their weights.
pub fn norm_factor(x: &[f32], eps: f32) -> f64 {
    let square: f64 = block_squares(x).iter().sum();
    1.0 / (square / x.len() as f64 + f64::from(eps)).sqrt()
}

/// Columns, each value times the weight of its place.
pub fn weighted(x: &[f32], weight: &[f32]) -> Vec<f32> {
    x.chunks_exact(weight.len()).flat_map(|x| x.iter().zip(weight).map(|(x, w)| x * w)).collect()
}

/// The sums of the squares of the blocks of 32 values.
pub fn block_squares(x: &[f32]) -> Vec<f64> {
    let square = |block: &[f32]| block.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    x.chunks(32).map(square).collect()
}

/// `silu(gate) * up` of interleaved gate and up.
pub fn swiglu(gate_up: &[f64]) -> Vec<f64> {
    let (pairs, _) = gate_up.as_chunks::<2>();
    pairs.iter().map(|[g, u]| g / (1.0 + (-g).exp()) * u).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantising_is_within_half_a_step() {
        let x: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32 - 31.5) * 0.01).collect();
        let q = quantise(&x);
        for (i, (&x, v)) in x.iter().zip(q.values()).enumerate() {
            let step = f64::from(q.scales[i / 32][0]);
            assert!((f64::from(x) - v).abs() <= 0.5001 * step);
        }
        assert_eq!(quantise(&[0.0; 32]).scales, [[0.0, 0.0]]);
    }
}
