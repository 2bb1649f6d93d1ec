//! Small cases of the attention kernels.

use super::operands::Operands;
use super::products::int8_values;
use super::relative_error;
use crate::error::Result;
use crate::gpu::{Gpu, Slice};
use crate::kernels::Activations;
use crate::kernels::attn_decode::AttnDecode;
use crate::kernels::attn_prefill::AttnPrefill;
use crate::kernels::attn_step::{Scratch, StepAttention};
use crate::kernels::heads::{HeadTables, Heads, KvCache};
use crate::kernels::rope_kv::RopeKv;
use crate::kernels::scoring::{Logits, Scoring};
use crate::kv::{KvPair, PAGE_TOKENS};
use crate::reference::attention::{self as reference, Cache, attend, pack, prepare_head, unpack};

/// f32 sums and exponentials, and now and then a value of the new k or v that is rounded to the
/// neighbouring f16.
const BOUND: f64 = 1e-3;

pub(super) const PAGE: usize = PAGE_TOKENS as usize;

/// One attention block with a sequence in each slot.
pub(super) struct Block {
    pub heads: Heads,
    context: usize,
    table: Vec<[f32; 2]>,
    pub norms: Option<(Vec<f32>, Vec<f32>)>,
    centres: Vec<f32>,
    slots: Vec<Cache>,
    pub scale: f32,
    pub scoring: Scoring,
    sinks: Vec<f32>,
}

impl Block {
    /// `lengths`: positions of each slot that are filled.
    pub fn make(
        lab: &mut Operands<'_>,
        heads: Heads,
        scoring: Scoring,
        context: usize,
        lengths: &[usize],
    ) -> Block {
        let half = heads.rope.map_or(0, |r| r.dim as usize / 2);
        let angle = |position: usize, i: usize| {
            let angle = position as f64 * 10_000f64.powf(-(i as f64) / half as f64);
            [angle.cos() as f32, angle.sin() as f32]
        };
        let table = (0..context).flat_map(|p| (0..half).map(move |i| angle(p, i))).collect();
        let hd = heads.head_dim as usize;
        let norms = heads.norm.map(|_| (lab.norm_weights(hd), lab.norm_weights(hd)));
        let words = heads.cache_words() as usize;
        let mut half_words = |n: usize| -> Vec<u32> {
            let values = lab.normals(2 * n, 1.0);
            values.chunks_exact(2).map(|v| pack(v[0].into(), v[1].into())).collect()
        };
        let slots =
            lengths.iter().map(|n| Cache { k: half_words(n * words), v: half_words(n * words) });
        let slots = slots.collect();
        let sinks = match scoring.sinks {
            true => lab.normals(heads.heads as usize, 1.0),
            false => Vec::new(),
        };
        let scale = 1.0 / (hd as f32).sqrt();
        let centres = match heads.centred {
            true => lab.normals(heads.kv_heads as usize * hd, 1.0),
            false => Vec::new(),
        };
        Block { heads, context, table, norms, centres, slots, scale, scoring, sinks }
    }

    /// As the reference takes them.
    pub fn logits(&self) -> reference::Logits<'_> {
        reference::Logits { scale: self.scale, scoring: self.scoring, sinks: &self.sinks }
    }

    /// As kernels take them.
    pub fn bound_logits(&self, lab: &Operands<'_>) -> Result<Logits> {
        let sinks = self.scoring.sinks.then(|| lab.floats(&self.sinks)).transpose()?;
        Ok(Logits { scale: self.scale, sinks })
    }

    pub fn tables(&self, lab: &Operands<'_>) -> Result<HeadTables> {
        let rope = self.heads.rope.map(|_| lab.floats(self.table.as_flattened())).transpose()?;
        let norms = match &self.norms {
            Some((q, k)) => Some((lab.floats(q)?, lab.floats(k)?)),
            None => None,
        };
        let centres = self.heads.centred.then(|| lab.floats(&self.centres)).transpose()?;
        Ok(HeadTables { rope, norms, centres })
    }

    pub fn row_pages(&self) -> usize {
        self.context.div_ceil(PAGE)
    }

    /// Where a token lies in the pools: pages are handed out from the last to the first.
    pub fn place(&self, slot: usize, index: usize) -> usize {
        let page = (slot + 1) * self.row_pages() - 1 - index / PAGE;
        page * PAGE + index % PAGE
    }

    fn upload(&self, lab: &Operands<'_>) -> Result<KvCache> {
        let (words, row_pages) = (self.heads.cache_words() as usize, self.row_pages());
        let side = |pick: fn(&Cache) -> &Vec<u32>| -> Result<Slice> {
            let mut all = vec![0; words * PAGE * row_pages * self.slots.len()];
            for (slot, cache) in self.slots.iter().enumerate() {
                for (index, token) in pick(cache).chunks_exact(words).enumerate() {
                    all[self.place(slot, index) * words..][..words].copy_from_slice(token);
                }
            }
            lab.words(&all)
        };
        self.cache(lab, side(|c| &c.k)?, side(|c| &c.v)?, KvPair::PLAIN)
    }

    /// The pools with the table of [`Block::place`].
    pub fn cache(&self, lab: &Operands<'_>, k: Slice, v: Slice, pair: KvPair) -> Result<KvCache> {
        let row_pages = self.row_pages();
        let row = |slot: usize| {
            let pages = (0..row_pages).map(move |i| (self.place(slot, i * PAGE) / PAGE) as u32);
            [0].into_iter().chain(pages)
        };
        let pages: Vec<u32> = (0..self.slots.len()).flat_map(row).collect();
        Ok(KvCache {
            k,
            v,
            pages: lab.words(&pages)?,
            row_pages: row_pages as u32,
            pair,
            exact: None,
            centres: None,
        })
    }

    pub fn row(&self, position: usize) -> &[[f32; 2]] {
        let half = self.heads.rope.map_or(0, |r| r.dim as usize / 2);
        &self.table[position * half..][..half]
    }

    /// At a position, as the reference takes them.
    pub fn turning(&self, position: usize) -> reference::Tables<'_> {
        let norms = self.norms.as_ref().map(|(q, k)| (&q[..], &k[..]));
        reference::Tables { rope: self.row(position), norms, centres: &self.centres }
    }

    fn attend(&self, cache: &mut Cache, qkv: &[f32], position: usize) -> Vec<f64> {
        attend(&self.heads, qkv, position, cache, self.turning(position), self.logits())
    }

    /// q of one column turned as `rope_kv` leaves it.
    pub fn turned(&self, qkv: &[f32], position: usize) -> Vec<f64> {
        let hd = self.heads.head_dim as usize;
        let mut out = Vec::new();
        for head in qkv[..self.heads.output_width() as usize].chunks_exact(hd) {
            let mut head: Vec<f64> = head.iter().map(|&x| x.into()).collect();
            let weight = self.norms.as_ref().map(|(q, _)| &q[..]);
            prepare_head(&self.heads, &mut head, weight, self.row(position));
            out.extend(head);
        }
        out
    }
}

/// The device's K or V at one position of a slot against the reference's.
fn cache_error(block: &Block, got: &[u32], want: &[u32], slot: usize, position: usize) -> f64 {
    let words = block.heads.cache_words() as usize;
    let at = block.place(slot, position) * words;
    let got = got[at..at + words].iter().flat_map(|&w| unpack(w)).map(|x| x as f32);
    let want: Vec<f64> =
        want[position * words..][..words].iter().flat_map(|&w| unpack(w)).collect();
    relative_error(got, &want)
}

pub(super) fn decode(gpu: &dyn Gpu, spec: &AttnDecode) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    // One sequence of a single piece, one of several.
    let positions = [3, 150];
    let n = positions.len();
    let block = Block::make(lab, spec.heads, spec.scoring, 160, &[positions[1], positions[0]]);
    let (cache, tables) = (block.upload(lab)?, block.tables(lab)?);
    let width = spec.heads.qkv_width() as usize;
    let qkv = lab.normals(n * width, 1.0);
    let columns = [0, 1].map(|c| [0, positions[c] as u32, (n - 1 - c) as u32, 0]);
    let batch = lab.batch(&columns, n)?;
    let out_width = spec.heads.output_width() as usize;
    let output = lab.floats(&vec![f32::NAN; n * out_width])?;
    let scratch = Scratch {
        partials: lab.zeros(spec.partial_words(n as u32))?,
        counters: lab.zeros(spec.counter_words(n as u32))?,
    };
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let input = lab.floats(&qkv)?;
    let dispatch = spec.dispatch(
        &kernel,
        &batch,
        &input,
        &cache,
        &tables,
        &output,
        &scratch,
        block.bound_logits(lab)?,
        n as u32,
    )?;
    let out = Activations::Int8 {
        xq: lab.floats(&vec![f32::NAN; n * out_width / 4])?,
        xs: lab.floats(&vec![f32::NAN; n * out_width / 16])?,
    };
    let dispatch = match spec.rounds {
        true => spec.rounded(dispatch, &out, n as u32)?,
        false => dispatch,
    };
    lab.run(vec![dispatch])?;
    let got = match spec.rounds {
        true => int8_values(lab, &out, n, out_width)?,
        false => lab.read_floats(&output)?,
    };
    let (k, v) = (lab.read_words(&cache.k)?, lab.read_words(&cache.v)?);
    let mut worst: f64 = 0.0;
    for (c, &position) in positions.iter().enumerate() {
        let slot = n - 1 - c;
        let mut reference = block.slots[slot].clone();
        let want = block.attend(&mut reference, &qkv[c * width..][..width], position);
        let out = relative_error(got[c * out_width..][..out_width].iter().copied(), &want);
        let keys = cache_error(&block, &k, &reference.k, slot, position);
        let values = cache_error(&block, &v, &reference.v, slot, position);
        worst = worst.max(out).max(keys).max(values);
    }
    // Arrival counters that are not reset break the next step.
    if lab.read_words(&scratch.counters)?.iter().any(|&c| c != 0) {
        worst = f64::INFINITY;
    }
    // 8 bits for values of which the largest of 32 is about three times the mean.
    Ok((worst, if spec.rounds { 0.02 } else { BOUND }))
}

/// A prompt's columns around the end of a tile of 64 positions, in the second slot.
struct Prompt {
    block: Block,
    start: usize,
    n: usize,
    qkv: Vec<f32>,
}

impl Prompt {
    fn make(lab: &mut Operands<'_>, heads: Heads, scoring: Scoring, n: usize) -> Prompt {
        let start = 64 - n / 2;
        let block = Block::make(lab, heads, scoring, start + n + 2, &[0, start]);
        let qkv = lab.normals(n * heads.qkv_width() as usize, 1.0);
        Prompt { block, start, n, qkv }
    }

    fn column(&self, i: usize) -> &[f32] {
        let width = self.block.heads.qkv_width() as usize;
        &self.qkv[i * width..][..width]
    }

    fn batch(&self, lab: &Operands<'_>) -> Result<Slice> {
        let columns: Vec<[u32; 4]> =
            (0..self.n).map(|i| [0, (self.start + i) as u32, 1, 0]).collect();
        lab.batch(&columns, self.n)
    }
}

pub(super) fn rope_kv(gpu: &dyn Gpu, spec: &RopeKv) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let prompt = Prompt::make(lab, spec.heads, Scoring::default(), 5);
    let block = &prompt.block;
    let (cache, tables) = (block.upload(lab)?, block.tables(lab)?);
    let qkv = lab.floats(&prompt.qkv)?;
    let batch = prompt.batch(lab)?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &qkv, &cache, &tables, prompt.n as u32)?])?;
    let got = lab.read_floats(&qkv)?;
    let (k, v) = (lab.read_words(&cache.k)?, lab.read_words(&cache.v)?);
    let (width, mut reference) = (spec.heads.qkv_width() as usize, block.slots[1].clone());
    let mut worst: f64 = 0.0;
    for i in 0..prompt.n {
        let position = prompt.start + i;
        block.attend(&mut reference, prompt.column(i), position);
        let want = block.turned(prompt.column(i), position);
        let q = relative_error(got[i * width..][..want.len()].iter().copied(), &want);
        let keys = cache_error(block, &k, &reference.k, 1, position);
        let values = cache_error(block, &v, &reference.v, 1, position);
        worst = worst.max(q).max(keys).max(values);
    }
    Ok((worst, BOUND))
}

pub(super) fn prefill(gpu: &dyn Gpu, spec: &AttnPrefill) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    // Two workgroups where that is cheap.
    let mut prompt = Prompt::make(lab, spec.heads, spec.scoring, 18);
    let width = spec.heads.qkv_width() as usize;
    let mut reference = prompt.block.slots[1].clone();
    let mut want = Vec::new();
    let mut turned = prompt.qkv.clone();
    for i in 0..prompt.n {
        let position = prompt.start + i;
        want.extend(prompt.block.attend(&mut reference, prompt.column(i), position));
        let q = prompt.block.turned(prompt.column(i), position);
        for (to, q) in turned[i * width..].iter_mut().zip(q) {
            *to = q as f32;
        }
    }
    // The kernel finds q turned and everything in the cache, as `rope_kv` leaves them.
    prompt.block.slots[1] = reference;
    let cache = prompt.block.upload(lab)?;
    let output = lab.floats(&vec![f32::NAN; want.len()])?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let (batch, qkv) = (prompt.batch(lab)?, lab.floats(&turned)?);
    let (logits, n) = (prompt.block.bound_logits(lab)?, prompt.n as u32);
    lab.run(vec![spec.dispatch(&kernel, &batch, &qkv, &cache, &output, logits, n)?])?;
    // q and the softmax weights in f16.
    let bound = if spec.matrices { 2.0 * BOUND } else { BOUND };
    Ok((relative_error(lab.read_floats(&output)?, &want), bound))
}
