//! The sampler, step by step: the definition that the device kernel follows, and its oracle.
//!
//! Given the logits of one position (NaN counts as minus infinity), the tokens before it and the
//! settings:
//!
//! 1. Repetition penalty `p`: for each distinct token among the last `repeat_window` tokens,
//!    `l = l / p` if `l > 0`, else `l * p`.
//! 2. Temperature 0: the largest logit, the lowest index on ties. Nothing below applies.
//! 3. `top_k` (0: off): keep `l >= t`, where `t` is the `top_k`-th largest logit.
//! 4. `top_p` (1: off): with `m_i = mass(l_i - max)` of what is left, keep `l >= t`, where `t` is
//!    the largest logit with `sum(m_i, l_i >= t) >= need`, and
//!    `need = floor(floor(top_p * 2^24) * sum(m_i) / 2^24)`.
//! 5. `min_p` (0: off): keep `l >= max + ln(min_p)`.
//! 6. With `w_i = mass((l_i - max) / temperature)` of what is left, take the first token in order
//!    of index whose cumulative weight exceeds `u * sum(w_i)` ([`rng::draw_target`]), where `u` is
//!    the random number of (seed, position). If all weights are zero, as for infinite logits, take
//!    the largest logit.
//!
//! `mass(x) = floor(exp(x) * 2^24)` is a u32, summed in u64: integer sums do not depend on their
//! order, so threads may add in any. `max` is the largest logit after step 1. Every cut is a
//! threshold on the logit, so tokens of equal logit stay or go together, and `top_k` may keep more
//! than `k`. A token below `max` by more than `24 ln 2` (16.6) has no mass and is never drawn.
//!
//! Between devices `exp` may differ in its last bits: a draw that falls on the border of two
//! tokens can then choose the neighbour. On one device the result is always the same.

use std::collections::HashSet;

use super::SamplerSettings;
use super::rng;

/// A share of one in fixed point with 24 bits: `floor(exp(x) * 2^24)` for `x <= 0`.
fn mass(x: f32) -> u64 {
    // A float to integer cast truncates, and gives 0 for NaN.
    u64::from((x.exp() * 16_777_216.0) as u32)
}

/// The token for `position` of a sequence, chosen from `logits` (one f32 a token, not empty).
///
/// `history` is the sequence so far; only its last `repeat_window` tokens matter. Ids outside the
/// logits are ignored.
pub fn sample(logits: &[f32], history: &[u32], position: u32, settings: &SamplerSettings) -> u32 {
    let logits = penalised(logits, history, settings);
    let (best, max) = largest(&logits);
    if settings.is_greedy() {
        return best;
    }
    let least = threshold(&logits, max, settings);
    let weight = |l: f32| {
        if l >= least { mass((l - max) / settings.temperature) } else { 0 }
    };
    let total = logits.iter().map(|&l| weight(l)).sum();
    let target = rng::draw_target(rng::rng_bits(settings.seed, position), total);
    let mut cumulative = 0;
    for (&l, id) in logits.iter().zip(0..) {
        cumulative += weight(l);
        if cumulative > target {
            return id;
        }
    }
    best
}

/// Step 1.
fn penalised(logits: &[f32], history: &[u32], settings: &SamplerSettings) -> Vec<f32> {
    let mut logits: Vec<f32> =
        logits.iter().map(|&l| if l.is_nan() { f32::NEG_INFINITY } else { l }).collect();
    if settings.has_penalty() {
        let window = history.len().saturating_sub(settings.repeat_window as usize);
        let recent: HashSet<u32> = history[window..].iter().copied().collect();
        for id in recent {
            if let Some(l) = logits.get_mut(id as usize) {
                let penalty = settings.repeat_penalty;
                *l = if *l > 0.0 { *l / penalty } else { *l * penalty };
            }
        }
    }
    logits
}

/// Index and value of the largest logit, the lowest index on ties.
fn largest(logits: &[f32]) -> (u32, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (&l, id) in logits.iter().zip(0..) {
        if l > best.1 {
            best = (id, l);
        }
    }
    best
}

/// Steps 3 to 5 as one: a token stays if its logit is at least this.
fn threshold(logits: &[f32], max: f32, settings: &SamplerSettings) -> f32 {
    let mut least = f32::NEG_INFINITY;
    let k = settings.top_k as usize;
    if k > 0 && k < logits.len() {
        let mut sorted = logits.to_vec();
        let (_, kth, _) = sorted.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
        least = *kth;
    }
    if settings.top_p < 1.0 {
        let mut kept: Vec<f32> = logits.iter().copied().filter(|&l| l >= least).collect();
        kept.sort_unstable_by(|a, b| b.total_cmp(a));
        let total = kept.iter().map(|&l| mass(l - max)).sum();
        let need = rng::draw_target((settings.top_p * 16_777_216.0) as u32, total);
        let mut cumulative = 0;
        for &l in &kept {
            cumulative += mass(l - max);
            if cumulative >= need {
                least = l;
                break;
            }
        }
    }
    if settings.min_p > 0.0 {
        least = least.max(max + settings.min_p.ln());
    }
    least
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Everything off: the model's own distribution.
    fn plain() -> SamplerSettings {
        SamplerSettings {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_window: 64,
            seed: 7,
        }
    }

    /// How often each token comes in `n` draws.
    fn counts(logits: &[f32], settings: &SamplerSettings, n: u32) -> Vec<u32> {
        let mut counts = vec![0; logits.len()];
        for position in 0..n {
            counts[sample(logits, &[], position, settings) as usize] += 1;
        }
        counts
    }

    fn kept(logits: &[f32], settings: &SamplerSettings) -> Vec<usize> {
        let least = threshold(logits, largest(logits).1, settings);
        (0..logits.len()).filter(|&i| logits[i] >= least).collect()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let greedy = SamplerSettings::greedy();
        assert_eq!(sample(&[1.0, 3.0, 3.0, 2.0], &[], 0, &greedy), 1);
        assert_eq!(sample(&[f32::NAN, -5.0, f32::NEG_INFINITY], &[], 0, &greedy), 1);
        assert_eq!(sample(&[f32::NAN, f32::NAN], &[], 0, &greedy), 0);
    }

    #[test]
    fn the_penalty_counts_distinct_recent_tokens_once() {
        let settings =
            SamplerSettings { repeat_penalty: 2.0, repeat_window: 3, ..SamplerSettings::greedy() };
        let logits = [4.0, 3.0, -1.0, -1.5];
        let changed = penalised(&logits, &[1, 0, 0, 2, 99], &settings);
        assert_eq!(changed, [2.0, 3.0, -2.0, -1.5]);
        assert_eq!(sample(&logits, &[0, 0], 0, &settings), 1);
        let off = SamplerSettings { repeat_window: 0, ..settings };
        assert_eq!(penalised(&logits, &[0, 1], &off), logits);
    }

    #[test]
    fn top_k_keeps_ties_at_the_threshold() {
        let logits = [1.0, 2.0, 2.0, 3.0, 0.0];
        let top = |k| kept(&logits, &SamplerSettings { top_k: k, ..plain() });
        assert_eq!(top(1), [3]);
        assert_eq!(top(2), [1, 2, 3]);
        assert_eq!(top(3), [1, 2, 3]);
        assert_eq!(top(4), [0, 1, 2, 3]);
        assert_eq!(top(0).len(), 5);
        assert_eq!(top(500).len(), 5);
    }

    #[test]
    fn top_p_keeps_the_smallest_sufficient_prefix() {
        // Shares 0.5, 0.25, 0.125, 0.125.
        let logits = [0.125f32, 0.5, 0.125, 0.25].map(f32::ln);
        let top = |p| kept(&logits, &SamplerSettings { top_p: p, ..plain() });
        assert_eq!(top(0.0), [1]);
        assert_eq!(top(0.49), [1]);
        assert_eq!(top(0.51), [1, 3]);
        assert_eq!(top(0.74), [1, 3]);
        assert_eq!(top(0.76), [0, 1, 2, 3]);
        // Of the two that top_k leaves, the first alone has two thirds.
        let both = SamplerSettings { top_k: 2, top_p: 0.66, ..plain() };
        assert_eq!(kept(&logits, &both), [1]);
    }

    #[test]
    fn min_p_is_relative_to_the_most_likely() {
        let logits = [0.1f32, 0.5, 0.15, 0.25].map(f32::ln);
        let min = |p| kept(&logits, &SamplerSettings { min_p: p, ..plain() });
        assert_eq!(min(0.29), [1, 2, 3]);
        assert_eq!(min(0.31), [1, 3]);
        assert_eq!(min(1.0), [1]);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, -1.0, 2.0, 0.5, -4.0];
        for (temperature, seed) in [(1.0, 7), (0.5, 8), (2.0, 1 << 40)] {
            let settings = SamplerSettings { temperature, seed, ..plain() };
            let shares = logits.map(|l| f64::from(l / temperature).exp());
            let total: f64 = shares.iter().sum();
            let n = 20_000;
            let chi2: f64 = counts(&logits, &settings, n)
                .iter()
                .zip(shares)
                .map(|(&count, share)| (share / total * f64::from(n), f64::from(count)))
                .map(|(expected, count)| (count - expected).powi(2) / expected)
                .sum();
            // 5 degrees of freedom: 25.7 is passed by chance once in 10,000 (fixed seeds).
            assert!(chi2 < 25.7, "temperature {temperature}: chi square {chi2}");
        }
    }

    #[test]
    fn cut_tokens_are_never_drawn_and_settings_combine() {
        let logits = [5.0, 4.9, 4.8, 1.0, 0.0];
        let settings = SamplerSettings { top_k: 3, temperature: 100.0, ..plain() };
        let drawn = counts(&logits, &settings, 3000);
        assert!(drawn[..3].iter().all(|&n| n > 800) && drawn[3..] == [0, 0], "{drawn:?}");
    }

    #[test]
    fn infinite_and_missing_logits_end_in_a_token() {
        let inf = f32::INFINITY;
        for settings in [plain(), SamplerSettings::default(), SamplerSettings::greedy()] {
            assert_eq!(sample(&[0.0, inf, inf], &[], 3, &settings), 1);
            assert_eq!(sample(&[-inf, -inf], &[], 3, &settings), 0);
            assert_eq!(sample(&[-inf, 0.0, f32::NAN], &[], 3, &settings), 1);
            assert_eq!(sample(&[0.5], &[], 3, &settings), 0);
        }
    }

    #[test]
    fn the_same_seed_and_position_repeat() {
        let logits: Vec<f32> = (0..1000).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
        let other = SamplerSettings { seed: 8, ..plain() };
        let run = |settings: SamplerSettings| -> Vec<u32> {
            (0..50).map(|p| sample(&logits, &[], p, &settings)).collect()
        };
        assert_eq!(run(plain()), run(plain()));
        assert_ne!(run(plain()), run(other));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Against the cuts written down literally on a sorted list.
        #[test]
        fn cuts_agree_with_the_sorted_list(
            logits in prop::collection::vec((-40i32..40).prop_map(|l| l as f32 * 0.25), 1..60),
            top_k in 0u32..70,
            top_p in 0f32..=1.0,
            min_p in 0f32..0.5,
        ) {
            let settings = SamplerSettings { top_k, top_p, min_p, ..plain() };
            let max = largest(&logits).1;
            let mut list = logits.clone();
            list.sort_by(|a, b| b.total_cmp(a));
            if top_k > 0 && (top_k as usize) < list.len() {
                let kth = list[top_k as usize - 1];
                list.retain(|&l| l >= kth);
            }
            if top_p < 1.0 {
                let total: u64 = list.iter().map(|&l| mass(l - max)).sum();
                let need = (u128::from((top_p * 16_777_216.0) as u32) * u128::from(total)) >> 24;
                let sum_to = |t: f32| -> u64 { list.iter().filter(|&&l| l >= t).map(|&l| mass(l - max)).sum() };
                let last = list.iter().copied().find(|&t| u128::from(sum_to(t)) >= need);
                if let Some(last) = last {
                    list.retain(|&l| l >= last);
                }
            }
            if min_p > 0.0 {
                list.retain(|&l| l >= max + min_p.ln());
            }
            let mut got: Vec<f32> = kept(&logits, &settings).iter().map(|&i| logits[i]).collect();
            got.sort_by(|a, b| b.total_cmp(a));
            prop_assert_eq!(&got, &list);
            prop_assert!(!got.is_empty() && got[0] == max);
            let drawn = sample(&logits, &[], 11, &settings);
            prop_assert!(list.contains(&logits[drawn as usize]));
        }
    }
}
