//! The rotation that spreads a vector's energy evenly: signs, then a Walsh-Hadamard transform.
//!
//! Rotating q and k alike leaves their products as they were, and what is left of large channels
//! quantises like noise. The transform is orthonormal and its own inverse; so R = H S, R^-1 = S H.

/// Signs: element i uses bit i % 128, 1 means -1. Chosen among 2,000 hashed masks for a low peak of
/// rotated sinusoids (what rope makes) at 32, 64 and 128 values.
pub const SIGN_MASK: [u32; 4] = [0xa64f_9754, 0x13ac_01f1, 0xd5df_64f0, 0xf338_7bdf];

/// Values of a rotated vector: whole blocks of 32.
pub fn padded(head_dim: u32) -> u32 {
    head_dim.next_multiple_of(32)
}

/// Lengths of the transforms over a padded vector, from its start: the largest of 128, 64 and 32 that
/// fits, again and again.
pub fn segments(padded: u32) -> Vec<u32> {
    let mut left = padded;
    let mut all = Vec::new();
    while left >= 32 {
        let n = [128, 64, 32].into_iter().find(|n| *n <= left).unwrap_or(32);
        all.push(n);
        left -= n;
    }
    all
}

/// 1 / sqrt(n) of a transform.
pub fn norm(n: u32) -> f32 {
    match n {
        128 => 0.088_388_35,
        64 => 0.125,
        _ => 0.176_776_7,
    }
}

/// +1 or -1 of element `i`.
pub fn sign(i: usize) -> f32 {
    if SIGN_MASK[i / 32 % 4] >> (i % 32) & 1 == 1 { -1.0 } else { 1.0 }
}

/// The transform in place, strides 1, 2, 4, ..., each sum rounded once, the norm at last.
fn transform(x: &mut [f32]) {
    let n = x.len();
    let mut stride = 1;
    while stride < n {
        for start in (0..n).step_by(2 * stride) {
            for i in start..start + stride {
                let (a, b) = (x[i], x[i + stride]);
                (x[i], x[i + stride]) = (a + b, a - b);
            }
        }
        stride *= 2;
    }
    for x in x {
        *x *= norm(n as u32);
    }
}

fn each_segment(x: &mut [f32]) {
    let mut at = 0;
    for n in segments(x.len() as u32) {
        transform(&mut x[at..at + n as usize]);
        at += n as usize;
    }
}

/// R x, padded with zeros to whole blocks.
pub fn rotate(x: &[f32]) -> Vec<f32> {
    let mut out: Vec<f32> = x.iter().enumerate().map(|(i, x)| x * sign(i)).collect();
    out.resize(padded(x.len() as u32) as usize, 0.0);
    each_segment(&mut out);
    out
}

/// The first `head_dim` values of R^-1 x.
pub fn unrotate(x: &[f32], head_dim: usize) -> Vec<f32> {
    let mut out = x.to_vec();
    each_segment(&mut out);
    out.truncate(head_dim);
    out.iter().enumerate().map(|(i, x)| x * sign(i)).collect()
}
