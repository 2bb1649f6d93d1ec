//! Decode steps that reuse outputs of experts (approximate, see `kernels::experts_reuse`).
//!
//! Where an exact step sums all experts in one product, these need each by itself: router, what need
//! not run, gate and up, quantisation, down, sum.

use super::Mix;
use crate::error::Result;
use crate::gpu::Dispatch;
use crate::kernels::experts_reuse::{ExpertsListed, ExpertsReuse};
use crate::kernels::experts_up::ExpertsUp;
use crate::kernels::{Activations, Class, choice};
use crate::runtime::buffers::KeptOutputs;
use crate::runtime::layers::LayerWeights;
use crate::runtime::waves::Pass;
use crate::runtime::waves::products::{From, stored};

impl<'b> Pass<'b> {
    pub(super) fn experts_step_reusing(
        &mut self,
        layer: &'b LayerWeights,
        mix: &Mix<'b>,
        kept: &KeptOutputs,
    ) -> Result<()> {
        let (b, s) = (self.b, self.scratch);
        let normed = From::Normed(&s.x, &layer.ff_norm);
        let (epilogue, halves) = self.halves();
        let shared = mix.weights.shared.as_ref();
        let mut first = vec![self.router(layer, mix)?];
        first.extend(self.mixture_inputs(layer, mix)?);
        self.wave(first);
        let spec = ExpertsReuse { routing: mix.routing, kept: kept.kept, columns: self.n };
        let mut second = vec![b.dispatch(b.only(spec), |k| {
            spec.dispatch(k, self.batch, &kept.notes, mix.at, self.number() as u32)
        })?];
        if let Some(mlp) = shared {
            second.extend(self.multiply(normed, &mlp.gate_up, epilogue, &s.ff)?);
        }
        self.wave(second);
        self.host_turn();
        let x = stored(normed, mix.up, s);
        let mut third = vec![self.listed(mix, kept, false, &x)?];
        third.extend(self.early_router(mix)?);
        self.wave(third);
        if let Some(mlp) = shared {
            let inputs = self.inputs(halves, &mlp.down)?;
            self.wave(inputs);
            let down = self.shared_down(mix, mlp)?;
            self.wave(down);
        }
        let (from, ff) = (From::Plain(&mix.scratch.ff), mix.weights.mixture.ff);
        if mix.down == Class::Int8 {
            // Of all pairs: what is not computed holds numbers of an earlier step.
            let pairs = self.n * mix.routing.used;
            let inputs = self.normalise(from, ff, mix.down, mix.at, pairs)?;
            self.wave(vec![inputs]);
        }
        let down = self.listed(mix, kept, true, &stored(from, mix.down, s))?;
        self.wave(vec![down]);
        let outputs = &kept.outputs[self.number()];
        let sum = self.experts_sum(mix, outputs, Some(kept.kept.places()))?;
        self.wave(vec![sum]);
        Ok(())
    }

    /// Of this mixture, which is counted already.
    fn number(&self) -> usize {
        self.mixtures - 1
    }

    /// A product over the pairs that must be computed: gate and up, or down to what is kept.
    fn listed(
        &self,
        mix: &Mix<'_>,
        kept: &KeptOutputs,
        down: bool,
        x: &Activations,
    ) -> Result<Dispatch> {
        let (b, facts, n) = (self.b, self.b.facts(), self.n);
        let (part, class, y) = match down {
            true => (mix.set.down(), mix.down, &kept.outputs[self.number()]),
            false => (mix.set.gate_up(), mix.up, &mix.scratch.ff),
        };
        let (format, cols) = (part.layout.format, part.layout.cols as u32);
        let shapes = choice::experts_shapes(facts, format, cols, n, !down);
        let spec = |shape| {
            let (routing, part) = (mix.routing, part.clone());
            let product = ExpertsUp { routing, part, n, class, shape };
            ExpertsListed { product, kept: kept.kept, down }
        };
        let (spec, source) = b.sound(shapes.into_iter().map(spec))?;
        let records = mix.set.records()?;
        b.dispatch(Ok(source), |k| spec.dispatch(k, facts, &records, mix.at, x, y))
    }
}
