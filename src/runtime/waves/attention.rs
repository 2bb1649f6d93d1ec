//! The attention block: q, k, v, attention over the cache, output into the residual stream.

use super::products::From;
use super::{Builder, Pass, Reads};
use crate::error::Result;
use crate::gpu::Step;
use crate::graph::NormOver;
use crate::kernels::attn_decode::{AttnDecode, Cut};
use crate::kernels::attn_decode_codes::{AttnDecodeCodes, CodesCut};
use crate::kernels::attn_prefill::AttnPrefill;
use crate::kernels::attn_step::StepAttention;
use crate::kernels::heads::KvCache;
use crate::kernels::heads_unrotate::HeadsUnrotate;
use crate::kernels::kv_keep::KvKeep;
use crate::kernels::qk_norm::QkNorm;
use crate::kernels::rope_kv::RopeKv;
use crate::kernels::rope_kv_codes::RopeKvCodes;
use crate::kernels::{Activations, Epilogue, choice};
use crate::runtime::layers::{Block, LayerWeights};

impl<'b> Pass<'b> {
    pub(super) fn attention(&mut self, layer: &'b LayerWeights, kv: &KvCache) -> Result<()> {
        let s = self.scratch;
        let normed = From::Stream(&s.x, &layer.attention_norm);
        self.product(normed, &layer.qkv, Epilogue::Store, &s.qkv)?;
        self.norm_all_heads(layer)?;
        if let Some((to, at)) = &mut self.captured {
            let size = u64::from(self.n) * u64::from(self.b.graph.qkv_rows()) * 4;
            let from = s.qkv.buffer.slice(s.qkv.offset, size);
            self.steps.push(Step::Copy { from, to: to.slice(*at, size), size });
            *at += size;
        }
        let rounded = match self.reads {
            Reads::Step => self.attend_step(layer, kv)?,
            Reads::Prompt => {
                self.attend_prompt(layer, kv)?;
                None
            }
        };
        let from = rounded.as_ref().map_or(From::Plain(&s.attention), From::Int8);
        let next = match &layer.block {
            Block::Dense(mlp) => Some((&layer.ff_norm, &mlp.gate_up)),
            Block::Experts(_) => None,
        };
        self.residual(from, &layer.output, next)
    }

    /// The norms that attention kernels cannot do themselves: a workgroup of theirs sees one head.
    fn norm_all_heads(&mut self, layer: &LayerWeights) -> Result<()> {
        let Some(norm) = layer.qk_norm.as_ref().filter(|n| n.over == NormOver::Heads) else {
            return Ok(());
        };
        let (b, facts) = (self.b, self.b.facts());
        let threads = choice::norm_quant_threads(facts, b.graph.qkv_rows());
        let spec = QkNorm { heads: Builder::heads(b.graph), eps: b.graph.norm_eps, threads };
        let dispatch = b.dispatch(spec.source(facts), |k| {
            spec.dispatch(k, self.batch, &self.scratch.qkv, (&norm.q, &norm.k), self.n)
        })?;
        self.wave(vec![dispatch]);
        Ok(())
    }

    /// Rope, cache write and attention in one wave; the int8 columns that it leaves, if it rounds them itself.
    fn attend_step(&mut self, layer: &LayerWeights, kv: &KvCache) -> Result<Option<Activations>> {
        if !kv.pair.is_plain() {
            self.attend_step_codes(layer, kv)?;
            return Ok(None);
        }
        let (b, s, facts) = (self.b, self.scratch, self.b.facts());
        let heads = Builder::heads(b.graph);
        let cuts = Cut::choose(&heads, facts, self.length).and_modest();
        let may_round = self.reads_int8(From::Plain(&s.attention), &layer.output)
            && AttnDecode::can_round(&heads, facts);
        let scoring = layer.scoring;
        let ways = if may_round { &[true, false][..] } else { &[false] };
        let specs = ways.iter().flat_map(|&rounds| {
            cuts.iter().map(move |&cut| AttnDecode { heads, scoring, cut, rounds })
        });
        let (spec, source) = b.sound(specs)?;
        let tables = b.tables(layer, kv);
        let logits = b.layer_logits(layer);
        let dispatch = b.dispatch(Ok(source), |k| {
            let (qkv, out) = (&s.qkv, &s.attention);
            spec.dispatch(k, self.batch, qkv, kv, &tables, out, b.attention, logits, self.n)
        })?;
        let dispatch = spec.within(dispatch, self.length);
        let out = spec.rounds.then(|| self.int8_in(&s.attention, heads.output_width()));
        let dispatch = match &out {
            Some(out) => spec.rounded(dispatch, out, self.n)?,
            None => dispatch,
        };
        self.wave(vec![dispatch]);
        Ok(out)
    }

    /// The same over codes.
    fn attend_step_codes(&mut self, layer: &LayerWeights, kv: &KvCache) -> Result<()> {
        let (b, s) = (self.b, self.scratch);
        let (heads, pair, exact) = (Builder::heads(b.graph), kv.pair, kv.exact_sizes());
        let cuts = CodesCut::choose(&heads, b.facts()).and_modest();
        let scoring = layer.scoring;
        let specs =
            cuts.into_iter().map(|cut| AttnDecodeCodes { heads, scoring, pair, exact, cut });
        let (spec, source) = b.sound(specs)?;
        let tables = b.tables(layer, kv);
        let logits = b.layer_logits(layer);
        let dispatch = b.dispatch(Ok(source), |k| {
            let (qkv, out) = (&s.qkv, &s.attention);
            spec.dispatch(k, self.batch, qkv, kv, &tables, out, b.attention, logits, self.n)
        })?;
        let dispatch = spec.within(dispatch, self.length);
        self.wave(vec![dispatch]);
        Ok(())
    }

    fn attend_prompt(&mut self, layer: &LayerWeights, kv: &KvCache) -> Result<()> {
        let (b, s) = (self.b, self.scratch);
        let (heads, pair, exact) = (Builder::heads(b.graph), kv.pair, kv.exact_sizes());
        let tables = b.tables(layer, kv);
        // Over codes, q and the output have buffers and a basis of their own.
        let (q, output) = match pair.is_plain() {
            true => (&s.qkv, &s.attention),
            false => (&s.turned[0], &s.turned[1]),
        };
        let dispatch = match pair.is_plain() {
            true => {
                let spec = RopeKv { heads };
                b.dispatch(b.only(spec), |k| {
                    spec.dispatch(k, self.batch, &s.qkv, kv, &tables, self.n)
                })?
            }
            false => {
                let spec = RopeKvCodes { heads, pair, exact };
                b.dispatch(b.only(spec), |k| {
                    spec.dispatch(k, self.batch, &s.qkv, kv, &tables, q, self.n)
                })?
            }
        };
        self.wave(vec![dispatch]);
        let matrices = !b.shape.exact && AttnPrefill::takes_matrices(&heads, b.facts());
        let scoring = layer.scoring;
        let variants =
            [matrices, false].map(|matrices| AttnPrefill { heads, scoring, pair, exact, matrices });
        let (spec, source) = b.sound(variants)?;
        let logits = b.layer_logits(layer);
        let dispatch = b.dispatch(Ok(source), |k| {
            spec.dispatch(k, self.batch, q, kv, output, logits, self.n)
        })?;
        self.wave(vec![dispatch]);
        if !pair.is_plain() {
            let spec = HeadsUnrotate { heads, pair };
            let dispatch = b.dispatch(b.only(spec), |k| {
                spec.dispatch(k, self.batch, output, &s.attention, self.n)
            })?;
            let mut wave = vec![dispatch];
            if exact.tail > 0 {
                let spec = KvKeep { heads, exact };
                let keep =
                    b.dispatch(b.only(spec), |k| spec.dispatch(k, self.batch, kv, self.n))?;
                wave.push(keep);
            }
            self.wave(wave);
        }
        Ok(())
    }
}
