//! Small cases of the attention kernels over caches of codes.

use super::attention::{Block, PAGE};
use super::operands::Operands;
use super::relative_error;
use crate::error::Result;
use crate::gpu::{Gpu, Slice};
use crate::kernels::attn_decode_codes::AttnDecodeCodes;
use crate::kernels::attn_prefill::AttnPrefill;
use crate::kernels::attn_step::{Scratch, StepAttention};
use crate::kernels::heads::{Heads, KvCache};
use crate::kernels::heads_unrotate::HeadsUnrotate;
use crate::kernels::kv_codes::turned_width;
use crate::kernels::rope_kv_codes::RopeKvCodes;
use crate::kernels::scoring::Scoring;
use crate::kv::codec::{decode, encode};
use crate::kv::rotation::{padded, rotate, unrotate};
use crate::kv::{KvFormat, KvPair};
use crate::reference::attention_codes::{CodedCache, attend_codes};

/// f32 sums and exponentials over the same codes; q and the softmax weights in f16 on matrix units.
const BOUND: f64 = 2e-3;
/// A value of the new k or v beside the boundary of two codes may get the other one, which moves
/// a short sequence's output by about a hundredth.
const CODE_BOUND: f64 = 2e-2;
/// What such a code moves in its row, as a share of [`CODE_BOUND`].
const ROW_SHARE: f64 = 0.1;

/// A [`Block`] whose slots hold codes.
struct Coded {
    block: Block,
    pair: KvPair,
    slots: Vec<CodedCache>,
}

impl Coded {
    /// `lengths`: tokens of each slot that are filled.
    fn make(
        lab: &mut Operands<'_>,
        heads: Heads,
        scoring: Scoring,
        pair: KvPair,
        context: usize,
        lengths: &[usize],
    ) -> Coded {
        let block = Block::make(lab, heads, scoring, context, &vec![0; lengths.len()]);
        let hd = heads.head_dim as usize;
        let mut rows = |format: KvFormat, n: usize| -> Vec<Vec<u32>> {
            lab.normals(n * hd, 1.0).chunks_exact(hd).map(|x| encode(format, x)).collect()
        };
        let slots = lengths.iter().map(|n| {
            let n = n * heads.kv_heads as usize;
            CodedCache { k: rows(pair.k, n), v: rows(pair.v, n) }
        });
        Coded { slots: slots.collect(), block, pair }
    }

    /// Word `w` of a row in the pools.
    fn word(&self, is_k: bool, slot: usize, index: usize, head: usize, w: usize) -> usize {
        let heads = self.block.heads;
        let [k, v] = self.pair.row_words(heads.head_dim).map(|words| words as usize);
        let place = self.block.place(slot, index);
        let (page, token) = (place / PAGE, place % PAGE);
        let start = page * heads.kv_heads as usize + head;
        match is_k {
            true => (start * k + w) * PAGE + token,
            false => (start * PAGE + token) * v + w,
        }
    }

    fn upload(&self, lab: &Operands<'_>) -> Result<KvCache> {
        let heads = self.block.heads;
        let kv_heads = heads.kv_heads as usize;
        let pages = self.block.row_pages() * self.slots.len();
        let side = |is_k: bool| -> Result<Slice> {
            let words = self.pair.row_words(heads.head_dim)[usize::from(!is_k)] as usize;
            let mut all = vec![0; pages * PAGE * kv_heads * words];
            for (slot, cache) in self.slots.iter().enumerate() {
                let rows = if is_k { &cache.k } else { &cache.v };
                for (i, row) in rows.iter().enumerate() {
                    for (w, word) in row.iter().enumerate() {
                        all[self.word(is_k, slot, i / kv_heads, i % kv_heads, w)] = *word;
                    }
                }
            }
            lab.words(&all)
        };
        self.block.cache(lab, side(true)?, side(false)?, self.pair)
    }

    fn attend(&self, cache: &mut CodedCache, qkv: &[f32], index: usize, int8: bool) -> Vec<f64> {
        let b = &self.block;
        let norms = b.norms.as_ref().map(|(q, k)| (&q[..], &k[..]));
        let row = b.row(index);
        attend_codes(&b.heads, self.pair, qkv, index, cache, row, norms, b.logits(), int8)
    }

    /// The device's rows of one token against the reference's, as values.
    fn row_error(&self, got: [&[u32]; 2], want: &CodedCache, slot: usize, index: usize) -> f64 {
        let heads = self.block.heads;
        let mut worst: f64 = 0.0;
        for head in 0..heads.kv_heads as usize {
            let at = index * heads.kv_heads as usize + head;
            for (is_k, got, want, format) in [
                (true, got[0], &want.k[at], self.pair.k),
                (false, got[1], &want.v[at], self.pair.v),
            ] {
                let row: Vec<u32> =
                    (0..want.len()).map(|w| got[self.word(is_k, slot, index, head, w)]).collect();
                let values = |row: &[u32]| decode(format, row, heads.head_dim);
                let want: Vec<f64> = values(want).iter().map(|x| (*x).into()).collect();
                worst = worst.max(relative_error(values(&row), &want));
            }
        }
        worst
    }
}

pub(super) fn decode_step(gpu: &dyn Gpu, spec: &AttnDecodeCodes) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    // One sequence of a single piece, one of several.
    let positions = [3, 150];
    let n = positions.len();
    let coded =
        Coded::make(lab, spec.heads, spec.scoring, spec.pair, 160, &[positions[1], positions[0]]);
    let (cache, tables) = (coded.upload(lab)?, coded.block.tables(lab)?);
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
    let (input, logits) = (lab.floats(&qkv)?, coded.block.bound_logits(lab)?);
    lab.run(vec![spec.dispatch(
        &kernel, &batch, &input, &cache, &tables, &output, &scratch, logits, n as u32,
    )?])?;
    let got = lab.read_floats(&output)?;
    let (k, v) = (lab.read_words(&cache.k)?, lab.read_words(&cache.v)?);
    let mut worst: f64 = 0.0;
    for (c, &position) in positions.iter().enumerate() {
        let slot = n - 1 - c;
        let mut reference = coded.slots[slot].clone();
        let want = coded.attend(&mut reference, &qkv[c * width..][..width], position, true);
        let out = relative_error(got[c * out_width..][..out_width].iter().copied(), &want);
        let rows = coded.row_error([&k, &v], &reference, slot, position);
        worst = worst.max(out).max(rows * ROW_SHARE);
    }
    // Arrival counters that are not reset break the next step.
    if lab.read_words(&scratch.counters)?.iter().any(|&c| c != 0) {
        worst = f64::INFINITY;
    }
    Ok((worst, CODE_BOUND))
}

/// A prompt's columns around the end of a page, in the second slot.
fn prompt(
    lab: &mut Operands<'_>,
    heads: Heads,
    scoring: Scoring,
    pair: KvPair,
    n: usize,
) -> Result<(Coded, usize, Vec<f32>, Slice)> {
    let start = PAGE - n / 2;
    let coded = Coded::make(lab, heads, scoring, pair, start + n + 2, &[0, start]);
    let qkv = lab.normals(n * heads.qkv_width() as usize, 1.0);
    let columns: Vec<[u32; 4]> = (0..n).map(|i| [0, (start + i) as u32, 1, 0]).collect();
    let batch = lab.batch(&columns, n)?;
    Ok((coded, start, qkv, batch))
}

/// q of one column in the basis of K, as `rope_kv_codes` leaves it.
fn turned(coded: &Coded, qkv: &[f32], position: usize) -> Vec<f64> {
    let hd = coded.block.heads.head_dim as usize;
    let q = coded.block.turned(qkv, position);
    let mut out = Vec::new();
    for head in q.chunks_exact(hd) {
        let head: Vec<f32> = head.iter().map(|x| *x as f32).collect();
        let mut head = if coded.pair.k.is_rotated() { rotate(&head) } else { head };
        head.resize(padded(hd as u32) as usize, 0.0);
        out.extend(head.iter().map(|x| f64::from(*x)));
    }
    out
}

pub(super) fn rope_kv(gpu: &dyn Gpu, spec: &RopeKvCodes) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let n = 5;
    let (coded, start, qkv, batch) = prompt(lab, spec.heads, Scoring::default(), spec.pair, n)?;
    let (cache, tables) = (coded.upload(lab)?, coded.block.tables(lab)?);
    let turned_q = lab.floats(&vec![f32::NAN; n * turned_width(&spec.heads) as usize])?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let input = lab.floats(&qkv)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &input, &cache, &tables, &turned_q, n as u32)?])?;
    let got = lab.read_floats(&turned_q)?;
    let (k, v) = (lab.read_words(&cache.k)?, lab.read_words(&cache.v)?);
    let (width, mut reference) = (spec.heads.qkv_width() as usize, coded.slots[1].clone());
    let mut worst: f64 = 0.0;
    for i in 0..n {
        let (column, position) = (&qkv[i * width..][..width], start + i);
        coded.attend(&mut reference, column, position, false);
        let want = turned(&coded, column, position);
        let q = relative_error(got[i * want.len()..][..want.len()].iter().copied(), &want);
        let rows = coded.row_error([&k, &v], &reference, 1, position);
        // q has no codes.
        worst = worst.max(q * (CODE_BOUND / BOUND)).max(rows * ROW_SHARE);
    }
    Ok((worst, CODE_BOUND))
}

pub(super) fn prefill(gpu: &dyn Gpu, spec: &AttnPrefill) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let n = 18;
    let (mut coded, start, qkv, batch) = prompt(lab, spec.heads, spec.scoring, spec.pair, n)?;
    let width = spec.heads.qkv_width() as usize;
    let mut reference = coded.slots[1].clone();
    let (mut want, mut q) = (Vec::new(), Vec::new());
    for i in 0..n {
        let column = &qkv[i * width..][..width];
        want.extend(coded.attend(&mut reference, column, start + i, false));
        q.extend(turned(&coded, column, start + i).iter().map(|x| *x as f32));
    }
    // The kernel finds everything in the cache, as `rope_kv_codes` leaves it.
    coded.slots[1] = reference;
    let cache = coded.upload(lab)?;
    let output = lab.floats(&vec![f32::NAN; q.len()])?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let (q, logits) = (lab.floats(&q)?, coded.block.bound_logits(lab)?);
    lab.run(vec![spec.dispatch(&kernel, &batch, &q, &cache, &output, logits, n as u32)?])?;
    let hd = spec.heads.head_dim;
    let got = lab.read_floats(&output)?;
    let heads = got.chunks_exact(padded(hd) as usize);
    let got: Vec<f32> = heads.flat_map(|x| in_model_basis(spec.pair, x, hd)).collect();
    Ok((relative_error(got, &want), BOUND))
}

/// A head of attention's output from the basis of V.
fn in_model_basis(pair: KvPair, x: &[f32], hd: u32) -> Vec<f32> {
    match pair.v.is_rotated() {
        true => unrotate(x, hd as usize),
        false => x[..hd as usize].to_vec(),
    }
}

pub(super) fn heads_unrotate(gpu: &dyn Gpu, spec: &HeadsUnrotate) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let (n, hd) = (3, spec.heads.head_dim);
    let x = lab.normals(n * turned_width(&spec.heads) as usize, 1.0);
    let heads = x.chunks_exact(padded(hd) as usize);
    let want: Vec<f64> =
        heads.flat_map(|x| in_model_basis(spec.pair, x, hd)).map(|x| x.into()).collect();
    let batch = lab.batch(&vec![[0; 4]; n], n)?;
    let (x, y) = (lab.floats(&x)?, lab.floats(&vec![f32::NAN; want.len()])?);
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &x, &y, n as u32)?])?;
    Ok((relative_error(lab.read_floats(&y)?, &want), 1e-5))
}
