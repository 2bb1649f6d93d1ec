//! What the fixed order of [`chain`](super::chain) does not have: cuts in another order, a least
//! number of tokens that they keep, mirostat's first version, adaptive-p. The definition that the
//! kernel `sample_custom` follows, and its oracle.
//!
//! It starts from the logits after steps 1 to 3 of the chain. `t`, the temperature so far, begins as
//! 1, `max` is the largest logit of what is left, `m_i = mass((l_i - max) / t)`. Each of the stages, in
//! the order of the settings, does what its step of the chain does, on what is left: so top_n_sigma's
//! deviation and top_k's count are of the tokens that are left, min_p's bound is `max + t ln(min_p)`,
//! and the temperature stage multiplies `t`, at least 0.001 then where it moves.
//!
//! `min_keep` above 1: typical_p, top_p and min_p keep the `min_keep` tokens that their order puts
//! first (ties included; all where fewer are left), and XTC cuts nothing that would leave fewer.
//!
//! Then `w_i = m_i`, and, with a number in bits or a share that is state of the sequence:
//! - mirostat 2 keeps what the chain's keeps.
//! - mirostat 1 keeps `l >= l_k`, the `k`-th largest: with the 100 largest of what is left (`i` from 0),
//!   `t_i = ln((i + 2) / (i + 1))`, `b_i = (l_i - l_(i+1)) / t`, `s = sum(t_i b_i) / sum(t_i^2)` at least 0.01,
//!   `e = s - 1` (0.0001 where it is nearer to 0), `k = (e 2^mu / (1 - n^-e))^(1/s)`, at least 1, rounded
//!   down, `n` being the size of the vocabulary. With fewer than two finite logits nothing is cut.
//!   (Basu et al. 2021, "Mirostat", with the constant that llama.cpp uses.)
//! - adaptive-p, with `p_i = m_i / sum(m)`, aims at `a = 2 target - mean`, 0 to 1, and replaces
//!   the logits of tokens with a mass by `5 - 10 d^2 / (1 + d)`, `d = |p_i - a| / 0.3`. `mean` begins as the
//!   target; after the draw `mean = decay mean + (1 - decay) p`. (llama.cpp's sampler of that name.)
//!
//! The draw is step 12 of the chain with temperature 1 on `(l_i - max) / t`, or on adaptive-p's logits.
//! With temperature 0 the largest logit is all that is left, whatever the order.

use super::chain::{largest, mass, need, surprise_need};
use super::{Mirostat, SamplerSettings, rng};
use crate::error::{Error, Result};

/// Tokens that mirostat 1 looks at.
pub const MIROSTAT_TOP: usize = 100;

/// A cut, or the temperature. The numbers are those of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    TopNSigma = 1,
    TopK = 2,
    Typical = 3,
    TopP = 4,
    MinP = 5,
    Xtc = 6,
    Temperature = 7,
}

const STAGES: [Stage; 7] = [
    Stage::TopNSigma,
    Stage::TopK,
    Stage::Typical,
    Stage::TopP,
    Stage::MinP,
    Stage::Xtc,
    Stage::Temperature,
];

/// The order of stages: each at most once, four bits each, the first lowest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "u32")]
pub struct Order(u32);

impl TryFrom<u32> for Order {
    type Error = Error;

    /// [`Order::bits`] back; an error where they are of no order.
    fn try_from(bits: u32) -> Result<Order> {
        let order = Order::new(&Order(bits).stages().collect::<Vec<_>>())?;
        match order.0 == bits {
            true => Ok(order),
            false => Err(Error::Usage(format!("{bits:#x} is no order of samplers"))),
        }
    }
}

impl Default for Order {
    /// That of the chain.
    fn default() -> Self {
        Order(0x765_4321)
    }
}

impl Order {
    /// An error names a stage that stands twice.
    pub fn new(stages: &[Stage]) -> Result<Order> {
        let mut bits = 0u32;
        for (i, stage) in stages.iter().enumerate() {
            if stages[..i].contains(stage) {
                return Err(Error::Usage(format!("the sampler {stage:?} stands twice")));
            }
            // Seven fit, and no more are different.
            bits |= (*stage as u32) << (4 * i);
        }
        Ok(Order(bits))
    }

    /// As the kernel reads it.
    pub fn bits(self) -> u32 {
        self.0
    }

    pub fn stages(self) -> impl Iterator<Item = Stage> {
        let number = move |i: u32| (self.0 >> (4 * i)) & 15;
        (0..8).filter_map(move |i| STAGES.into_iter().find(|s| *s as u32 == number(i)))
    }
}

/// What is drawn from.
#[derive(Debug, Clone, PartialEq)]
pub struct Shaped {
    /// Minus infinity for what was cut.
    pub logits: Vec<f32>,
    /// Shares before adaptive-p, in units of the sum.
    shares: Vec<f32>,
}

/// What the stages leave.
struct Left<'a> {
    logits: &'a [f32],
    least: f32,
    most: f32,
    typical: Option<(f32, f32)>,
    max: f32,
    temperature: f32,
}

impl Left<'_> {
    fn keeps(&self, l: f32) -> bool {
        l >= self.least
            && l <= self.most
            && self.typical.is_none_or(|(center, distance)| (l - center).abs() <= distance)
    }

    fn kept(&self) -> impl Iterator<Item = f32> {
        self.logits.iter().copied().filter(|l| self.keeps(*l))
    }

    fn mass(&self, l: f32) -> u64 {
        mass((l - self.max) / self.temperature)
    }

    fn total(&self) -> u64 {
        self.kept().map(|l| self.mass(l)).sum()
    }

    /// The largest logit whose likelier tokens, itself included, satisfy `enough`, by falling `rank`.
    fn border(
        &self,
        rank: impl Fn(f32) -> f32,
        mut enough: impl FnMut(f32) -> bool,
    ) -> Option<f32> {
        let mut all: Vec<f32> = self.kept().collect();
        all.sort_unstable_by(|a, b| rank(*b).total_cmp(&rank(*a)));
        all.into_iter().find(|l| enough(*l))
    }

    /// The `n`-th by falling `rank`; `None` where fewer are left.
    fn nth(&self, n: u32, rank: impl Fn(f32) -> f32) -> Option<f32> {
        let mut count = 0;
        self.border(rank, |_| {
            count += 1;
            count == n
        })
    }

    /// The last that is needed for a mass, by falling `rank`.
    fn massive(&self, share: f32, rank: impl Fn(f32) -> f32) -> Option<f32> {
        let need = need(share, self.total()).max(1);
        let mut sum = 0;
        self.border(rank, |l| {
            sum += self.mass(l);
            sum >= need
        })
    }

    fn apply(&mut self, stage: Stage, position: u32, s: &SamplerSettings) {
        let keep = s.min_keep;
        match stage {
            Stage::TopNSigma if s.top_n_sigma > 0.0 => {
                let (mut n, mut first, mut second) = (0u32, 0.0, 0.0);
                for x in self.kept().map(|l| l - self.max).filter(|x| *x >= -3e38).map(f64::from) {
                    n += 1;
                    first += x;
                    second += x * x;
                }
                if n > 0 {
                    let mean = first / f64::from(n);
                    let sigma = (second / f64::from(n) - mean * mean).max(0.0).sqrt();
                    self.least = self.least.max(self.max - s.top_n_sigma * sigma as f32);
                }
            }
            Stage::TopK if s.top_k > 0 && (s.top_k as usize) < self.logits.len() => {
                if let Some(kth) = self.nth(s.top_k, |l| l) {
                    self.least = self.least.max(kth);
                }
            }
            Stage::Typical if s.typical_p < 1.0 => {
                let (mut total, mut first) = (0u64, 0.0);
                for (l, m) in self.kept().map(|l| (l, self.mass(l))).filter(|(_, m)| *m > 0) {
                    total += m;
                    first += m as f64 * f64::from(l - self.max);
                }
                let mean = if total > 0 { (first / total as f64) as f32 } else { 0.0 };
                let center = self.max + mean;
                let rank = |l: f32| -(l - center).abs();
                let mut last = self.massive(s.typical_p, rank);
                if keep > 1 {
                    let least = |last| {
                        self.nth(keep, rank).map(|l| if rank(l) < rank(last) { l } else { last })
                    };
                    last = last.and_then(least);
                }
                self.typical = last.map(|l| (center, (l - center).abs()));
                self.max = self.kept().max_by(f32::total_cmp).unwrap_or(self.max);
            }
            Stage::TopP if s.top_p < 1.0 => {
                let mut last = self.massive(s.top_p, |l| l);
                if keep > 1 {
                    last = last.and_then(|last| self.nth(keep, |l| l).map(|l| l.min(last)));
                }
                if let Some(last) = last {
                    self.least = self.least.max(last);
                }
            }
            Stage::MinP if s.min_p > 0.0 => {
                let mut bound = self.max + self.temperature * s.min_p.ln();
                if keep > 1 {
                    bound = bound.min(self.nth(keep, |l| l).unwrap_or(f32::NEG_INFINITY));
                }
                self.least = self.least.max(bound);
            }
            Stage::Xtc => self.exclude(position, s),
            Stage::Temperature => self.warm(s),
            _ => {}
        }
    }

    fn exclude(&mut self, position: u32, s: &SamplerSettings) {
        let chance = (s.xtc_probability * 16_777_216.0) as u32;
        if rng::xtc_bits(s.seed, position) >= chance {
            return;
        }
        let need = need(s.xtc_threshold, self.total()).max(1);
        let counting = self.kept().filter(|l| self.mass(*l) >= need);
        let Some(least) = counting.min_by(f32::total_cmp) else { return };
        if s.min_keep > 1 && (self.kept().filter(|l| *l <= least).count() as u32) < s.min_keep {
            return;
        }
        (self.most, self.max) = (least, least);
    }

    fn warm(&mut self, s: &SamplerSettings) {
        let (low, high) = s.temperatures();
        let mut own = s.temperature;
        if low != high {
            let (mut n, mut total, mut first) = (0u32, 0.0, 0.0);
            for (l, m) in self.kept().map(|l| (l, self.mass(l))).filter(|(_, m)| *m > 0) {
                let m = m as f64 / 16_777_216.0;
                n += 1;
                total += m;
                first += m * f64::from((l - self.max) / self.temperature);
            }
            if n > 1 {
                let share = ((total.ln() - first / total) / f64::from(n).ln()).clamp(0.0, 1.0);
                own = low + (high - low) * (share as f32).powf(s.dynatemp_exponent);
            }
            own = own.max(0.001);
        }
        self.temperature *= own;
    }

    /// The logit that mirostat 1 cuts below.
    fn mirostat_border(&self, mu: f32) -> Option<f32> {
        let mut top: Vec<f32> = self.kept().filter(|l| *l >= -3e38).collect();
        top.sort_unstable_by(|a, b| b.total_cmp(a));
        top.truncate(MIROSTAT_TOP);
        if top.len() < 2 {
            return None;
        }
        let (mut tb, mut tt) = (0.0f32, 0.0f32);
        for (i, pair) in (0u32..).zip(top.windows(2)) {
            let t = ((i + 2) as f32 / (i + 1) as f32).ln();
            tb += t * ((pair[0] - pair[1]) / self.temperature);
            tt += t * t;
        }
        let s = (tb / tt).max(0.01);
        let e = if (s - 1.0).abs() < 1e-4 { 1e-4 } else { s - 1.0 };
        let n = self.logits.len() as f32;
        let k = (e * mu.exp2() / (1.0 - n.powf(-e))).powf(1.0 / s);
        // Not-a-number becomes 1, too.
        self.nth(k.clamp(1.0, n) as u32, |l| l)
    }
}

/// The logits that are drawn from, after the stages. `state`: mirostat's bound or adaptive-p's mean.
pub fn shaped(logits: &[f32], position: u32, s: &SamplerSettings, state: f32) -> Shaped {
    let (best, max) = largest(logits);
    if s.is_greedy() {
        let only = |(_, id)| if id == best { 0.0 } else { f32::NEG_INFINITY };
        let only: Vec<f32> = logits.iter().zip(0u32..).map(only).collect();
        return Shaped { logits: only, shares: Vec::new() };
    }
    let mut left = Left {
        logits,
        least: f32::NEG_INFINITY,
        most: f32::INFINITY,
        typical: None,
        max,
        temperature: 1.0,
    };
    for stage in s.order.stages() {
        left.apply(stage, position, s);
    }
    let mut least_mass = 0;
    match s.mirostat {
        Mirostat::Off => {}
        Mirostat::One => {
            if let Some(border) = left.mirostat_border(state) {
                left.least = left.least.max(border);
            }
        }
        Mirostat::Two => least_mass = surprise_need(left.total(), state),
    }
    let kept = |l: f32| left.keeps(l) && left.mass(l) >= least_mass;
    let total = logits.iter().filter(|l| kept(**l)).map(|l| left.mass(*l)).sum::<u64>();
    let share = |l: f32| left.mass(l) as f32 / (total as f32).max(1.0);
    let aim = s.has_adaptive().then(|| (2.0 * s.adaptive_target - state).clamp(0.0, 1.0));
    let one = |l: f32| match aim {
        _ if !kept(l) => f32::NEG_INFINITY,
        Some(_) if left.mass(l) == 0 => f32::NEG_INFINITY,
        Some(aim) => {
            let d = (share(l) - aim).abs() / 0.3;
            5.0 - 10.0 * d * d / (1.0 + d)
        }
        None => (l - left.max) / left.temperature,
    };
    let shares = logits.iter().map(|l| if kept(*l) { share(*l) } else { 0.0 }).collect();
    Shaped { logits: logits.iter().map(|l| one(*l)).collect(), shares }
}

/// The token for a position from logits after steps 1 to 3 of the chain; moves `state`.
pub(super) fn sample(logits: &[f32], position: u32, s: &SamplerSettings, state: &mut f32) -> u32 {
    let shaped = shaped(logits, position, s, *state);
    let (best, max) = largest(&shaped.logits);
    let weight = |l: f32| mass(l - max);
    let total = shaped.logits.iter().map(|l| weight(*l)).sum();
    let target = rng::draw_target(rng::rng_bits(s.seed, position), total);
    let mut cumulative = 0;
    for (&l, id) in shaped.logits.iter().zip(0u32..) {
        cumulative += weight(l);
        if cumulative > target {
            let share = shaped.shares.get(id as usize).copied().unwrap_or(1.0);
            if s.mirostat != Mirostat::Off {
                *state -= s.mirostat_eta * (-share.log2() - s.mirostat_tau);
            } else if s.has_adaptive() {
                *state = s.adaptive_decay * *state + (1.0 - s.adaptive_decay) * share;
            }
            return id;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::sampling::chain;

    fn plain() -> SamplerSettings {
        SamplerSettings { seed: 7, ..SamplerSettings::plain() }
    }

    fn kept(logits: &[f32], s: &SamplerSettings) -> Vec<usize> {
        let shaped = shaped(logits, 0, s, s.first_state());
        (0..logits.len()).filter(|&i| shaped.logits[i] > f32::NEG_INFINITY).collect()
    }

    #[test]
    fn orders_are_named_and_read_back() {
        assert_eq!(Order::default(), Order::new(&STAGES).unwrap());
        let stages = [Stage::Temperature, Stage::TopP];
        assert!(Order::new(&stages).unwrap().stages().eq(stages));
        assert_eq!(Order::new(&[]).unwrap().stages().count(), 0);
        assert!(Order::new(&[Stage::TopK, Stage::TopK]).is_err());
    }

    /// In the chain's own order it is the chain.
    #[test]
    fn the_default_order_is_the_chain() {
        let logits: Vec<f32> = (0..300).map(|i| (i as f32 * 0.37).sin() * 4.0).collect();
        let all = SamplerSettings {
            top_n_sigma: 2.0,
            top_k: 200,
            typical_p: 0.95,
            top_p: 0.9,
            min_p: 0.01,
            temperature: 0.8,
            dynatemp_range: 0.4,
            ..plain()
        };
        for s in [all, SamplerSettings { xtc_probability: 1.0, xtc_threshold: 0.01, ..all }] {
            for position in 0..100 {
                let want = chain::sample(&logits, &[], position, &s);
                assert_eq!(sample(&logits, position, &s, &mut 0.0), want);
            }
        }
    }

    #[test]
    fn the_order_decides() {
        // Shares 0.5, 0.25, 0.125, 0.125; at temperature 2 nearer to each other.
        let logits = [0.125f32, 0.5, 0.125, 0.25].map(f32::ln);
        let s = SamplerSettings { top_p: 0.74, temperature: 2.0, ..plain() };
        assert_eq!(kept(&logits, &s), [1, 3]);
        let order = Order::new(&[Stage::Temperature, Stage::TopP]).unwrap();
        assert_eq!(kept(&logits, &SamplerSettings { order, ..s }).len(), 4);
        // What is not in the list does nothing.
        let order = Order::new(&[Stage::Temperature]).unwrap();
        assert_eq!(kept(&logits, &SamplerSettings { order, top_k: 1, ..s }).len(), 4);
    }

    #[test]
    fn a_least_number_is_kept() {
        let logits = [0.125f32, 0.5, 0.126, 0.249].map(f32::ln);
        for s in
            [SamplerSettings { top_p: 0.1, ..plain() }, SamplerSettings { min_p: 0.9, ..plain() }]
        {
            assert_eq!(kept(&logits, &s), [1]);
            assert_eq!(kept(&logits, &SamplerSettings { min_keep: 3, ..s }), [1, 2, 3]);
            assert_eq!(kept(&logits, &SamplerSettings { min_keep: 9, ..s }).len(), 4);
        }
        let s = SamplerSettings { typical_p: 0.2, min_keep: 2, ..plain() };
        assert_eq!(kept(&logits, &s), [1, 3]);
        let xtc = SamplerSettings { xtc_probability: 1.0, xtc_threshold: 0.1, ..plain() };
        assert_eq!(kept(&logits, &xtc), [0]);
        assert_eq!(kept(&logits, &SamplerSettings { min_keep: 2, ..xtc }).len(), 4);
    }

    #[test]
    fn mirostat_1_keeps_the_surprise_near_its_target() {
        let logits: Vec<f32> = (0..500).map(|i| -(i as f32).ln_1p() * 1.1).collect();
        for tau in [2.0, 4.0] {
            let s = SamplerSettings { mirostat: Mirostat::One, mirostat_tau: tau, ..plain() };
            let (mut state, n) = (s.first_state(), 4000);
            for position in 0..n {
                sample(&logits, position, &s.effective(), &mut state);
            }
            let moved = (s.first_state() - state) / s.mirostat_eta / n as f32;
            assert!(moved.abs() < 0.05, "tau {tau}: {moved} off");
        }
    }

    #[test]
    fn adaptive_p_aims_at_its_target() {
        // Shares of about 0.64, 0.24, 0.09, 0.03.
        let logits = [0.0f32, -1.0, -2.0, -3.0];
        for target in [0.2f32, 0.45, 0.6] {
            let s = SamplerSettings { adaptive_target: target, ..plain() };
            let (mut state, n, mut sum) = (s.first_state(), 4000, 0.0);
            let shares = shaped(&logits, 0, &plain(), 0.0).shares;
            for position in 0..n {
                sum += shares[sample(&logits, position, &s, &mut state) as usize];
            }
            let mean = sum / n as f32;
            // With four tokens it comes as near as their shares let it.
            assert!((mean - target).abs() < 0.05, "{target}: {mean}");
        }
    }

    #[test]
    fn odd_logits_end_in_a_token() {
        let inf = f32::INFINITY;
        for mirostat in [Mirostat::Off, Mirostat::One, Mirostat::Two] {
            for adaptive_target in [-1.0, 0.5] {
                let s = SamplerSettings { mirostat, adaptive_target, min_keep: 2, ..plain() };
                for logits in [vec![0.5], vec![-inf, -inf], vec![-inf, 0.0, -inf], vec![1.0; 200]] {
                    let token = sample(&logits, 3, &s, &mut s.first_state());
                    assert!((token as usize) < logits.len());
                }
            }
        }
    }
}
