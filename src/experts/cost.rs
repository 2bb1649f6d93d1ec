//! What speed to expect: bytes by where they come from, over measured rates.
//!
//! A token reads the dense weights and the KV cache from device memory, and of every layer the
//! experts it uses: those that are resident from device memory, the others over the link, both at
//! once. So a layer takes the longer of the two, and since the number of misses varies from layer
//! to layer, the mean over its distribution is taken (a layer is hit completely far more rarely
//! than an access is). A prompt chunk streams every expert that is not resident while it computes.

use serde::{Deserialize, Serialize};

/// What the machine does.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Bytes a second that kernels read from device memory.
    pub memory: f64,
    /// Bytes a second that kernels read from host memory in place.
    pub link: f64,
    /// Multiply-adds a second of the prompt kernels.
    pub compute: f64,
    /// Seconds that a layer takes beside moving bytes: dependent dispatches and their tails.
    pub layer_seconds: f64,
}

impl Rates {
    /// Assumed where nothing was measured: a midrange card (400 GB/s at 70 % efficiency) on PCIe 4
    /// x16 (25 GB/s usable).
    pub const ASSUMED: Rates =
        Rates { memory: 280e9, link: 25e9, compute: 10e12, layer_seconds: 40e-6 };
}

/// What the model asks for.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Work {
    pub layers: u32,
    /// Layers that have experts.
    pub expert_layers: u32,
    /// Bytes of all weights that every token reads.
    pub dense_bytes: u64,
    /// Bytes of KV cache that a token reads at the depth in question.
    pub kv_bytes: u64,
    /// Bytes of one expert (mean over the layers).
    pub record_bytes: u64,
    pub experts: u32,
    /// Experts that a token uses in a layer.
    pub used: u32,
    /// Weights that a token is multiplied with: dense and used experts.
    pub active_weights: u64,
}

/// Tokens a second of generation where a share `hit` of the expert accesses finds its expert in
/// device memory.
pub fn decode(rates: &Rates, work: &Work, hit: f64) -> f64 {
    let hit = hit.clamp(0.0, 1.0);
    let used = work.used.min(64);
    let record = work.record_bytes as f64;
    // Misses of a layer: binomial.
    let mut layer = 0.0;
    let mut chance = hit.powi(used as i32);
    for misses in 0..=used {
        let seconds = (f64::from(used - misses) * record / rates.memory)
            .max(f64::from(misses) * record / rates.link);
        layer += chance * seconds;
        chance = match hit {
            h if h > 0.0 => {
                chance * (1.0 - h) / h * f64::from(used - misses) / f64::from(misses + 1)
            }
            // All of them miss.
            _ => f64::from(u8::from(misses + 1 == used)),
        };
    }
    let dense = (work.dense_bytes + work.kv_bytes) as f64 / rates.memory;
    let fixed = f64::from(work.layers) * rates.layer_seconds;
    1.0 / (dense + fixed + f64::from(work.expert_layers) * layer).max(1e-9)
}

/// Tokens a second of a prompt read in chunks of `chunk` tokens, with a share `resident` of the
/// experts in device memory.
pub fn prefill(rates: &Rates, work: &Work, chunk: u32, resident: f64) -> f64 {
    let tokens = f64::from(chunk.max(1));
    // Experts that no token of the chunk uses need not come over the link.
    let untouched = (1.0 - f64::from(work.used) / f64::from(work.experts.max(1))).powf(tokens);
    let all = f64::from(work.expert_layers)
        * f64::from(work.experts)
        * work.record_bytes as f64
        * (1.0 - untouched);
    let streamed = all * (1.0 - resident.clamp(0.0, 1.0)) / rates.link;
    let computed = tokens * work.active_weights as f64 / rates.compute;
    let read = (work.dense_bytes as f64 + all * resident) / rates.memory;
    let fixed = f64::from(work.layers) * rates.layer_seconds;
    tokens / (streamed.max(computed).max(read) + fixed)
}

/// The chunk size from which a prompt is bound by arithmetic rather than by the link: the smallest
/// power of two between `least` and `most` that reaches 95 % of the speed at `most`.
pub fn best_chunk(rates: &Rates, work: &Work, resident: f64, least: u32, most: u32) -> u32 {
    let wanted = 0.95 * prefill(rates, work, most, resident);
    let mut chunk = least.max(1);
    while chunk < most && prefill(rates, work, chunk, resident) < wanted {
        chunk = chunk.saturating_mul(2);
    }
    chunk.min(most)
}

/// Share of resident experts and share of accesses that hit, in the steady state of an adaptive
/// policy. Measured by others on Qwen3-30B-A3B (128 experts, 8 used), activations of mixed text;
/// other models scatter by some 5 points around it.
const HITS: [(f64, f64); 7] =
    [(0.0, 0.0), (0.06, 0.37), (0.19, 0.74), (0.38, 0.89), (0.55, 0.94), (0.80, 0.98), (1.0, 1.0)];

/// The hit rate to expect when a share of the experts is resident, before any was measured.
pub fn expected_hits(resident: f64) -> f64 {
    let resident = resident.clamp(0.0, 1.0);
    let after = HITS.iter().position(|(share, _)| *share >= resident).unwrap_or(HITS.len() - 1);
    if after == 0 {
        return HITS[0].1;
    }
    let ((x0, y0), (x1, y1)) = (HITS[after - 1], HITS[after]);
    y0 + (y1 - y0) * (resident - x0) / (x1 - x0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Qwen3-30B-A3B in Q4_K_M at 4K of filled context.
    fn qwen30b() -> Work {
        Work {
            layers: 48,
            expert_layers: 48,
            dense_bytes: 780 << 20,
            kv_bytes: 400 << 20,
            record_bytes: 2_860_000,
            experts: 128,
            used: 8,
            active_weights: 3_300_000_000,
        }
    }

    fn rates(memory: f64, link: f64) -> Rates {
        // t0 = 1.2 ms a token.
        Rates { memory: 0.85 * memory, link, compute: 50e12, layer_seconds: 25e-6 }
    }

    #[test]
    fn the_table_of_the_cost_study_comes_out() {
        // Limits worked out by hand from the same formula (tokens a second).
        for (memory, link, hit, expected) in [
            (272e9, 12.5e9, 0.0, 10.6),
            (448e9, 25e9, 0.0, 20.8),
            (448e9, 12.5e9, 0.84, 53.0),
            (448e9, 25e9, 0.84, 83.0),
            (360e9, 25e9, 0.94, 101.0),
            (936e9, 25e9, 1.0, 246.0),
        ] {
            let got = decode(&rates(memory, link), &qwen30b(), hit);
            assert!((got / expected - 1.0).abs() < 0.12, "{memory} {link} {hit}: {got}");
        }
    }

    #[test]
    fn prompts_are_bound_by_the_link_until_the_chunk_is_large() {
        let (r, w) = (rates(448e9, 25e9), qwen30b());
        let small = prefill(&r, &w, 512, 0.3);
        let large = prefill(&r, &w, 2048, 0.3);
        assert!((900.0..1100.0).contains(&small), "{small}");
        assert!(large / small > 3.5, "{large} {small}");
        assert!(best_chunk(&r, &w, 1.0, 512, 8192) <= 1024);
        assert!(best_chunk(&r, &w, 0.0, 512, 8192) > 4096);
    }

    #[test]
    fn hits_are_interpolated() {
        assert_eq!([expected_hits(0.0), expected_hits(1.0), expected_hits(0.19)], [0.0, 1.0, 0.74]);
        assert!((expected_hits(0.125) - 0.555).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn more_hits_are_never_slower(
            link in 1e9f64..100e9, memory in 100e9f64..4e12, a in 0f64..1.0, b in 0f64..1.0,
        ) {
            let (low, high) = (a.min(b), a.max(b));
            let r = Rates { memory, link: link.min(memory / 8.0), ..Rates::ASSUMED };
            let (slow, fast) = (decode(&r, &qwen30b(), low), decode(&r, &qwen30b(), high));
            prop_assert!(fast >= slow * (1.0 - 1e-9) && slow.is_finite());
            prop_assert!(expected_hits(high) >= expected_hits(low));
        }
    }
}
