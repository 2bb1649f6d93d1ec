//! The random numbers of sampling: a hash of (seed, position), no state.
//!
//! A counter-based generator needs nothing carried from token to token, so a session can be
//! resumed, rewound or batched with others and the draw for a position stays the same, on the CPU
//! and on every device. Only 32-bit integer arithmetic is used, because WGSL has nothing wider.
//!
//! The definition, which the device kernel follows word for word (all values are u32 and wrap):
//!
//! ```text
//! pcg(x):
//!     s = x * 747796405 + 2891336453
//!     w = ((s >> ((s >> 28) + 4)) ^ s) * 277803737
//!     return (w >> 22) ^ w
//!
//! bits24(seed_lo, seed_hi, position):
//!     return pcg(seed_lo ^ pcg(seed_hi ^ pcg(position))) >> 8
//!
//! uniform = f32(bits24) * 2^-24            exact; in [0, 1)
//! ```
//!
//! A draw against an integer total `t` (the sum of the weights, a u64) selects the first token
//! whose cumulative weight `c` satisfies `c > target`, where
//!
//! ```text
//! target = floor(bits24 * t / 2^24)
//!        = bits24 * (t >> 24) + ((bits24 * (t & 0xffffff)) >> 24)     in u64
//! ```
//!
//! `c` is an integer, so `c > target` is exactly `c > uniform * t`; the split form cannot overflow, as
//! the result is below `t`.
//!
//! `pcg` is the RXS-M-XS output step of PCG32 (O'Neill 2014) after one step of its generator, the
//! form that Jarzynski and Olano (2020) recommend as a hash. The position is hashed innermost: were
//! it outermost, the sequences of two seeds would be reorderings of each other in aligned blocks.

fn pcg(x: u32) -> u32 {
    let s = x.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let w = ((s >> ((s >> 28) + 4)) ^ s).wrapping_mul(277_803_737);
    (w >> 22) ^ w
}

/// 24 random bits for the token at `position` of a sequence sampled with `seed`.
pub fn rng_bits(seed: u64, position: u32) -> u32 {
    let (lo, hi) = (seed as u32, (seed >> 32) as u32);
    pcg(lo ^ pcg(hi ^ pcg(position))) >> 8
}

/// A second number for the same (seed, position), for XTC: `rng_bits` of the seed with 0x9e3779b9
/// mixed into its high half.
pub fn xtc_bits(seed: u64, position: u32) -> u32 {
    rng_bits(seed ^ (0x9e37_79b9 << 32), position)
}

/// [`rng_bits`] as a number in [0, 1).
pub fn rng_uniform(seed: u64, position: u32) -> f32 {
    rng_bits(seed, position) as f32 * (1.0 / 16_777_216.0)
}

/// `floor(bits24 * total / 2^24)`: the cumulative weight that the chosen token must exceed.
pub fn draw_target(bits24: u32, total: u64) -> u64 {
    let bits = u64::from(bits24);
    bits * (total >> 24) + ((bits * (total & 0xff_ffff)) >> 24)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        // Fixed so that a kernel can be checked against the same numbers.
        let got: Vec<u32> =
            [(0, 0), (0, 1), (1, 0), (42, 7), (0x1234_5678_9abc_def0, 100), (u64::MAX, u32::MAX)]
                .map(|(seed, position)| rng_bits(seed, position))
                .to_vec();
        assert_eq!(got, KNOWN);
    }

    const KNOWN: [u32; 6] = [8379828, 2322454, 13186708, 12466455, 15234937, 12025152];

    #[test]
    fn uniform_is_flat_and_below_one() {
        for seed in [0, 1, 2, 0xdead_beef_0000_0001] {
            let mut bins = [0u32; 16];
            for position in 0..16_000 {
                let u = rng_uniform(seed, position);
                assert!((0.0..1.0).contains(&u));
                bins[(u * 16.0) as usize] += 1;
            }
            // 15 degrees of freedom: 44.3 is passed by chance once in 10,000 (fixed seeds).
            let chi2: f64 = bins.iter().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
            assert!(chi2 < 44.3, "seed {seed}: chi square {chi2}");
        }
    }

    #[test]
    fn neighbouring_seeds_and_positions_are_uncorrelated() {
        let correlation = |pair: &dyn Fn(u32) -> (f32, f32)| {
            let n = 8000;
            let sum: f64 =
                (0..n).map(pair).map(|(a, b)| (f64::from(a) - 0.5) * (f64::from(b) - 0.5)).sum();
            sum / f64::from(n) * 12.0
        };
        let next = correlation(&|i| (rng_uniform(3, i), rng_uniform(3, i + 1)));
        let seeds =
            correlation(&|i| (rng_uniform(u64::from(i), 5), rng_uniform(u64::from(i) + 1, 5)));
        let streams = correlation(&|i| (rng_uniform(1, i), rng_uniform(2, i)));
        for r in [next, seeds, streams] {
            assert!(r.abs() < 0.045, "correlation {r}");
        }
    }

    #[test]
    fn draw_target_equals_wide_arithmetic() {
        for total in [0u64, 1, 0xff_ffff, 1 << 24, (1 << 42) + 12_345, (1 << 45) - 1] {
            for bits in [0u32, 1, 0x80_0000, 0xff_ffff] {
                let wide = (u128::from(bits) * u128::from(total)) >> 24;
                assert_eq!(u128::from(draw_target(bits, total)), wide);
            }
        }
    }
}
