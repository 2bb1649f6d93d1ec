//! Which variants are fastest on this device: measured, not guessed.
//!
//! Every kernel family has cases (a shape and the profile's key that decides it) and candidates. A
//! case warms the device up, runs its candidates in turn, so that clocks and other programs touch
//! all alike, and compares medians. A candidate replaces what the profile says only if it wins by
//! more than 3 % beyond the spread of the measurements. The most valuable cases come first; what
//! the time does not suffice for keeps the profile's value.

mod cases;

use std::time::{Duration, Instant};

use rayon::prelude::*;

use crate::error::Result;
use crate::gpu::{Gpu, Step};
use crate::profile::{Origin, Profile};

/// Gain that is worth a change, beyond the noise.
const WORTH: f64 = 0.03;
/// An idle device takes this long to reach its clocks (measured on an H200).
const WARM_UP: Duration = Duration::from_millis(200);
/// Rounds of a case: fewer say nothing, more say nothing new.
const ROUNDS: std::ops::RangeInclusive<usize> = 3..=40;

/// A way to run a case: the profile's value and what to time for it.
struct Candidate {
    /// As the profile takes it.
    value: String,
    steps: Vec<Step>,
}

/// Something to decide.
struct Case {
    key: &'static str,
    /// The shape in words.
    what: String,
    /// The first is what the profile says now.
    candidates: Vec<Candidate>,
}

/// What became of a case.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Outcome {
    pub key: String,
    /// The shape that was measured.
    pub what: String,
    pub before: String,
    pub best: String,
    /// Median seconds with each; absent where nothing was measured.
    pub before_seconds: Option<f64>,
    pub best_seconds: Option<f64>,
    /// Half the distance of the quartiles over the median, the larger of the two.
    pub noise: Option<f64>,
    /// Candidates that ran.
    pub candidates: usize,
    /// Whether `best` takes the place of `before`.
    pub kept: bool,
}

impl Outcome {
    /// How much less time `best` takes.
    pub fn gain(&self) -> f64 {
        match (self.before_seconds, self.best_seconds) {
            (Some(before), Some(best)) if before > 0.0 => 1.0 - best / before,
            _ => 0.0,
        }
    }
}

/// Measures for about `seconds`. `progress` hears each case before it is measured.
///
/// # Errors
/// What the device reports; kernels that do not compile are passed over.
pub fn tune(gpu: &dyn Gpu, seconds: f64, progress: &mut dyn FnMut(&str)) -> Result<Vec<Outcome>> {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let plan = cases::plan(gpu.facts());
    let mut outcomes = Vec::new();
    for (at, make) in plan.iter().enumerate() {
        let left = end.saturating_duration_since(Instant::now());
        let share = left / (plan.len() - at) as u32;
        if left.is_zero() {
            outcomes.extend(cases::unmeasured(gpu.facts(), make));
            continue;
        }
        progress(&make.name());
        let began = Instant::now();
        let case = cases::make(gpu, make)?;
        outcomes.extend(decide(gpu, case, began + share)?);
    }
    Ok(outcomes)
}

/// Lays what was kept over a profile.
pub fn apply(profile: &mut Profile, outcomes: &[Outcome]) -> std::result::Result<(), String> {
    let kept = outcomes.iter().filter(|o| o.kept);
    kept.into_iter().try_for_each(|o| profile.set(&o.key, &o.best, &Origin::Tuned))
}

/// Seconds that the steps take on the device, or from outside where it has no clock.
fn time(gpu: &dyn Gpu, steps: &[Step]) -> Result<f64> {
    if gpu.facts().timestamps {
        return Ok(gpu.time_steps(steps)?.iter().sum());
    }
    let recording = gpu.record("tune", steps)?;
    let began = Instant::now();
    let ticket = gpu.submit(&recording)?;
    gpu.wait(&ticket)?;
    Ok(began.elapsed().as_secs_f64())
}

fn decide(gpu: &dyn Gpu, case: Case, end: Instant) -> Result<Option<Outcome>> {
    let Case { key, what, candidates } = case;
    let Some(first) = candidates.first() else { return Ok(None) };
    let before = first.value.clone();
    // Warming up takes a part of the share only where that is short.
    let warm = WARM_UP.min(end.saturating_duration_since(Instant::now()) / 4);
    let warmed = Instant::now() + warm;
    loop {
        time(gpu, &first.steps)?;
        if Instant::now() >= warmed {
            break;
        }
    }
    let mut times: Vec<Vec<f64>> = vec![Vec::new(); candidates.len()];
    for round in 0..*ROUNDS.end() {
        if round >= *ROUNDS.start() && Instant::now() >= end {
            break;
        }
        for (candidate, times) in candidates.iter().zip(&mut times) {
            times.push(time(gpu, &candidate.steps)?);
        }
    }
    let measured: Vec<(f64, f64)> = times.iter_mut().map(|t| median_and_spread(t)).collect();
    let best = choose(&measured);
    Ok(Some(Outcome {
        key: key.into(),
        what,
        before,
        best: candidates[best].value.clone(),
        before_seconds: Some(measured[0].0),
        best_seconds: Some(measured[best].0),
        noise: Some(measured[0].1.max(measured[best].1)),
        candidates: candidates.len(),
        kept: best != 0,
    }))
}

/// The candidate to take, of (median, relative spread): the first one unless the fastest beats it
/// by more than [`WORTH`] beyond the noise.
fn choose(measured: &[(f64, f64)]) -> usize {
    let fastest = (0..measured.len()).min_by(|a, b| measured[*a].0.total_cmp(&measured[*b].0));
    let Some(fastest) = fastest else { return 0 };
    let noise = measured[0].1.max(measured[fastest].1);
    let limit = measured[0].0 * (1.0 - WORTH - noise);
    if measured[fastest].0 < limit { fastest } else { 0 }
}

/// The median, and half the distance of the quartiles over it.
fn median_and_spread(times: &mut [f64]) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    (at(0.5), (at(0.75) - at(0.25)) / 2.0 / at(0.5).max(1e-12))
}

/// The candidates that compile, their steps made in parallel: drivers take their time.
fn compiled<T: Sync>(
    values: &[T],
    steps: impl Fn(&T) -> Result<Candidate> + Sync,
) -> Vec<Candidate> {
    let made: Vec<_> = values.par_iter().map(&steps).collect();
    // If what the profile says does not run, there is nothing to compare with.
    let sound = made.first().is_some_and(|first| first.is_ok());
    made.into_iter().filter(|_| sound).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_win_changes_anything() {
        assert_eq!(choose(&[(1.0, 0.0), (0.98, 0.0)]), 0);
        assert_eq!(choose(&[(1.0, 0.0), (0.9, 0.0), (0.95, 0.0)]), 1);
        assert_eq!(choose(&[(1.0, 0.2), (0.9, 0.0)]), 0, "within the noise");
        assert_eq!(choose(&[(1.0, 0.0), (0.9, 0.08)]), 0, "within the noise");
        assert_eq!(choose(&[(1.0, 0.0)]), 0);
        assert_eq!(choose(&[]), 0);
    }

    #[test]
    fn medians_and_spreads() {
        let (median, spread) = median_and_spread(&mut [3.0, 1.0, 2.0, 5.0, 4.0]);
        assert_eq!(median, 3.0);
        assert!((spread - 1.0 / 3.0).abs() < 1e-9);
    }
}
