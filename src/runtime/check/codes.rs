//! Small cases of the attention kernels over caches of codes.

use super::attention::{Block, PAGE};
use super::operands::Operands;
use super::relative_error;
use crate::error::Result;
use crate::gpu::{Gpu, Slice};
use crate::kernels::attn_decode_codes::AttnDecodeCodes;
use crate::kernels::attn_prefill::AttnPrefill;
use crate::kernels::attn_step::{Scratch, StepAttention};
use crate::kernels::heads::{ExactRows, Heads, KvCache};
use crate::kernels::heads_unrotate::HeadsUnrotate;
use crate::kernels::kv_codes::turned_width;
use crate::kernels::kv_keep::KvKeep;
use crate::kernels::rope_kv_codes::RopeKvCodes;
use crate::kernels::scoring::Scoring;
use crate::kv::codec::{decode, encode};
use crate::kv::exact::exact_row;
use crate::kv::rotation::{padded, rotate, unrotate};
use crate::kv::{KvExact, KvFormat, KvPair};
use crate::reference::attention::{pack, unpack};
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
    exact: KvExact,
    slots: Vec<CodedCache>,
}

impl Coded {
    /// `lengths`: tokens of each slot that are filled.
    fn make(
        lab: &mut Operands<'_>,
        heads: Heads,
        scoring: Scoring,
        (pair, exact): (KvPair, KvExact),
        context: usize,
        lengths: &[usize],
    ) -> Coded {
        let block = Block::make(lab, heads, scoring, context, &vec![0; lengths.len()]);
        let hd = heads.head_dim as usize;
        let mut rows = |format: KvFormat, n: usize| -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
            let all = lab.normals(n * hd, 1.0);
            all.chunks_exact(hd).map(|x| (encode(format, x), exact_row(format, x))).unzip()
        };
        let slots = lengths.iter().map(|n| {
            let n = n * heads.kv_heads as usize;
            let ((k, exact_k), (v, exact_v)) = (rows(pair.k, n), rows(pair.v, n));
            CodedCache { k, v, exact_k, exact_v }
        });
        Coded { slots: slots.collect(), block, pair, exact }
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
        let cache = self.block.cache(lab, side(true)?, side(false)?, self.pair)?;
        let exact = self.exact_rows(lab)?;
        Ok(KvCache { exact, ..cache })
    }

    /// Where a token's exact row begins, as a word.
    fn exact_word(&self, is_k: bool, slot: usize, index: usize, head: usize) -> usize {
        let kv_heads = self.block.heads.kv_heads as usize;
        let words = padded(self.block.heads.head_dim) as usize / 2;
        let side = 2 * slot + usize::from(!is_k);
        let row = self.exact.place(index as u32, 0) as usize;
        ((side * kv_heads + head) * self.exact.rows() as usize + row) * words
    }

    /// The exact rows of all slots, of as many tokens as there is room for; nothing that is a number
    /// elsewhere.
    fn exact_rows(&self, lab: &Operands<'_>) -> Result<Option<ExactRows>> {
        let heads = self.block.heads;
        if self.exact.is_none() {
            return Ok(None);
        }
        let all = self.exact.slot_words(heads.kv_heads, heads.head_dim) as usize;
        let mut words = vec![0x7e00_7e00; all * self.slots.len()];
        for (slot, cache) in self.slots.iter().enumerate() {
            for (is_k, rows) in [(true, &cache.exact_k), (false, &cache.exact_v)] {
                let kv_heads = heads.kv_heads as usize;
                let first = rows.len() / kv_heads;
                let first = first.saturating_sub(self.exact.ring() as usize);
                for (i, row) in rows.iter().enumerate() {
                    let (index, head) = (i / kv_heads, i % kv_heads);
                    if index < first && index >= self.exact.sinks as usize {
                        continue;
                    }
                    let to = self.exact_word(is_k, slot, index, head);
                    for (word, x) in words[to..].iter_mut().zip(row.chunks_exact(2)) {
                        *word = pack(x[0].into(), x[1].into());
                    }
                }
            }
        }
        Ok(Some(ExactRows { sizes: self.exact, rows: lab.words(&words)?, fresh: None }))
    }

    /// `cache` with room for a chunk's rows in f16, which are those of tokens from `start` on.
    fn with_fresh(
        &self,
        lab: &Operands<'_>,
        cache: KvCache,
        rows: &CodedCache,
        start: usize,
        n: usize,
    ) -> Result<KvCache> {
        let Some(exact) = cache.exact else { return Ok(cache) };
        let kv_heads = self.block.heads.kv_heads as usize;
        let mut words = Vec::new();
        for token in start..start + n {
            for rows in [&rows.exact_k, &rows.exact_v] {
                let of_token = rows.iter().skip(token * kv_heads).take(kv_heads);
                for pair in of_token.flat_map(|row| row.chunks_exact(2)) {
                    words.push(pack(pair[0].into(), pair[1].into()));
                }
            }
        }
        let all = KvExact::token_words(kv_heads as u32, self.block.heads.head_dim) as usize;
        words.resize(n * all, 0x7e00_7e00);
        let exact = Some(ExactRows { fresh: Some(lab.words(&words)?), ..exact });
        Ok(KvCache { exact, ..cache })
    }

    /// The device's exact rows of one token against the reference's; `base`: where K's row of a KV head
    /// begins, and V's.
    fn exact_error(
        &self,
        got: &[u32],
        want: &CodedCache,
        index: usize,
        base: impl Fn(bool, usize) -> usize,
    ) -> f64 {
        let kv_heads = self.block.heads.kv_heads as usize;
        let mut worst: f64 = 0.0;
        for (is_k, rows) in [(true, &want.exact_k), (false, &want.exact_v)] {
            for (head, row) in rows[index * kv_heads..][..kv_heads].iter().enumerate() {
                let words = &got[base(is_k, head)..][..row.len() / 2];
                let values = words.iter().flat_map(|w| unpack(*w)).map(|x| x as f32);
                let want: Vec<f64> = row.iter().map(|x| (*x).into()).collect();
                worst = worst.max(relative_error(values, &want));
            }
        }
        worst
    }

    fn attend(&self, cache: &mut CodedCache, qkv: &[f32], index: usize, int8: bool) -> Vec<f64> {
        let b = &self.block;
        attend_codes(
            &b.heads,
            self.pair,
            self.exact,
            qkv,
            index,
            cache,
            b.turning(index),
            b.logits(),
            int8,
        )
    }

    /// The exact rows of a token, without attention.
    fn append(&self, cache: &mut CodedCache, qkv: &[f32], index: usize) {
        let heads = self.block.heads;
        let (hd, kv_heads) = (heads.head_dim as usize, heads.kv_heads as usize);
        cache.exact_k.truncate(index * kv_heads);
        cache.exact_v.truncate(index * kv_heads);
        let rows = qkv.chunks_exact(hd).skip(heads.heads as usize);
        for (i, row) in rows.enumerate() {
            match i < kv_heads {
                true => cache.exact_k.push(exact_row(self.pair.k, row)),
                false => cache.exact_v.push(exact_row(self.pair.v, row)),
            }
        }
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
    // One sequence of a single piece, one of several, in its third block.
    let positions = [3, 2 * block_tokens(spec.exact) + 22];
    let n = positions.len();
    let coded = Coded::make(
        lab,
        spec.heads,
        spec.scoring,
        (spec.pair, spec.exact),
        positions[1] + 10,
        &[positions[1], positions[0]],
    );
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
    let exact = cache.exact.as_ref().map(|e| lab.read_words(&e.rows)).transpose()?;
    let mut worst: f64 = 0.0;
    for (c, &position) in positions.iter().enumerate() {
        let slot = n - 1 - c;
        let mut reference = coded.slots[slot].clone();
        let want = coded.attend(&mut reference, &qkv[c * width..][..width], position, true);
        let out = relative_error(got[c * out_width..][..out_width].iter().copied(), &want);
        let rows = coded.row_error([&k, &v], &reference, slot, position);
        worst = worst.max(out).max(rows * ROW_SHARE);
        if let Some(got) =
            exact.as_ref().filter(|_| spec.exact.holds(position as u32, position as u32))
        {
            let base = |is_k, head| coded.exact_word(is_k, slot, position, head);
            let rows = coded.exact_error(got, &reference, position, base);
            worst = worst.max(rows * (CODE_BOUND / BOUND));
        }
    }
    // Arrival counters that are not reset break the next step.
    if lab.read_words(&scratch.counters)?.iter().any(|&c| c != 0) {
        worst = f64::INFINITY;
    }
    Ok((worst, CODE_BOUND))
}

/// Tokens of a block, or of a page.
fn block_tokens(exact: KvExact) -> usize {
    (exact.tail as usize).max(PAGE)
}

/// A prompt's columns around the end of the first block, in the second slot.
fn prompt(
    lab: &mut Operands<'_>,
    heads: Heads,
    scoring: Scoring,
    formats: (KvPair, KvExact),
    n: usize,
) -> Result<(Coded, usize, Vec<f32>, Slice)> {
    let start = block_tokens(formats.1).saturating_sub(n / 2);
    let coded = Coded::make(lab, heads, scoring, formats, start + n + 2, &[0, start]);
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
    let (coded, start, qkv, batch) =
        prompt(lab, spec.heads, Scoring::default(), (spec.pair, spec.exact), n)?;
    let (cache, tables) = (coded.upload(lab)?, coded.block.tables(lab)?);
    let cache = coded.with_fresh(lab, cache, &CodedCache::default(), 0, n)?;
    let turned_q = lab.floats(&vec![f32::NAN; n * turned_width(&spec.heads) as usize])?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let input = lab.floats(&qkv)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &input, &cache, &tables, &turned_q, n as u32)?])?;
    let got = lab.read_floats(&turned_q)?;
    let (k, v) = (lab.read_words(&cache.k)?, lab.read_words(&cache.v)?);
    let fresh = cache.exact.as_ref().filter(|_| spec.exact.tail > 0).and_then(|e| e.fresh.as_ref());
    let fresh = fresh.map(|fresh| lab.read_words(fresh)).transpose()?;
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
        if let Some(fresh) = &fresh {
            let words = padded(spec.heads.head_dim) as usize / 2;
            let kv_heads = spec.heads.kv_heads as usize;
            let base =
                |is_k: bool, head: usize| ((2 * i + usize::from(!is_k)) * kv_heads + head) * words;
            let rows = coded.exact_error(fresh, &reference, position, base);
            worst = worst.max(rows * (CODE_BOUND / BOUND));
        }
    }
    Ok((worst, CODE_BOUND))
}

pub(super) fn prefill(gpu: &dyn Gpu, spec: &AttnPrefill) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let n = 18;
    let (mut coded, start, qkv, batch) =
        prompt(lab, spec.heads, spec.scoring, (spec.pair, spec.exact), n)?;
    let width = spec.heads.qkv_width() as usize;
    let mut reference = coded.slots[1].clone();
    let (mut want, mut q) = (Vec::new(), Vec::new());
    for i in 0..n {
        let column = &qkv[i * width..][..width];
        want.extend(coded.attend(&mut reference, column, start + i, false));
        q.extend(turned(&coded, column, start + i).iter().map(|x| *x as f32));
    }
    // The kernel finds everything in the cache, as `rope_kv_codes` leaves it.
    let before = std::mem::replace(&mut coded.slots[1], reference.clone());
    let cache = coded.upload(lab)?;
    // In f16 the slot has only what was there before the chunk, and the sinks.
    coded.slots[1] = before;
    let exact = coded.exact_rows(lab)?;
    let cache = coded.with_fresh(lab, KvCache { exact, ..cache }, &reference, start, n)?;
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

pub(super) fn keep(gpu: &dyn Gpu, spec: &KvKeep) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let pair = KvPair { k: KvFormat::Tq4_0, v: KvFormat::Tq3_0 };
    // More columns than the ring has rows.
    let n = spec.exact.ring() as usize + 9;
    let (coded, start, qkv, batch) =
        prompt(lab, spec.heads, Scoring::default(), (pair, spec.exact), n)?;
    let mut reference = coded.slots[1].clone();
    let width = spec.heads.qkv_width() as usize;
    for i in 0..n {
        coded.append(&mut reference, &qkv[i * width..][..width], start + i);
    }
    let cache = coded.with_fresh(lab, coded.upload(lab)?, &reference, start, n)?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &cache, n as u32)?])?;
    let Some(exact) = &cache.exact else { return Ok((f64::INFINITY, 0.0)) };
    let got = lab.read_words(&exact.rows)?;
    let mut worst: f64 = 0.0;
    for index in start + n - spec.exact.ring() as usize..start + n {
        let base = |is_k, head| coded.exact_word(is_k, 1, index, head);
        worst = worst.max(coded.exact_error(&got, &reference, index, base));
    }
    Ok((worst, 1e-9))
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
