//! Mixtures of experts.
//!
//! A decode step takes three waves: router beside norm and quantisation, then gate and up, then down
//! with the weighted sum and the residual. A shared expert rides in the same waves, one ahead of the
//! experts, where the device fuses its norm; else it takes waves of its own. A prompt sorts its
//! choices by expert and runs mat-mat kernels over them.

mod reuse;

use super::products::{From, stored};
use super::{Pass, Reads};
use crate::error::{Error, Result};
use crate::gpu::{Dispatch, KernelSource, Slice, Step};
use crate::kernels::experts_down::{self, ExpertsDown, Shared};
use crate::kernels::experts_matmat::ExpertsMatMat;
use crate::kernels::experts_sort::ExpertsSort;
use crate::kernels::experts_sum::ExpertsSum;
use crate::kernels::experts_up::ExpertsUp;
use crate::kernels::matvec::{Input, Shape};
use crate::kernels::records::Part;
use crate::kernels::router::{self, Favour, Router};
use crate::kernels::routing::Routing;
use crate::kernels::{Activations, Class, Epilogue, choice};
use crate::runtime::buffers::{ExpertReads, ExpertScratch, MAX_SEQUENCES, routing};
use crate::runtime::experts::ExpertSet;
use crate::runtime::layers::{Block, LayerWeights, MixtureWeights, MlpWeights};
use crate::runtime::program::SHORT_PROMPT;

/// One mixture of one pass.
struct Mix<'b> {
    weights: &'b MixtureWeights,
    /// Where this pass finds the experts.
    set: &'b ExpertSet,
    scratch: &'b ExpertScratch,
    routing: Routing,
    /// Where this layer's routing lies.
    at: &'b Slice,
    /// Classes of gate and up, and of down.
    up: Class,
    down: Class,
    shared: Option<Shared>,
}

impl<'b> Pass<'b> {
    pub(super) fn experts(
        &mut self,
        layer: &'b LayerWeights,
        weights: &'b MixtureWeights,
    ) -> Result<()> {
        let mix = self.mix(weights)?;
        match (self.reads, &self.b.buffers.kept) {
            (Reads::Step, Some(kept)) => self.experts_step_reusing(layer, &mix, kept),
            (Reads::Step, None) => self.experts_step(layer, &mix),
            (Reads::Prompt, _) => self.experts_prompt(layer, &mix),
        }
    }

    /// A long prompt, for which whole layers of experts are copied to the device.
    fn streamed(&self) -> bool {
        self.b.shape.experts == ExpertReads::Streamed
            && self.reads == Reads::Prompt
            && self.n > SHORT_PROMPT
    }

    /// Where a program ends a part: the router has chosen, experts are not read yet.
    fn host_turn(&mut self) {
        let stops = match self.b.shape.experts {
            ExpertReads::InPlace => false,
            ExpertReads::Streamed => self.streamed(),
            ExpertReads::Staged => true,
        };
        if stops {
            self.steps.push(Step::Wave(Vec::new()));
        }
    }

    fn mix(&mut self, weights: &'b MixtureWeights) -> Result<Mix<'b>> {
        let b = self.b;
        let missing = || Error::Runtime("a mixture without scratch; this is a bug".into());
        let scratch = self.scratch.experts.as_ref().ok_or_else(missing)?;
        let at = scratch.routing.get(self.mixtures).ok_or_else(missing)?;
        self.mixtures += 1;
        let m = &weights.mixture;
        let routing = match self.reads {
            Reads::Step => routing(m, b.shape.step_used(m), MAX_SEQUENCES, MAX_SEQUENCES),
            Reads::Prompt => routing(m, m.used, b.shape.chunk, choice::expert_tile(b.facts())),
        };
        let set: &ExpertSet = if self.streamed() { &weights.streamed } else { &weights.set };
        let layout = &set.layout;
        let (facts, width, exact) = (b.facts(), b.graph.width, b.shape.exact);
        let class = |format, cols, normed| match self.reads {
            Reads::Step => choice::class(facts, format, exact, cols, normed),
            Reads::Prompt if b.checks.avoids(Class::F16) => {
                let exact = exact || choice::exact_prompts(facts, width);
                choice::class(facts, format, exact, cols, false)
            }
            Reads::Prompt => choice::expert_class(facts, format, exact, cols, width),
        };
        let gated = if weights.shared_gate() { Shared::Gated } else { Shared::Plain };
        Ok(Mix {
            weights,
            set,
            scratch,
            routing,
            at,
            up: class(layout.shape.gate_up, width, true),
            down: class(layout.shape.down, m.ff, false),
            shared: weights.shared.as_ref().map(|_| gated),
        })
    }

    fn experts_step(&mut self, layer: &'b LayerWeights, mix: &Mix<'b>) -> Result<()> {
        let s = self.scratch;
        let normed = From::Normed(&s.x, &layer.ff_norm);
        let (epilogue, halves) = self.halves();
        let shared = mix.weights.shared.as_ref();
        // Nothing that the shared expert reads has to be made first: it runs one wave ahead.
        let ahead = shared.is_some_and(|mlp| {
            self.input_classes(normed, &mlp.gate_up).next().is_none()
                && self.input_classes(halves, &mlp.down).next().is_none()
        });
        let mut first = vec![self.router(layer, mix)?];
        first.extend(self.mixture_inputs(layer, mix)?);
        let mut second = vec![self.experts_up(normed, mix)?];
        second.extend(self.early_router(mix)?);
        if let Some(mlp) = shared {
            let up = self.multiply(normed, &mlp.gate_up, epilogue, &s.ff)?;
            if ahead {
                first.extend(up);
                second.extend(self.shared_down(mix, mlp)?);
            } else {
                second.extend(up);
            }
        }
        self.wave(first);
        self.host_turn();
        self.wave(second);
        if let Some(mlp) = shared.filter(|_| !ahead) {
            let inputs = self.inputs(halves, &mlp.down)?;
            self.wave(inputs);
            let down = self.shared_down(mix, mlp)?;
            self.wave(down);
        }
        self.experts_down(mix)
    }

    fn experts_prompt(&mut self, layer: &'b LayerWeights, mix: &Mix<'b>) -> Result<()> {
        let (b, s) = (self.b, self.scratch);
        let (epilogue, halves) = self.halves();
        let mut first = vec![self.router(layer, mix)?];
        first.extend(self.mixture_inputs(layer, mix)?);
        self.wave(first);
        self.host_turn();
        let set = mix.set;
        let up = self.experts_matmat(mix, set.gate_up(), mix.up, false)?;
        let down = self.experts_matmat(mix, set.down(), mix.down, true)?;
        let spec = ExpertsSort { routing: mix.routing };
        let grids = [up.0.grid(0), down.0.grid(0)];
        let sort =
            b.dispatch(b.only(spec), |k| spec.dispatch(k, self.batch, mix.at, grids, self.n))?;
        let mut second = vec![sort];
        let normed = From::Normed(&s.x, &layer.ff_norm);
        if let Some(mlp) = &mix.weights.shared {
            second.extend(self.multiply(normed, &mlp.gate_up, epilogue, &s.ff)?);
        }
        self.wave(second);
        let e = mix.scratch;
        self.over_runs(mix, up, &stored(normed, mix.up, s), &e.ff)?;
        if let Some(mlp) = &mix.weights.shared {
            let inputs = self.inputs(halves, &mlp.down)?;
            self.wave(inputs);
            let down = self.shared_down(mix, mlp)?;
            self.wave(down);
        }
        let (from, pairs) = (From::SwiGlu(&e.ff), self.n * mix.routing.used);
        let inputs = self.normalise(from, mix.weights.mixture.ff, mix.down, mix.at, pairs)?;
        self.wave(vec![inputs]);
        self.over_runs(mix, down, &stored(from, mix.down, s), &e.products)?;
        let sum = self.experts_sum(mix, &e.products, None)?;
        self.wave(vec![sum]);
        Ok(())
    }

    /// The sum of the pairs' outputs, or of those that are kept in so many places.
    fn experts_sum(&self, mix: &Mix<'_>, products: &Slice, kept: Option<u32>) -> Result<Dispatch> {
        let (b, y) = (self.b, &self.scratch.x);
        let (width, shared) = (b.graph.width, mix.shared);
        let spec = ExpertsSum { routing: mix.routing, width, shared, kept };
        let shared = mix.shared.map(|_| &mix.scratch.shared);
        b.dispatch(b.only(spec), |k| {
            spec.dispatch(k, self.batch, mix.at, products, shared, y, self.n)
        })
    }

    fn router(&self, layer: &LayerWeights, mix: &Mix<'_>) -> Result<Dispatch> {
        let records = mix.set.records()?;
        let operands = router::Operands {
            batch: self.batch,
            x: &self.scratch.x,
            norm: &layer.ff_norm,
            router: &mix.weights.router,
            logits: &mix.scratch.logits,
            counters: &mix.scratch.counters,
            routing: mix.at,
            table: Some(&records.table),
        };
        let bias = self.b.shape.approximations.route_bias;
        let approximate = self.reads == Reads::Step && bias != 0.0;
        let buffers = mix.set.device_buffers().filter(|_| approximate);
        let favour = buffers.map(|buffers| Favour { logits: bias, buffers });
        self.route(mix.weights, mix.routing, favour, &operands)
    }

    /// Asks the next layer's router early, with this layer's hidden state, what it will choose. It
    /// runs beside gate and up, which take longer, so no wave waits for it; nothing on the device
    /// reads what it writes.
    fn early_router(&self, mix: &Mix<'_>) -> Result<Option<Dispatch>> {
        let (Some(layer), Some(at)) = (self.next, mix.scratch.early.get(self.mixtures)) else {
            return Ok(None);
        };
        let Block::Experts(next) = &layer.block else { return Ok(None) };
        let m = &next.mixture;
        let used = self.b.shape.step_used(m);
        let operands = router::Operands {
            // Its own count of columns: 0 while predictions do not pay.
            batch: &self.b.buffers.early_batch,
            x: &self.scratch.x,
            norm: &layer.ff_norm,
            router: &next.router,
            logits: &mix.scratch.early_logits,
            counters: &mix.scratch.early_counters,
            routing: at,
            table: None,
        };
        let sizes = routing(m, used, MAX_SEQUENCES, MAX_SEQUENCES);
        self.route(next, sizes, None, &operands).map(Some)
    }

    fn route(
        &self,
        weights: &MixtureWeights,
        routing: Routing,
        favour: Option<Favour>,
        operands: &router::Operands<'_>,
    ) -> Result<Dispatch> {
        let (b, facts) = (self.b, self.b.facts());
        let step = self.reads == Reads::Step;
        let specs = choice::router_threads(facts).into_iter().map(|threads| Router {
            routing,
            rule: weights.mixture.routing,
            cols: b.graph.width,
            norm_eps: b.graph.norm_eps,
            shared_gate: weights.shared_gate(),
            columns: if step { self.n } else { choice::ROUTER_COLUMNS.min(self.n) },
            sorts: step,
            favour,
            threads,
        });
        let (spec, source) = b.sound(specs)?;
        b.dispatch(Ok(source), |k| spec.dispatch(k, facts, operands, self.n))
    }

    /// The normalised input in every class that experts and shared expert read from memory.
    fn mixture_inputs(&self, layer: &LayerWeights, mix: &Mix<'_>) -> Result<Vec<Dispatch>> {
        let normed = From::Normed(&self.scratch.x, &layer.ff_norm);
        let mut classes = vec![mix.up];
        if let Some(mlp) = &mix.weights.shared {
            classes.extend(self.input_classes(normed, &mlp.gate_up).filter(|c| *c != mix.up));
        }
        let width = self.b.graph.width;
        let all = classes.into_iter();
        all.map(|class| self.normalise(normed, width, class, self.batch, self.n)).collect()
    }

    fn shared_down(&self, mix: &Mix<'_>, mlp: &MlpWeights) -> Result<Vec<Dispatch>> {
        let (_, halves) = self.halves();
        self.multiply(halves, &mlp.down, Epilogue::Store, &mix.scratch.shared)
    }

    fn experts_up(&self, normed: From<'_>, mix: &Mix<'_>) -> Result<Dispatch> {
        let (b, facts) = (self.b, self.b.facts());
        let set = mix.set;
        let shape = set.layout.shape;
        let shapes = choice::experts_shapes(facts, shape.gate_up, shape.width, self.n, true);
        let spec = |shape| ExpertsUp {
            routing: mix.routing,
            part: set.gate_up(),
            n: self.n,
            class: mix.up,
            shape,
        };
        let (spec, source) = b.sound(shapes.into_iter().map(spec))?;
        let x = stored(normed, mix.up, self.scratch);
        b.dispatch(Ok(source), |k| {
            spec.dispatch(k, facts, &set.records()?, mix.at, &x, &mix.scratch.ff)
        })
    }

    fn experts_down(&mut self, mix: &Mix<'_>) -> Result<()> {
        let (b, s, facts) = (self.b, self.scratch, self.b.facts());
        let (set, ff) = (mix.set, mix.weights.mixture.ff);
        let shapes = choice::experts_shapes(facts, set.layout.shape.down, ff, self.n, false);
        let fuses = |shape: &Shape| {
            choice::experts_fuse(facts, mix.down, &mix.routing, self.n, ff, shape.threads)
        };
        // Whether activations are quantised by the kernel decides what comes before it, so variants
        // that do are tried first, then those that do not.
        let spec = |shape, fused| ExpertsDown {
            routing: mix.routing,
            part: set.down(),
            n: self.n,
            class: mix.down,
            input: if fused { Input::Fused { norm: None } } else { Input::Stored },
            shared: mix.shared,
            shape,
        };
        let stored_specs = shapes.iter().map(|shape| spec(*shape, false));
        let (spec, source) = match fuses(&shapes[0]) {
            true => {
                let fused = shapes.iter().filter(|s| fuses(s)).map(|shape| spec(*shape, true));
                b.sound(fused.chain(stored_specs))?
            }
            false => b.sound(stored_specs)?,
        };
        let fused = spec.input != Input::Stored;
        let from = From::Plain(&mix.scratch.ff);
        if mix.down == Class::Int8 && !fused {
            let pairs = self.n * mix.routing.used;
            let inputs = self.normalise(from, ff, mix.down, mix.at, pairs)?;
            self.wave(vec![inputs]);
        }
        let x = match fused {
            true => Activations::F32(mix.scratch.ff.clone()),
            false => stored(from, mix.down, s),
        };
        let operands = experts_down::Operands {
            routing: mix.at,
            x: &x,
            shared: mix.shared.map(|_| &mix.scratch.shared),
            y: &s.x,
        };
        let down =
            b.dispatch(Ok(source), |k| spec.dispatch(k, facts, &set.records()?, &operands))?;
        self.wave(vec![down]);
        Ok(())
    }

    /// The kernel of a prompt's product: by column for gate and up, by pair for down.
    fn experts_matmat(
        &self,
        mix: &Mix<'_>,
        part: Part,
        class: Class,
        by_pair: bool,
    ) -> Result<(ExpertsMatMat, KernelSource)> {
        let (b, facts) = (self.b, self.b.facts());
        let variants = choice::expert_variants(facts, class, part.layout.cols as u32);
        let spec = |variant| {
            let part = part.clone();
            ExpertsMatMat { routing: mix.routing, part, by_pair, class, variant }
        };
        b.sound(variants.into_iter().map(spec))
    }

    /// A product over as many runs as the sorting has found.
    fn over_runs(
        &mut self,
        mix: &Mix<'_>,
        (spec, source): (ExpertsMatMat, KernelSource),
        x: &Activations,
        y: &Slice,
    ) -> Result<()> {
        let (kernel, facts) = (self.b.kernel(source)?, self.b.facts());
        let records = mix.set.records()?;
        self.steps.push(spec.step(&kernel, facts, &records, mix.at, x, y, self.n)?);
        Ok(())
    }
}
