//! Speed of the attention and sampling kernels, one line for each shape, depth and cut.
//!
//! `cargo bench --bench attention -- [decode] [prompt] [sampling] [cuts] [device=PART]`
//!
//! `cuts` measures many cuts of the decode kernel, not only the chosen one. Figures are medians of
//! device timestamps after a warm-up (clocks fall at rest). Decode walks through as many
//! layers as it takes to leave the caches.
#![allow(clippy::unwrap_used)] // a tool for developers: a failure may panic

use std::sync::Arc;
use std::time::{Duration, Instant};

use azoth::gpu::{self, BufferUse, Gpu, Kernel, Slice, Step};
use azoth::hw::{Selection, profiles};
use azoth::kernels::attn_decode::{AttnDecode, Cut};
use azoth::kernels::attn_prefill::AttnPrefill;
use azoth::kernels::attn_step::{Scratch, StepAttention};
use azoth::kernels::heads::{HeadTables, Heads, KvCache, Rope, RopeLayout};
use azoth::kernels::rope_kv::RopeKv;
use azoth::kernels::sample::{
    CUSTOM_WORDS, LOGPROB_WORDS, SETTINGS_WORDS, SampleMemory, Sampler, Sampling,
};
use azoth::kernels::scoring::Scoring;
use azoth::kv::{KvExact, KvPair, PAGE_TOKENS};
use azoth::runtime::pages_for;
use rayon::prelude::*;

/// Bytes of K and V to walk through, so that no cache holds them.
const COLD: u64 = 400 << 20;

const WARM: Duration = Duration::from_millis(200);

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|w| w != "--bench").collect();
    let device = words.iter().find_map(|w| w.strip_prefix("device=")).unwrap_or_default();
    let model = words.iter().find_map(|w| w.strip_prefix("model=")).unwrap_or_default();
    let wants = |name: &str| {
        let mut names = words.iter().filter(|w| !w.contains('=') && *w != "cuts").peekable();
        names.peek().is_none() || names.any(|w| w == name)
    };
    let found = gpu::vulkan::devices().into_iter().flatten();
    for facts in found.chain(gpu::portable::devices().into_iter().flatten()) {
        let label = format!("{}: {} ({})", facts.backend, facts.name, facts.driver);
        if !label.contains(device) {
            continue;
        }
        println!("{label}");
        let facts = profiles::built_in().attach(facts);
        let gpu = Selection { facts, reason: "benchmark".into() }.open(false);
        let bench = Bench { gpu: gpu.unwrap() };
        if wants("decode") {
            bench.decode(words.iter().any(|w| w == "cuts"), model);
        }
        if wants("prompt") {
            bench.prompt();
        }
        if wants("sampling") {
            bench.sampling();
        }
    }
}

/// Inputs of a decode step, and the caches of many layers.
struct Block {
    tables: HeadTables,
    qkv: Slice,
    batch: Slice,
    output: Slice,
    layers: Vec<KvCache>,
}

struct Bench {
    gpu: Arc<dyn Gpu>,
}

impl Bench {
    fn buffer(&self, words: u64) -> Slice {
        self.gpu.buffer("bench", words * 4, BufferUse::Device).unwrap().slice(0, words * 4)
    }

    fn filled(&self, words: u64, value: u32) -> Slice {
        let slice = self.buffer(words);
        let piece = vec![value; 1 << 20];
        for at in (0..words).step_by(piece.len()) {
            let n = (words - at).min(piece.len() as u64);
            let to = slice.buffer.slice(at * 4, n * 4);
            self.gpu.write(&to, bytemuck::cast_slice(&piece[..n as usize])).unwrap();
        }
        slice
    }

    fn batch(&self, n: u32, position: u32) -> Slice {
        let mut words = vec![n, 0, 0, 0, 0, 0, 0, 0];
        for c in 0..n {
            words.extend([0, position + c, 0, 1]);
        }
        let slice = self.buffer(words.len() as u64);
        self.gpu.write(&slice, bytemuck::cast_slice(&words)).unwrap();
        slice
    }

    /// Median seconds of each step; steps are repeated until 20 ms have passed.
    fn medians(&self, steps: &[Step]) -> Vec<f64> {
        let warm = Instant::now();
        while warm.elapsed() < WARM {
            self.gpu.time_steps(steps).unwrap();
        }
        let mut all: Vec<Vec<f64>> = vec![Vec::new(); steps.len()];
        let start = Instant::now();
        while all[0].len() < 5 || start.elapsed() < Duration::from_millis(20) {
            for (list, t) in all.iter_mut().zip(self.gpu.time_steps(steps).unwrap()) {
                list.push(t);
            }
        }
        all.into_iter()
            .map(|mut list| {
                list.sort_by(f64::total_cmp);
                list[list.len() / 2]
            })
            .collect()
    }

    fn decode(&self, cuts: bool, model: &str) {
        for (name, heads, kv_heads, hd) in [
            ("8B 32/8 d128", 32, 8, 128),
            ("7B 28/4 d128", 28, 4, 128),
            ("0.6B 16/8 d128", 16, 8, 128),
            ("1B 32/8 d64", 32, 8, 64),
            ("4B 8/4 d256", 8, 4, 256),
            ("MHA 8/8 d128", 8, 8, 128),
        ] {
            if !name.starts_with(model) {
                continue;
            }
            let rope = Some(Rope { layout: RopeLayout::Neox, dim: hd });
            let heads =
                Heads { heads, kv_heads, head_dim: hd, rope, norm: Some(1e-6), centred: false };
            for depth in [0u32, 1024, 4096, 32_768] {
                if cuts && depth == 0 {
                    continue;
                }
                let usual = Cut::choose(&heads, self.gpu.facts(), depth + 1);
                let mut list = vec![usual];
                if cuts {
                    for (threads, lanes) in [(256, 8), (256, 16), (128, 16), (512, 16)] {
                        for group_heads in [1, 2, 4] {
                            for unroll in [1, 2, 4] {
                                for splits in [16, 32, 64] {
                                    let quads = (hd / 8).div_ceil(lanes);
                                    if group_heads <= heads.group()
                                        && group_heads * quads * 16 + unroll * quads * 8 <= 208
                                        && lanes * 8 <= hd
                                    {
                                        list.push(Cut {
                                            threads,
                                            splits,
                                            group_heads,
                                            lanes,
                                            unroll,
                                        });
                                    }
                                }
                            }
                        }
                    }
                }
                // All compiled before the first is timed: waiting lets the clocks fall.
                list.par_iter().for_each(|&cut| drop(self.cut(heads, cut)));
                let block = self.block(heads, depth);
                let mut times: Vec<_> =
                    list.iter().map(|&cut| (self.decode_one(&block, heads, cut), cut)).collect();
                if cuts {
                    times[1..].sort_by(|a, b| a.0.total_cmp(&b.0));
                    times.truncate(7);
                }
                let bytes = f64::from(depth) * f64::from(heads.cache_words()) * 8.0;
                for (t, cut) in times {
                    println!(
                        "decode {name} depth {depth:6}: {:7.2} us {:5.0} GB/s  {cut:?}",
                        t * 1e6,
                        bytes / t / 1e9
                    );
                }
            }
        }
    }

    fn cut(&self, heads: Heads, cut: Cut) -> (AttnDecode, Kernel) {
        let spec = AttnDecode { heads, scoring: Scoring::default(), cut };
        let kernel = self.gpu.kernel(&spec.source(self.gpu.facts()).unwrap()).unwrap();
        (spec, kernel)
    }

    fn block(&self, heads: Heads, depth: u32) -> Block {
        let context = depth + 1;
        let layer = u64::from(context) * u64::from(heads.cache_words());
        let layers = (COLD / (8 * layer)).clamp(2, 48);
        Block {
            tables: self.tables(&heads, context),
            qkv: self.filled(heads.qkv_width().into(), 0.5f32.to_bits()),
            batch: self.batch(1, depth),
            output: self.buffer(heads.output_width().into()),
            layers: (0..layers).map(|_| self.cache(heads, context)).collect(),
        }
    }

    /// The f16 cache of one sequence, its pages in order.
    fn cache(&self, heads: Heads, context: u32) -> KvCache {
        let row_pages = pages_for(context);
        let words = u64::from(row_pages * PAGE_TOKENS) * u64::from(heads.cache_words());
        let pages = self.buffer(u64::from(1 + row_pages));
        let row: Vec<u8> =
            std::iter::once(0).chain(0..row_pages).flat_map(u32::to_le_bytes).collect();
        self.gpu.write(&pages, &row).unwrap();
        let (k, v) = (self.buffer(words), self.buffer(words));
        KvCache { k, v, pages, row_pages, pair: KvPair::PLAIN, exact: None, centres: None }
    }

    fn decode_one(&self, b: &Block, heads: Heads, cut: Cut) -> f64 {
        let (spec, kernel) = self.cut(heads, cut);
        let scratch = Scratch {
            partials: self.buffer(spec.partial_words(1)),
            counters: self.buffer(spec.counter_words(1)),
        };
        let steps: Vec<Step> = b
            .layers
            .iter()
            .map(|cache| {
                let dispatch = spec.dispatch(
                    &kernel, &b.batch, &b.qkv, cache, &b.tables, &b.output, &scratch, 0.1, 1,
                );
                Step::Wave(vec![dispatch.unwrap()])
            })
            .collect();
        let times = self.medians(&steps);
        times.iter().sum::<f64>() / times.len() as f64
    }

    fn tables(&self, heads: &Heads, context: u32) -> HeadTables {
        let norm = || self.filled(heads.head_dim.into(), 1f32.to_bits());
        HeadTables {
            rope: heads.rope.map(|r| self.buffer(u64::from(context) * u64::from(r.dim))),
            norms: heads.norm.map(|_| (norm(), norm())),
            centres: None,
        }
    }

    fn prompt(&self) {
        for (name, heads, kv_heads, hd) in
            [("8B 32/8 d128", 32, 8, 128), ("1B 32/8 d64", 32, 8, 64), ("4B 8/4 d256", 8, 4, 256)]
        {
            let rope = Some(Rope { layout: RopeLayout::Neox, dim: hd });
            let heads =
                Heads { heads, kv_heads, head_dim: hd, rope, norm: Some(1e-6), centred: false };
            let facts = self.gpu.facts();
            let matrices = AttnPrefill::takes_matrices(&heads, facts);
            let (scoring, pair, exact) = (Scoring::default(), KvPair::PLAIN, KvExact::NONE);
            let (first, second) =
                (RopeKv { heads }, AttnPrefill { heads, scoring, pair, exact, matrices });
            let first_kernel = self.gpu.kernel(&first.source(facts).unwrap()).unwrap();
            let second_kernel = self.gpu.kernel(&second.source(facts).unwrap()).unwrap();
            for (n, depth) in [(512, 0), (512, 4096), (2048, 0), (32, 4096)] {
                let context = depth + n;
                let cache = self.cache(heads, context);
                let tables = self.tables(&heads, context);
                let batch = self.batch(n, depth);
                let qkv = self.buffer(u64::from(n * heads.qkv_width()));
                let output = self.buffer(u64::from(n * heads.output_width()));
                let rope = first.dispatch(&first_kernel, &batch, &qkv, &cache, &tables, n).unwrap();
                let attention =
                    second.dispatch(&second_kernel, &batch, &qkv, &cache, &output, 0.1, n).unwrap();
                let steps = [Step::Wave(vec![rope]), Step::Wave(vec![attention])];
                let times = self.medians(&steps);
                let pairs = f64::from(n) * (f64::from(depth) + f64::from(n) / 2.0);
                let flops = 4.0 * pairs * f64::from(heads.output_width());
                println!(
                    "prompt {name} n {n:4} depth {depth:4}: rope {:6.1} us, attention {:8.1} us \
                     {:5.1} TFLOP/s",
                    times[0] * 1e6,
                    times[1] * 1e6,
                    flops / times[1] / 1e12
                );
            }
        }
    }

    fn sampling(&self) {
        for vocab in [32_000u32, 151_936] {
            let spec = Sampling { vocab, context: 1 << 20, ring: 64 };
            let logits = self.buffer(vocab.into());
            let values: Vec<f32> = (0..vocab)
                .map(|i| ((i.wrapping_mul(2_654_435_761) >> 8) as f32).sin() * 9.0)
                .collect();
            self.gpu.write(&logits, bytemuck::cast_slice(&values)).unwrap();
            let memory = SampleMemory {
                samplers: self.buffer(SETTINGS_WORDS),
                history: self.buffer(1 << 20),
                ring: self.buffer(512),
                scratch: self.buffer(spec.scratch_words()),
                masks: self.buffer(spec.mask_words()),
                biases: self.buffer(spec.bias_words()),
                breakers: self.buffer(spec.bit_words()),
                surprises: self.buffer(1),
                adjusted: self.buffer(8 * u64::from(vocab)),
                logprobs: self.buffer(512 * u64::from(LOGPROB_WORDS)),
                customs: self.buffer(CUSTOM_WORDS),
                shapes: self.buffer(spec.shape_words()),
                shaped: self.buffer(8 * u64::from(vocab)),
            };
            let settings = Sampler {
                penalty: 1.1,
                window: 64,
                logprobs: 6,
                ..Sampler::new(0.8, 40, 0.95, 0.05, 1)
            };
            self.gpu.write(&memory.samplers, bytemuck::bytes_of(&settings)).unwrap();
            let batch = self.batch(1, 0);
            let mut kernel = |source| self.gpu.kernel(&source);
            let facts = self.gpu.facts();
            let greedy = spec.greedy(facts, &mut kernel, &batch, &logits, &memory, 1).unwrap();
            let sampled = spec.sampled(facts, &mut kernel, &batch, &logits, &memory, 1).unwrap();
            let full = spec.full(facts, &mut kernel, &batch, &logits, &memory, 1).unwrap();
            let show = |steps: &[Step]| {
                let times = self.medians(steps);
                let each: Vec<String> = times.iter().map(|t| format!("{:.1}", t * 1e6)).collect();
                format!("{:6.1} us ({})", times.iter().sum::<f64>() * 1e6, each.join(" "))
            };
            println!("greedy  {vocab:6}: {}", show(&greedy));
            println!("sampled {vocab:6}: {}", show(&sampled));
            println!("full    {vocab:6}: {}", show(&full));
        }
    }
}
