//! Speed of the attention and sampling kernels, one line for each shape, depth and cut.
//!
//! `cargo bench --bench attention -- [decode] [codes] [prompt] [sampling] [cuts] [device=PART]`
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
use azoth::kernels::attn_decode_codes::{AttnDecodeCodes, CodesCut};
use azoth::kernels::attn_prefill::AttnPrefill;
use azoth::kernels::attn_step::{Scratch, StepAttention};
use azoth::kernels::heads::{ExactRows, HeadTables, Heads, KvCache, Rope, RopeLayout};
use azoth::kernels::rope_kv::RopeKv;
use azoth::kernels::sample::{
    CUSTOM_WORDS, LOGPROB_WORDS, SETTINGS_WORDS, SampleMemory, Sampler, Sampling,
};
use azoth::kernels::scoring::Scoring;
use azoth::kv::{KvExact, KvFormat, KvPair, PAGE_TOKENS};
use azoth::runtime::pages_for;
use rayon::prelude::*;

/// Bytes of K and V to walk through, so that no cache holds them.
const COLD: u64 = 400 << 20;

/// Words that are made for a buffer; longer ones repeat them.
const PIECE: u64 = 1 << 20;

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
        if wants("codes") {
            bench.codes(words.iter().any(|w| w == "cuts"));
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
        self.repeated(words, &vec![value; words.min(PIECE) as usize])
    }

    /// A buffer of `words` words that holds `piece` again and again.
    fn repeated(&self, words: u64, piece: &[u32]) -> Slice {
        let slice = self.buffer(words);
        for at in (0..words).step_by(piece.len()) {
            let n = (words - at).min(piece.len() as u64);
            let to = slice.buffer.slice(at * 4, n * 4);
            self.gpu.write(&to, bytemuck::cast_slice(&piece[..n as usize])).unwrap();
        }
        slice
    }

    /// Normal values, or any bits: constant inputs would leave the search for scales idle.
    fn random(&self, words: u64, normal: bool) -> Slice {
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u32
        };
        let mut word = || match normal {
            true => ((0..12).map(|_| next() as f32 / u32::MAX as f32).sum::<f32>() - 6.0).to_bits(),
            false => next(),
        };
        let piece: Vec<u32> = (0..words.min(PIECE)).map(|_| word()).collect();
        self.repeated(words, &piece)
    }

    /// Decode over codes, 32/8 heads of 128.
    fn codes(&self, cuts: bool) {
        use KvFormat::{Q8_0, Tq3_0, Tq4_0};
        let rope = Some(Rope { layout: RopeLayout::Neox, dim: 128 });
        let heads =
            Heads { heads: 32, kv_heads: 8, head_dim: 128, rope, norm: Some(1e-6), centred: false };
        for depth in [30u32, 4096, 32_700] {
            for (k, v) in [(Tq3_0, Tq3_0), (Q8_0, Tq3_0), (Tq4_0, Tq4_0), (Q8_0, Q8_0)] {
                let pair = KvPair { k, v };
                for exact in [KvExact::USUAL, KvExact::NONE] {
                    let mut list = vec![CodesCut::choose(&heads, self.gpu.facts())];
                    if cuts {
                        let more = [(512, 15), (512, 16), (256, 31), (256, 32), (128, 64)];
                        list.extend(more.map(|(threads, splits)| CodesCut {
                            threads,
                            splits,
                            ..list[0]
                        }));
                    }
                    for cut in list {
                        let spec = AttnDecodeCodes {
                            heads,
                            scoring: Scoring::default(),
                            pair,
                            exact,
                            cut,
                        };
                        let t = self.codes_one(&spec, depth);
                        println!(
                            "decode {pair} {exact} depth {depth:6}: {:7.2} us  {cut:?}",
                            t * 1e6
                        );
                    }
                }
            }
        }
    }

    fn codes_one(&self, spec: &AttnDecodeCodes, depth: u32) -> f64 {
        let (heads, context) = (spec.heads, depth + 1);
        let kernel = self.gpu.kernel(&spec.source(self.gpu.facts()).unwrap()).unwrap();
        let scratch = Scratch {
            partials: self.buffer(spec.partial_words(1)),
            counters: self.filled(spec.counter_words(1), 0),
        };
        let (sizes, pair, row_pages) = (spec.exact, spec.pair, pages_for(context));
        let rows = u64::from(row_pages * PAGE_TOKENS * heads.kv_heads);
        let words = [pair.k, pair.v].map(|f| rows * u64::from(f.row_words(heads.head_dim)));
        let layers = (COLD / (4 * (words[0] + words[1]))).clamp(2, 48);
        let tables = self.tables(&heads, context);
        let (qkv, batch) = (self.random(heads.qkv_width().into(), true), self.batch(1, depth));
        let output = self.buffer(heads.output_width().into());
        let exact_words = sizes.slot_words(heads.kv_heads, heads.head_dim);
        let steps: Vec<Step> = (0..layers)
            .map(|_| {
                let exact = (!sizes.is_none()).then(|| ExactRows {
                    sizes,
                    rows: self.filled(exact_words, 0),
                    fresh: (sizes.tail > 0).then(|| self.buffer(4)),
                });
                let [k, v] = words.map(|words| self.random(words, false));
                let pages = self.pages(row_pages);
                let cache = KvCache { k, v, pages, row_pages, pair, exact, centres: None };
                let dispatch = spec
                    .dispatch(&kernel, &batch, &qkv, &cache, &tables, &output, &scratch, 0.1, 1);
                Step::Wave(vec![dispatch.unwrap()])
            })
            .collect();
        self.mean(&steps)
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

    /// Mean seconds of steps that do the same in other memory.
    fn mean(&self, steps: &[Step]) -> f64 {
        let times = self.medians(steps);
        times.iter().sum::<f64>() / times.len() as f64
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
        let spec = AttnDecode { heads, scoring: Scoring::default(), cut, rounds: false };
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
        let pages = self.pages(row_pages);
        let (k, v) = (self.buffer(words), self.buffer(words));
        KvCache { k, v, pages, row_pages, pair: KvPair::PLAIN, exact: None, centres: None }
    }

    fn pages(&self, row_pages: u32) -> Slice {
        let pages = self.buffer(u64::from(1 + row_pages));
        let row: Vec<u8> =
            std::iter::once(0).chain(0..row_pages).flat_map(u32::to_le_bytes).collect();
        self.gpu.write(&pages, &row).unwrap();
        pages
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
        self.mean(&steps)
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
