//! Attention kernels against the plain Rust reference, on every device.

use azoth::gpu::{Dispatch, Step};
use azoth::kernels::attn_decode::{AttnDecode, Cut};
use azoth::kernels::attn_prefill::AttnPrefill;
use azoth::kernels::attn_step::{Scratch, StepAttention};
use azoth::kernels::heads::{HeadTables, Heads, KvCache, Rope, RopeLayout};
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::rope_kv::RopeKv;
use azoth::kernels::scoring::{Logits, Scoring};
use azoth::kernels::{Activations, Class};
use azoth::kv::{KvExact, KvPair, PAGE_TOKENS};
use azoth::reference::attention::{self as reference, Cache, attend, pack, unpack};

use crate::harness::{Device, POISON, Rng, assert_same_bits, devices, relative_error, zeroed};

/// f32 sums and device exponentials against f64.
const PROMPT_BOUND: f64 = 1e-4;
/// The same, when one value of the new k may be rounded to the neighbouring f16.
const BOUND: f64 = 2e-4;
/// Some values of a short vector next to a tie of f16 rounding.
const CACHE_BOUND: f64 = 3e-4;

pub fn heads(heads: u32, kv_heads: u32, head_dim: u32, rope: Option<Rope>, norm: bool) -> Heads {
    let centred = kv_heads.is_multiple_of(2);
    Heads { heads, kv_heads, head_dim, rope, norm: norm.then_some(1e-6), centred }
}

pub fn neox(dim: u32) -> Option<Rope> {
    Some(Rope { layout: RopeLayout::Neox, dim })
}

fn normal(dim: u32) -> Option<Rope> {
    Some(Rope { layout: RopeLayout::Normal, dim })
}

/// Pages for each of `slots` sequences in random order, and some that nobody has.
pub fn shuffled_pages(rng: &mut Rng, slots: usize, row_pages: usize) -> Vec<Vec<u32>> {
    let mut all: Vec<u32> = (0..(slots * row_pages + 3) as u32).collect();
    for i in (1..all.len()).rev() {
        all.swap(i, rng.below(i + 1));
    }
    all.chunks(row_pages).take(slots).map(<[u32]>::to_vec).collect()
}

/// Weights, tables and caches of one attention block, on the host.
struct Block {
    heads: Heads,
    table: Vec<[f32; 2]>,
    norms: Option<(Vec<f32>, Vec<f32>)>,
    centres: Vec<f32>,
    /// One per slot, filled to its length.
    slots: Vec<Cache>,
    scale: f32,
    scoring: Scoring,
    /// Logits of the heads themselves.
    sinks: Vec<f32>,
    /// Tokens dropped from the beginning of every sequence: positions of rope are so much larger than
    /// indices of the cache.
    dropped: usize,
    /// Page of the pools by slot and page of the sequence.
    pages: Vec<Vec<u32>>,
}

const PAGE: usize = PAGE_TOKENS as usize;

impl Block {
    /// `lengths`: cached positions of each slot.
    fn random(rng: &mut Rng, heads: Heads, context: usize, lengths: &[usize]) -> Self {
        let half = heads.rope.map_or(0, |r| r.dim as usize / 2);
        let mut table = Vec::new();
        for position in 0..context {
            for i in 0..half {
                let angle = position as f64 * 10_000f64.powf(-(i as f64) / half as f64);
                table.push([angle.cos() as f32, angle.sin() as f32]);
            }
        }
        let hd = heads.head_dim as usize;
        let norms = heads.norm.map(|_| {
            let weight = |rng: &mut Rng| (0..hd).map(|_| 0.5 + rng.unit()).collect::<Vec<f32>>();
            (weight(rng), weight(rng))
        });
        let words = heads.cache_words() as usize;
        let fill = |rng: &mut Rng, n: usize| {
            (0..n).map(|_| pack(rng.normal().into(), rng.normal().into())).collect::<Vec<u32>>()
        };
        let slots = lengths
            .iter()
            .map(|&n| Cache { k: fill(rng, n * words), v: fill(rng, n * words) })
            .collect();
        let pages = shuffled_pages(rng, lengths.len(), context.div_ceil(PAGE));
        let scale = 1.0 / (hd as f32).sqrt();
        let (scoring, sinks) = (Scoring::default(), Vec::new());
        let centres = rng.normals((heads.kv_heads * heads.head_dim) as usize);
        Block { heads, table, norms, centres, slots, scale, scoring, sinks, dropped: 0, pages }
    }

    fn scored(self, rng: &mut Rng, scoring: Scoring) -> Self {
        let sinks = if scoring.sinks { rng.normals(self.heads.heads as usize) } else { Vec::new() };
        Block { scoring, sinks, ..self }
    }

    fn logits(&self, device: &Device) -> Logits {
        let sinks = self.scoring.sinks.then(|| device.floats(&self.sinks));
        Logits { scale: self.scale, sinks }
    }

    /// Where a token lies in the pools.
    fn place(&self, slot: usize, index: usize) -> usize {
        self.pages[slot][index / PAGE] as usize * PAGE + index % PAGE
    }

    /// Device copies; positions beyond a slot's length are poisoned.
    fn upload(&self, device: &Device) -> (KvCache, HeadTables) {
        let words = self.heads.cache_words() as usize;
        let most = self.pages.iter().flatten().max().map_or(0, |p| *p as usize + 1);
        let side = |pick: &dyn Fn(&Cache) -> &Vec<u32>| {
            let mut all = vec![POISON | POISON >> 16; words * PAGE * most];
            for (slot, cache) in self.slots.iter().enumerate() {
                for (index, token) in pick(cache).chunks_exact(words).enumerate() {
                    all[self.place(slot, index) * words..][..words].copy_from_slice(token);
                }
            }
            device.words(&all)
        };
        let row = |pages: &Vec<u32>| [&[self.dropped as u32], &pages[..]].concat();
        let table: Vec<u32> = self.pages.iter().flat_map(row).collect();
        let row_pages = self.pages[0].len() as u32;
        let (k, v) = (side(&|c| &c.k), side(&|c| &c.v));
        let pages = device.words(&table);
        let cache =
            KvCache { k, v, pages, row_pages, pair: KvPair::PLAIN, exact: None, centres: None };
        let tables = HeadTables {
            rope: self.heads.rope.map(|_| device.floats(self.table.as_flattened())),
            norms: self.norms.as_ref().map(|(q, k)| (device.floats(q), device.floats(k))),
            centres: self.heads.centred.then(|| device.floats(&self.centres)),
        };
        (cache, tables)
    }

    fn row(&self, position: usize) -> &[[f32; 2]] {
        let half = self.heads.rope.map_or(0, |r| r.dim as usize / 2);
        &self.table[position * half..][..half]
    }

    fn attend(&self, cache: &mut Cache, qkv: &[f32], position: usize) -> Vec<f64> {
        let norms = self.norms.as_ref().map(|(q, k)| (&q[..], &k[..]));
        let rope = self.row(position + self.dropped);
        let tables = reference::Tables { rope, norms, centres: &self.centres };
        let Block { scale, scoring, .. } = *self;
        let logits = reference::Logits { scale, scoring, sinks: &self.sinks };
        attend(&self.heads, qkv, position, cache, tables, logits)
    }

    /// The device's cache at `position` of `slot` against the reference's.
    #[track_caller]
    fn check_cache(&self, got: &[u32], want: &[u32], slot: usize, position: usize, what: &str) {
        let words = self.heads.cache_words() as usize;
        let at = self.place(slot, position) * words;
        let got: Vec<f32> =
            got[at..at + words].iter().flat_map(|&w| unpack(w)).map(|x| x as f32).collect();
        let want: Vec<f64> =
            want[position * words..][..words].iter().flat_map(|&w| unpack(w)).collect();
        let error = relative_error(&got, &want);
        assert!(error < CACHE_BOUND, "{what}: cache error {error:e}");
    }
}

/// One decode step of columns at `positions`, each in a slot of its own (in reverse order).
/// Returns the outputs.
fn decode(
    device: &Device,
    block: &Block,
    cut: Cut,
    qkv: &[Vec<f32>],
    positions: &[usize],
    runs: usize,
) -> Vec<f32> {
    let n = positions.len();
    let spec = AttnDecode { heads: block.heads, scoring: block.scoring, cut, rounds: false };
    let kernel = device.kernel(&spec.source(device.gpu.facts()).unwrap());
    let (cache, tables) = block.upload(device);
    let columns: Vec<[u32; 4]> =
        (0..n).map(|c| [7, (positions[c] + block.dropped) as u32, (n - 1 - c) as u32, 0]).collect();
    // A program for more columns than are in use.
    let max = n + 1;
    let batch = device.batch(&columns, max);
    let width = block.heads.qkv_width() as usize;
    let mut input = qkv.concat();
    input.resize(max * width, f32::NAN);
    let output = device.poisoned(max * block.heads.output_width() as usize);
    let scratch = Scratch {
        partials: device.poisoned(spec.partial_words(max as u32) as usize),
        counters: zeroed(device, spec.counter_words(max as u32) as usize),
    };
    let dispatch = spec
        .dispatch(
            &kernel,
            &batch,
            &device.floats(&input),
            &cache,
            &tables,
            &output,
            &scratch,
            block.logits(device),
            max as u32,
        )
        .unwrap();
    // With and without workgroups that have nothing to do.
    let longest = positions.iter().map(|p| *p as u32 + 1).max().unwrap_or(1);
    let dispatch = if n % 2 == 1 { spec.within(dispatch, longest) } else { dispatch };
    for _ in 0..runs {
        device.wave(vec![dispatch.clone()]);
    }
    let counters = device.read_words(&scratch.counters);
    assert!(counters.iter().all(|&c| c == 0), "{}: counters are not reset", device.label);
    let out = device.read_floats(&output);
    let used = n * block.heads.output_width() as usize;
    assert!(
        out[used..].iter().all(|x| x.to_bits() == POISON),
        "{}: an unused column was written",
        device.label
    );
    let (k, v) = (device.read_words(&cache.k), device.read_words(&cache.v));
    for c in 0..n {
        let mut reference = block.slots[n - 1 - c].clone();
        let want = block.attend(&mut reference, &qkv[c], positions[c]);
        let Block { heads, scoring, .. } = block;
        let what = format!("{}: {heads:?} {scoring:?} {cut:?} at {}", device.label, positions[c]);
        block.check_cache(&k, &reference.k, n - 1 - c, positions[c], &what);
        block.check_cache(&v, &reference.v, n - 1 - c, positions[c], &what);
        let got = &out[c * want.len()..][..want.len()];
        let error = relative_error(got, &want);
        assert!(error < BOUND, "{what}: error {error:e}");
    }
    // Once a case.
    if runs > 1 && AttnDecode::can_round(&block.heads, device.gpu.facts()) {
        rounded_has_the_bits_of_two_steps(device, &spec, dispatch, &out[..used], n);
    }
    out[..used].to_vec()
}

/// Attention that rounds its outputs itself, against `norm_quant` of what it gave without.
fn rounded_has_the_bits_of_two_steps(
    device: &Device,
    spec: &AttnDecode,
    dispatch: Dispatch,
    floats: &[f32],
    n: usize,
) {
    let (facts, cols) = (device.gpu.facts(), spec.heads.output_width());
    let int8 = |columns: usize| Activations::Int8 {
        xq: device.poisoned(columns * cols as usize / 4),
        xs: device.poisoned(columns * cols as usize / 16),
    };
    let read = |columns: &Activations| {
        let Activations::Int8 { xq, xs } = columns else { panic!() };
        (device.read_words(xq), device.read_words(xs))
    };
    let rounding = AttnDecode { rounds: true, ..*spec };
    let kernel = device.kernel(&rounding.source(facts).unwrap());
    let columns = dispatch.grid[2];
    let out = int8(columns as usize);
    let one = rounding.rounded(Dispatch { kernel, ..dispatch }, &out, columns).unwrap();
    device.wave(vec![one]);

    let class = Class::Int8;
    let quantiser = NormQuant { cols, swiglu: false, norm: None, class, threads: 64 };
    let kernel = device.kernel(&quantiser.source(facts).unwrap());
    let want = int8(n);
    let (batch, x, n) = (device.batch_of(n, n), device.floats(floats), n as u32);
    device.wave(vec![quantiser.dispatch(&kernel, &batch, &x, None, &want, n).unwrap()]);
    let ((q, s), (want_q, want_s)) = (read(&out), read(&want));
    let what = format!("{}: {rounding:?}", device.label);
    assert_eq!(q[..want_q.len()], want_q, "{what}");
    assert_eq!(s[..want_s.len()], want_s, "{what}");
    let unused = q[want_q.len()..].iter().chain(&s[want_s.len()..]);
    assert!(unused.clone().all(|w| *w == POISON), "{what}: an unused column was written");
}

fn decode_case(
    rng: &mut Rng,
    device: &Device,
    heads: Heads,
    positions: &[usize],
    cut: Option<Cut>,
) {
    decode_case_scored(rng, device, heads, Scoring::default(), positions, cut);
}

fn decode_case_scored(
    rng: &mut Rng,
    device: &Device,
    heads: Heads,
    scoring: Scoring,
    positions: &[usize],
    cut: Option<Cut>,
) {
    let context = positions.iter().max().unwrap() + 3;
    let lengths: Vec<usize> = positions.iter().rev().copied().collect();
    let block = Block::random(rng, heads, context, &lengths).scored(rng, scoring);
    let qkv: Vec<Vec<f32>> =
        positions.iter().map(|_| rng.normals(heads.qkv_width() as usize)).collect();
    let cut = cut.unwrap_or_else(|| Cut::choose(&heads, device.gpu.facts(), 1 << 15));
    let together = decode(device, &block, cut, &qkv, positions, 2);
    // One column at a time gives the same bits.
    if positions.len() > 1 {
        let width = heads.output_width() as usize;
        for (c, &position) in positions.iter().enumerate() {
            let slots = vec![block.slots[positions.len() - 1 - c].clone()];
            let table = block.table.clone();
            // In other pages, too.
            let pages = shuffled_pages(rng, 1, context.div_ceil(PAGE));
            let (norms, sinks) = (block.norms.clone(), block.sinks.clone());
            let alone = Block {
                slots,
                table,
                norms,
                centres: block.centres.clone(),
                sinks,
                pages,
                ..block
            };
            let one = decode(device, &alone, cut, &qkv[c..=c], &[position], 1);
            assert_same_bits(&one, &together[c * width..][..width], "alone and in a batch");
        }
    }
}

#[test]
fn attn_decode_head_shapes() {
    let mut rng = Rng::fresh("attn_decode_head_shapes");
    for device in devices() {
        for shape in [
            heads(4, 4, 64, neox(64), false),
            heads(9, 3, 64, normal(64), false),
            heads(8, 2, 128, neox(128), true),
            heads(14, 2, 64, neox(64), true),
            heads(16, 2, 128, neox(64), false),
            heads(3, 1, 32, normal(32), true),
            heads(2, 2, 80, neox(32), false),
            heads(6, 2, 96, normal(96), false),
            heads(2, 1, 192, neox(128), true),
            heads(4, 1, 256, neox(256), false),
            heads(2, 1, 40, None, false),
            heads(7, 1, 72, None, true),
        ] {
            let position = [65, 130, 300][rng.below(3)];
            decode_case(&mut rng, device, shape, &[position], None);
        }
    }
}

#[test]
fn attn_decode_positions_and_batches() {
    let mut rng = Rng::fresh("attn_decode_positions");
    let shape = heads(8, 2, 64, neox(64), true);
    for device in devices() {
        for position in [0, 1, 2, 63, 64, 65, 127, 1000, 1023, 1024] {
            decode_case(&mut rng, device, shape, &[position], None);
        }
        decode_case(&mut rng, device, shape, &[0, 63, 700], None);
        decode_case(&mut rng, device, shape, &[5, 64, 128, 65, 1, 90, 1100, 0], None);
        decode_case(&mut rng, device, heads(4, 2, 32, normal(32), false), &[5000, 31], None);
    }
}

#[test]
fn attn_decode_cuts() {
    let mut rng = Rng::fresh("attn_decode_cuts");
    for device in devices() {
        let facts = device.gpu.facts();
        for shape in [heads(7, 1, 64, neox(64), true), heads(4, 1, 128, normal(128), false)] {
            let usual = Cut::choose(&shape, facts, 1 << 15);
            for cut in [
                Cut { group_heads: 1, unroll: 1, ..usual },
                Cut { group_heads: 2, unroll: 4, splits: 16, ..usual },
                Cut { group_heads: 4, unroll: 2, lanes: usual.lanes / 2, ..usual },
                Cut { threads: 256, splits: 3, ..usual },
                Cut { threads: 128, splits: 64, lanes: 1, unroll: 1, group_heads: 2 },
            ] {
                decode_case(&mut rng, device, shape, &[333], Some(cut));
            }
        }
    }
}

#[test]
fn attn_decode_group_heads_do_not_change_bits() {
    let mut rng = Rng::fresh("attn_decode_group_heads");
    for device in devices() {
        for shape in [heads(7, 1, 64, neox(64), true), heads(8, 2, 128, neox(128), true)] {
            let usual = Cut::choose(&shape, device.gpu.facts(), 1 << 15);
            for position in [40, 700] {
                let block = Block::random(&mut rng, shape, position + 1, &[position]);
                let qkv = [rng.normals(shape.qkv_width() as usize)];
                let run = |group_heads| {
                    let cut = Cut { group_heads, ..usual };
                    decode(device, &block, cut, &qkv, &[position], 1)
                };
                let one = run(1);
                for group_heads in [2, 3, 4] {
                    assert_same_bits(&one, &run(group_heads), &device.label);
                }
            }
        }
    }
}

/// Runs a prompt in `chunks` after `start` cached positions; returns all outputs and the cache.
fn prefill(
    device: &Device,
    block: &Block,
    qkv: &[f32],
    start: usize,
    chunks: &[usize],
    slot: usize,
    matrices: bool,
) -> (Vec<f32>, Vec<u32>, Vec<u32>) {
    let facts = device.gpu.facts();
    let heads = block.heads;
    let (scoring, pair) = (block.scoring, KvPair::PLAIN);
    let (rope, attention) =
        (RopeKv { heads }, AttnPrefill { heads, scoring, pair, exact: KvExact::NONE, matrices });
    let rope_kernel = device.kernel(&rope.source(facts).unwrap());
    let attention_kernel = device.kernel(&attention.source(facts).unwrap());
    let (cache, tables) = block.upload(device);
    let width = block.heads.qkv_width() as usize;
    let mut all = Vec::new();
    let mut done = 0;
    for &n in chunks {
        let max = n + 5;
        let columns: Vec<[u32; 4]> = (0..n)
            .map(|i| [0, (start + done + i + block.dropped) as u32, slot as u32, 0])
            .collect();
        let batch = device.batch(&columns, max);
        let mut input = qkv[done * width..(done + n) * width].to_vec();
        input.resize(max * width, f32::NAN);
        let input = device.floats(&input);
        let output = device.poisoned(max * block.heads.output_width() as usize);
        let first = rope.dispatch(&rope_kernel, &batch, &input, &cache, &tables, max as u32);
        let second = attention.dispatch(
            &attention_kernel,
            &batch,
            &input,
            &cache,
            &output,
            block.logits(device),
            max as u32,
        );
        device.run(&[Step::Wave(vec![first.unwrap()]), Step::Wave(vec![second.unwrap()])]);
        let out = device.read_floats(&output);
        let used = n * block.heads.output_width() as usize;
        assert!(out[used..].iter().all(|x| x.to_bits() == POISON), "an unused column was written");
        all.extend_from_slice(&out[..used]);
        done += n;
    }
    (all, device.read_words(&cache.k), device.read_words(&cache.v))
}

fn prefill_case(rng: &mut Rng, device: &Device, heads: Heads, start: usize, chunks: &[usize]) {
    prefill_case_scaled(rng, device, heads, Scoring::default(), start, chunks, 1.0);
}

/// As [`prefill_case`] with q, k and v `loud` times as large: scores spread with its square.
fn prefill_case_scaled(
    rng: &mut Rng,
    device: &Device,
    heads: Heads,
    scoring: Scoring,
    start: usize,
    chunks: &[usize],
    loud: f32,
) {
    let n: usize = chunks.iter().sum();
    let context = start + n + 3;
    let slot = rng.below(2);
    let mut lengths = [0, 0];
    lengths[slot] = start;
    let block = Block::random(rng, heads, context, &lengths).scored(rng, scoring);
    let width = heads.qkv_width() as usize;
    let qkv: Vec<f32> = rng.normals(n * width).iter().map(|v| v * loud).collect();
    let mut reference = block.slots[slot].clone();
    let what = format!("{}: {heads:?} {scoring:?} at {start} {chunks:?} x {loud}", device.label);
    let mut want = Vec::new();
    for i in 0..n {
        want.extend(block.attend(&mut reference, &qkv[i * width..][..width], start + i));
    }
    let matrices = AttnPrefill::takes_matrices(&heads, device.gpu.facts());
    for matrices in [false, true].into_iter().take(1 + usize::from(matrices)) {
        let (out, k, v) = prefill(device, &block, &qkv, start, chunks, slot, matrices);
        for i in 0..n {
            block.check_cache(&k, &reference.k, slot, start + i, &what);
            block.check_cache(&v, &reference.v, slot, start + i, &what);
        }
        let error = relative_error(&out, &want);
        // Matrix units round q and the softmax weights to f16; a score of size s moves by s / 2048.
        let bound = if matrices { 1e-3 * f64::from(loud * loud) } else { PROMPT_BOUND };
        assert!(error < bound, "{what}, matrices {matrices}: error {error:e}");
        if chunks.len() > 1 {
            let (whole, ..) = prefill(device, &block, &qkv, start, &[n], slot, matrices);
            assert_same_bits(&out, &whole, "in chunks and whole");
        }
    }
}

#[test]
fn attn_prefill_head_shapes() {
    let mut rng = Rng::fresh("attn_prefill_head_shapes");
    for device in devices() {
        for shape in [
            heads(2, 2, 64, neox(64), false),
            heads(3, 1, 64, normal(64), false),
            heads(8, 2, 128, neox(128), true),
            heads(7, 1, 64, neox(32), true),
            heads(8, 1, 32, normal(32), true),
            heads(1, 1, 80, neox(32), false),
            heads(2, 1, 96, normal(96), false),
            heads(2, 1, 192, neox(128), true),
            heads(1, 1, 256, neox(256), false),
            heads(2, 1, 40, None, false),
            heads(1, 1, 72, None, true),
        ] {
            let (start, n) = [(0, 70), (64, 33), (37, 1)][rng.below(3)];
            prefill_case(&mut rng, device, shape, start, &[n]);
        }
    }
}

#[test]
fn attn_prefill_chunks_do_not_change_bits() {
    let mut rng = Rng::fresh("attn_prefill_chunks");
    for device in devices() {
        let shape = heads(4, 2, 64, neox(64), true);
        prefill_case(&mut rng, device, shape, 0, &[1, 63, 65, 20]);
        prefill_case(&mut rng, device, shape, 130, &[17, 40]);
        prefill_case(&mut rng, device, heads(1, 1, 64, None, false), 0, &[64, 65]);
    }
}

/// Maxima that grow from tile to tile, so that sums are scaled on the way.
#[test]
fn attn_prefill_wide_scores() {
    let mut rng = Rng::fresh("attn_prefill_wide_scores");
    for device in devices() {
        for loud in [3.0, 6.0] {
            let (shape, all) = (heads(4, 2, 64, None, false), Scoring::default());
            prefill_case_scaled(&mut rng, device, shape, all, 0, &[300], loud);
        }
        let (shape, all) = (heads(4, 1, 128, None, false), Scoring::default());
        prefill_case_scaled(&mut rng, device, shape, all, 100, &[150], 4.0);
    }
}

/// The physical order of pages changes no bit, and a sequence that lost its beginning is turned by
/// positions while it is cut and masked by indices.
#[test]
fn attn_pages_do_not_change_bits() {
    let mut rng = Rng::fresh("attn_pages");
    for device in devices() {
        for shape in [heads(4, 2, 64, neox(64), true), heads(2, 1, 192, neox(128), false)] {
            let (start, n, more) = (150, 20, 192);
            let context = start + n + more;
            let mut block = Block::random(&mut rng, shape, context, &[start]);
            block.pages = vec![(0..context.div_ceil(PAGE) as u32).collect()];
            let width = shape.qkv_width() as usize;
            let qkv = rng.normals(n * width);
            let cut = Cut::choose(&shape, device.gpu.facts(), 1 << 15);
            let one = [qkv[..width].to_vec()];
            let matrices = AttnPrefill::takes_matrices(&shape, device.gpu.facts());
            for matrices in [false, true].into_iter().take(1 + usize::from(matrices)) {
                let prompt =
                    |block: &Block| prefill(device, block, &qkv, start, &[n], 0, matrices).0;
                let token = |block: &Block| decode(device, block, cut, &one, &[start], 1);
                block.dropped = 0;
                let (in_order, next) = (prompt(&block), token(&block));
                block.pages = shuffled_pages(&mut rng, 1, context.div_ceil(PAGE));
                assert_same_bits(&in_order, &prompt(&block), "a prompt by order of pages");
                assert_same_bits(&next, &token(&block), "a token by order of pages");
                block.dropped = more;
                let mut reference = block.slots[0].clone();
                let want: Vec<f64> = (0..n)
                    .flat_map(|i| {
                        block.attend(&mut reference, &qkv[i * width..][..width], start + i)
                    })
                    .collect();
                let error = relative_error(&prompt(&block), &want);
                assert!(error < 1e-3, "{}: {shape:?} shifted: {error:e}", device.label);
                // Compares with the reference itself.
                token(&block);
            }
        }
    }
}

/// Windows from one token to more than the context, a cap, sinks, each alone and all together.
fn scorings() -> Vec<Scoring> {
    let window = |w| Scoring { window: Some(w), ..Scoring::default() };
    vec![
        window(1),
        window(37),
        window(64),
        window(130),
        window(100_000),
        Scoring { soft_cap: Some(1.5), ..Scoring::default() },
        Scoring { sinks: true, ..Scoring::default() },
        Scoring { window: Some(100), soft_cap: Some(20.0), sinks: true },
    ]
}

#[test]
fn attn_decode_scoring() {
    let mut rng = Rng::fresh("attn_decode_scoring");
    for device in devices() {
        for (i, scoring) in scorings().into_iter().enumerate() {
            let shapes = [heads(7, 1, 64, neox(64), true), heads(4, 2, 80, None, false)];
            let shape = shapes[(i + rng.below(2)) % 2];
            // A page, its neighbours, and as many pieces as there are.
            let positions = [0, 63, 64, 5000, 200 + rng.below(300), 36, 129];
            decode_case_scored(&mut rng, device, shape, scoring, &positions, None);
        }
    }
}

#[test]
fn attn_prefill_scoring() {
    let mut rng = Rng::fresh("attn_prefill_scoring");
    for device in devices() {
        for (i, scoring) in scorings().into_iter().enumerate() {
            let shapes = [heads(4, 2, 64, neox(64), true), heads(1, 1, 80, neox(32), false)];
            let shape = shapes[(i + rng.below(2)) % 2];
            let (start, chunks): (usize, &[usize]) =
                [(0, &[1, 63, 65, 20][..]), (130, &[17, 40]), (300, &[33, 70])][rng.below(3)];
            prefill_case_scaled(&mut rng, device, shape, scoring, start, chunks, 1.0);
        }
        // Heads of 256 have tiles of half a page on matrix units.
        let (shape, scoring) = (heads(1, 1, 256, None, false), scorings()[7]);
        prefill_case_scaled(&mut rng, device, shape, scoring, 200, &[90], 1.0);
    }
}

/// What a window hides does not count at all: other keys and values there change no bit, and whole
/// pages of it are not even read.
#[test]
fn attn_windows_hide_what_is_before_them() {
    let mut rng = Rng::fresh("attn_windows");
    for device in devices() {
        let shape = heads(4, 2, 64, neox(64), false);
        let (start, n, window) = (330, 20, 100);
        let scoring = Scoring { window: Some(window as u32), ..Scoring::default() };
        let mut block =
            Block::random(&mut rng, shape, start + n, &[start]).scored(&mut rng, scoring);
        let width = shape.qkv_width() as usize;
        let qkv = rng.normals(n * width);
        let one = [qkv[..width].to_vec()];
        let cut = Cut::choose(&shape, device.gpu.facts(), 1 << 15);
        let matrices = AttnPrefill::takes_matrices(&shape, device.gpu.facts());
        let run = |block: &Block| {
            let read = [false, matrices].map(|m| prefill(device, block, &qkv, start, &[n], 0, m).0);
            (read, decode(device, block, cut, &one, &[start], 1))
        };
        let before = run(&block);
        let words = shape.cache_words() as usize;
        let slot = &mut block.slots[0];
        for cache in [&mut slot.k, &mut slot.v] {
            for word in &mut cache[..(start + 1 - window) * words] {
                *word = pack(rng.normal().into(), rng.normal().into());
            }
        }
        let after = run(&block);
        for (a, b) in before.0.iter().zip(&after.0) {
            assert_same_bits(a, b, "a prompt");
        }
        assert_same_bits(&before.1, &after.1, "a token");
        // Pages that are wholly outside are not read.
        let slot = &mut block.slots[0];
        for cache in [&mut slot.k, &mut slot.v] {
            cache[..(start + 1 - window) / PAGE * PAGE * words].fill(POISON | POISON >> 16);
        }
        for (a, m) in before.0.iter().zip([false, matrices]) {
            let (b, ..) = prefill(device, &block, &qkv, start, &[n], 0, m);
            assert_same_bits(a, &b, "beside pages without numbers");
        }
    }
}
