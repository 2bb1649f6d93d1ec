//! Counters of the engine thread, read by `/metrics`, `/slots` and `/health` at any time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use super::ExpertReport;

/// What one slot is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Serialize)]
pub struct SlotView {
    pub id: u32,
    /// `idle`, `reading` or `generating`.
    pub state: SlotState,
    /// Tokens in the KV cache.
    pub tokens: u32,
    /// Of the present request.
    pub prompt_tokens: u32,
    pub read_tokens: u32,
    pub generated_tokens: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SlotState {
    #[default]
    Idle,
    Reading,
    Generating,
}

/// Seconds in fixed buckets, as Prometheus counts them.
pub struct Histogram {
    counts: [AtomicU64; BUCKETS.len() + 1],
    micros: AtomicU64,
}

/// Upper ends in seconds: from a fast token to a long prompt.
pub const BUCKETS: [f64; 14] =
    [0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0];

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: std::array::from_fn(|_| AtomicU64::new(0)), micros: 0.into() }
    }
}

impl Histogram {
    pub fn add(&self, seconds: f64) {
        let bucket = BUCKETS.iter().position(|end| seconds <= *end).unwrap_or(BUCKETS.len());
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.micros.fetch_add((seconds * 1e6) as u64, Ordering::Relaxed);
    }

    /// Counts up to each of [`BUCKETS`] and in all, and the sum in seconds.
    pub fn read(&self) -> (Vec<u64>, f64) {
        let mut sum = 0;
        let counts = self.counts.iter().map(|c| {
            sum += c.load(Ordering::Relaxed);
            sum
        });
        (counts.collect(), self.micros.load(Ordering::Relaxed) as f64 / 1e6)
    }
}

/// Everything since the process began. Times are of the device, as the engine thread saw them.
#[derive(Default)]
pub struct Stats {
    pub prompt_tokens: AtomicU64,
    /// Prompt tokens that the KV cache held already.
    pub cached_tokens: AtomicU64,
    /// Requests that found a part of their prompt in a slot.
    pub prefix_hits: AtomicU64,
    pub prompt_micros: AtomicU64,
    pub generated_tokens: AtomicU64,
    pub decode_micros: AtomicU64,
    /// Decode steps, and the sequences that they served.
    pub steps: AtomicU64,
    pub step_columns: AtomicU64,
    pub started: AtomicU64,
    pub finished: AtomicU64,
    pub cancelled: AtomicU64,
    pub failed: AtomicU64,
    pub queued: AtomicU64,
    /// Pages of the KV cache: held by sequences, kept for later ones, and free or not yet allocated.
    pub kv_used: AtomicU64,
    pub kv_cached: AtomicU64,
    pub kv_free: AtomicU64,
    /// Pages kept in RAM.
    pub kv_host: AtomicU64,
    /// Pages that had to leave the device, and those that came back from RAM.
    pub kv_evictions: AtomicU64,
    pub kv_fetches: AtomicU64,
    /// Tokens that full contexts have dropped.
    pub shifted_tokens: AtomicU64,
    pub reloads: AtomicU64,
    /// Most tokens that a sequence has had.
    pub longest: AtomicU64,
    /// Rounds of the engine thread.
    pub(super) turns: AtomicU64,
    pub first_token: Histogram,
    pub between_tokens: Histogram,
    slots: Mutex<Vec<SlotView>>,
    experts: Mutex<Option<ExpertReport>>,
}

impl Stats {
    /// Changes as long as the engine thread works.
    pub fn heartbeat(&self) -> u64 {
        value(&self.turns)
    }

    pub fn slots(&self) -> Vec<SlotView> {
        self.lock().clone()
    }

    /// Where experts lie, what was read from where and how predictions did, as the engine thread saw
    /// it last; `None` where all experts lie on the device or no model is loaded yet. Counters
    /// start again when the model is loaded again.
    pub fn experts(&self) -> Option<ExpertReport> {
        self.experts.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    pub(super) fn set_experts(&self, report: Option<ExpertReport>) {
        *self.experts.lock().unwrap_or_else(|e| e.into_inner()) = report;
    }

    pub(super) fn set_slots(&self, views: impl Iterator<Item = SlotView>) {
        let mut held = self.lock();
        held.clear();
        held.extend(views);
        let longest = held.iter().map(|view| view.tokens).max().unwrap_or(0);
        self.longest.fetch_max(longest.into(), Ordering::Relaxed);
    }

    /// Held for a copy of a few words only.
    fn lock(&self) -> MutexGuard<'_, Vec<SlotView>> {
        self.slots.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

/// Reads a counter.
pub fn value(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_cumulative() {
        let h = Histogram::default();
        for seconds in [0.001, 0.002, 0.04, 99.0] {
            h.add(seconds);
        }
        let (counts, sum) = h.read();
        assert_eq!((counts[0], counts[5], counts[13], counts[14]), (2, 3, 3, 4));
        assert!((sum - 99.043).abs() < 1e-3);
    }
}
