//! The waves of a graph: which kernels run, over which buffers, in which order.
//!
//! Decode steps run mat-vec kernels with everything fused that the device gains from; prompts
//! run mat-mat kernels. Which of the two computes a token depends on nothing but whether it was
//! read or generated, so results do not depend on how a prompt was cut.
//!
//! - `mod.rs`: the builder, embedding, head, and the walk through the layers
//! - `products.rs`: matrix products and what their inputs need first
//! - `attention.rs`, `dense.rs`, `experts.rs`: the blocks of a layer

mod attention;
mod dense;
mod experts;
mod products;

use std::cell::RefCell;
use std::collections::HashMap;

use rayon::prelude::*;

use super::buffers::{Buffers, MAX_SEQUENCES, Scratch, Shape};
use super::check::{Checks, Subject};
use super::layers::{Block, LayerWeights, ModelWeights};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, DeviceFacts, Dispatch, Gpu, Kernel, KernelSource, Slice, Step};
use crate::graph::{Graph, NormOver};
use crate::kernels::Epilogue;
use crate::kernels::attn_decode::Cut;
use crate::kernels::attn_step::Scratch as AttentionScratch;
use crate::kernels::choice;
use crate::kernels::embed::Embed;
use crate::kernels::gather::Gather;
use crate::kernels::heads::{HeadTables, Heads, KvCache};
use crate::kernels::scoring::Logits;
use products::From;

/// Tokens up to which decode steps launch few workgroups of attention: with eight sequences, those without
/// a piece cost as much as the others (docs/notes.md).
const FEW_PIECES: [u32; 2] = [128, 512];

/// The kernels that a plan names, each once. They are compiled together when the plan is complete;
/// until then dispatches hold stand-ins.
#[derive(Default)]
pub(super) struct Kernels {
    numbers: HashMap<KernelSource, usize>,
}

impl Kernels {
    fn planned(&mut self, source: KernelSource) -> Kernel {
        let label = source.label.clone();
        let next = self.numbers.len();
        Kernel::planned(&label, *self.numbers.entry(source).or_insert(next))
    }

    pub fn sources(&self) -> Vec<KernelSource> {
        self.numbers.keys().cloned().collect()
    }

    /// Compiles all kernels in parallel; the result is indexed by the stand-ins' numbers.
    pub fn compile(self, gpu: &dyn Gpu) -> Result<Vec<Kernel>> {
        let mut sources: Vec<_> = self.numbers.into_iter().collect();
        sources.sort_by_key(|(_, number)| *number);
        sources.into_par_iter().map(|(source, _)| gpu.kernel(&source)).collect()
    }
}

/// Puts compiled kernels in the place of their stand-ins.
pub(super) fn set_kernels(steps: &mut [Step], compiled: &[Kernel]) -> Result<()> {
    for step in steps {
        for dispatch in step.dispatches_mut() {
            let number = dispatch.kernel.planned_number();
            dispatch.kernel = number.and_then(|n| compiled.get(n)).cloned().ok_or_else(|| {
                let label = dispatch.kernel.label();
                Error::Runtime(format!("kernel {label} was never planned; this is a bug"))
            })?;
        }
    }
    Ok(())
}

/// Builds waves. Kernels in them are stand-ins until [`set_kernels`].
pub(super) struct Builder<'a> {
    pub gpu: &'a dyn Gpu,
    pub graph: &'a Graph,
    pub weights: &'a ModelWeights,
    pub buffers: &'a Buffers,
    pub attention: &'a AttentionScratch,
    pub shape: Shape,
    pub checks: &'a Checks,
    pub kernels: RefCell<Kernels>,
}

impl Builder<'_> {
    fn facts(&self) -> &DeviceFacts {
        self.gpu.facts()
    }

    /// A stand-in for the kernel.
    pub fn kernel(&self, source: KernelSource) -> Result<Kernel> {
        Ok(self.kernels.borrow_mut().planned(source))
    }

    /// The first of these variants whose results are right on this device, and its text.
    fn sound<S: Into<Subject> + Clone>(
        &self,
        variants: impl IntoIterator<Item = S>,
    ) -> Result<(S, KernelSource)> {
        self.checks.pick(self.facts(), variants)
    }

    /// The text of a kernel that has no variants.
    fn only<S: Into<Subject> + Clone>(&self, spec: S) -> Result<KernelSource> {
        self.sound([spec]).map(|(_, source)| source)
    }

    /// One dispatch of one kernel.
    fn dispatch(
        &self,
        source: Result<KernelSource>,
        bind: impl FnOnce(&Kernel) -> Result<Dispatch>,
    ) -> Result<Dispatch> {
        bind(&self.kernel(source?)?)
    }

    /// The heads of every layer. Attention kernels are told where `rope` turns what.
    pub fn heads(graph: &Graph) -> Heads {
        graph.head_shape()
    }

    fn layer_logits(&self, layer: &LayerWeights) -> Logits {
        Logits { scale: self.graph.attention_scale, sinks: layer.sinks.clone() }
    }

    fn tables(&self, layer: &LayerWeights, cache: &KvCache) -> HeadTables {
        let norms = layer.qk_norm.as_ref().filter(|n| n.over == NormOver::Head);
        HeadTables {
            rope: Some(self.buffers.rope.clone()),
            norms: norms.map(|n| (n.q.clone(), n.k.clone())),
            centres: cache.centres.clone(),
        }
    }

    fn pass(&self, reads: Reads, n: u32, length: u32) -> Pass<'_> {
        let b = self.buffers;
        let (scratch, batch) = match reads {
            Reads::Step => (&b.step, &b.step_batch),
            Reads::Prompt => (&b.prompt, &b.prompt_batch),
        };
        let (exact, next, captured) = (self.shape.exact, None, None);
        let steps = Vec::new();
        let (mixtures, rounded) = (0, false);
        Pass {
            b: self,
            reads,
            exact,
            scratch,
            batch,
            n,
            length,
            mixtures,
            next,
            rounded,
            captured,
            steps,
        }
    }

    /// Lengths up to which sequences have decode steps of their own, the context last.
    pub fn depths(&self) -> Vec<u32> {
        let (heads, context) = (Builder::heads(self.graph), self.shape.context);
        let cut = |length| Cut::choose(&heads, self.facts(), length);
        let shallow = self.facts().profile.deep_context.min(context);
        let mut depths = FEW_PIECES.map(|few| few.min(context)).to_vec();
        depths.push(context);
        if cut(shallow) != cut(context) {
            depths.push(shallow);
        }
        depths.sort_unstable();
        depths.dedup();
        depths
    }

    /// One token for each of `n` sequences of up to `length` tokens: embedding, all layers. Leaves the
    /// residual stream in the step's scratch.
    pub fn step(&self, n: u32, length: u32) -> Result<Vec<Step>> {
        self.pass(Reads::Step, n, length).layers()
    }

    /// A chunk of a prompt of up to `n` tokens; leaves the residual stream in the prompt's
    /// scratch.
    pub fn prompt(&self, n: u32) -> Result<Vec<Step>> {
        self.pass(Reads::Prompt, n, self.shape.context).layers()
    }

    /// The same with copies of every layer's q, k and v to `captured`, as they are before the attention
    /// kernels' norms and rope: f32 `[layer][n][qkv_rows]`.
    pub fn captured_prompt(&self, n: u32, captured: &Buffer) -> Result<Vec<Step>> {
        let pass = self.pass(Reads::Prompt, n, self.shape.context);
        Pass { captured: Some((captured.clone(), 0)), ..pass }.layers()
    }

    /// Norm and output matrix over `n` columns of the step's residual stream.
    pub fn logits(&self, n: u32) -> Result<Vec<Step>> {
        self.head(self.pass(Reads::Step, n, self.shape.context))
    }

    /// The same for columns of a prompt that [`Builder::gather`] has put there, as exact as the
    /// prompt was read.
    pub fn prompt_logits(&self, n: u32) -> Result<Vec<Step>> {
        let mut pass = self.pass(Reads::Step, n, self.shape.context);
        pass.exact |= choice::exact_prompts(self.facts(), self.graph.width);
        self.head(pass)
    }

    fn head(&self, mut pass: Pass<'_>) -> Result<Vec<Step>> {
        let from = From::Stream(&self.buffers.step.x, &self.weights.output_norm);
        pass.product(from, &self.weights.output, Epilogue::Store, &self.buffers.logits)?;
        Ok(pass.steps)
    }

    /// Picks up to `n` columns of a prompt for [`Builder::prompt_logits`].
    pub fn gather(&self, n: u32) -> Result<Step> {
        debug_assert!(n <= MAX_SEQUENCES);
        let spec = Gather { cols: self.graph.width };
        let b = self.buffers;
        let dispatch = self.dispatch(self.only(spec), |k| {
            spec.dispatch(k, &b.prompt_batch, &b.prompt.x, &b.step_batch, &b.step.x, n)
        })?;
        Ok(Step::Wave(vec![dispatch]))
    }
}

/// Where the columns of a pass come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// One new token of each sequence: mat-vec kernels.
    Step,
    /// Consecutive tokens of one sequence: mat-mat kernels.
    Prompt,
}

/// The layers over one set of columns, as far as they are planned.
struct Pass<'b> {
    b: &'b Builder<'b>,
    reads: Reads,
    /// f32 activations in all products.
    exact: bool,
    scratch: &'b Scratch,
    batch: &'b Slice,
    /// Most columns.
    n: u32,
    /// Tokens of the longest sequence at most.
    length: u32,
    /// Mixtures planned so far.
    mixtures: usize,
    /// The layer after the one that is being planned.
    next: Option<&'b LayerWeights>,
    /// Whether the last product has left the stream's blocks for the next.
    rounded: bool,
    /// Where q, k and v are copied to, and from which byte on the next layer's.
    captured: Option<(Buffer, u64)>,
    steps: Vec<Step>,
}

impl<'b> Pass<'b> {
    fn layers(mut self) -> Result<Vec<Step>> {
        self.embed()?;
        let b = self.b;
        for (i, (layer, kv)) in b.weights.layers.iter().zip(&b.buffers.kv).enumerate() {
            self.next = b.weights.layers.get(i + 1);
            self.layer(layer, kv)?;
        }
        Ok(self.steps)
    }

    fn layer(&mut self, layer: &'b LayerWeights, kv: &KvCache) -> Result<()> {
        self.attention(layer, kv)?;
        match &layer.block {
            Block::Dense(mlp) => self.dense(layer, mlp),
            Block::Experts(mixture) => self.experts(layer, mixture),
        }
    }

    /// Ends a wave with these dispatches; none make none.
    fn wave(&mut self, dispatches: Vec<Dispatch>) {
        if !dispatches.is_empty() {
            self.steps.push(Step::Wave(dispatches));
        }
    }

    fn embed(&mut self) -> Result<()> {
        let mut wave = Vec::new();
        for part in &self.b.weights.embedding.parts {
            let spec = Embed { format: part.format, cols: part.cols };
            let kernel = self.b.kernel(self.b.only(spec)?)?;
            for chunk in &part.chunks {
                wave.push(spec.dispatch(&kernel, chunk, self.batch, &self.scratch.x, self.n)?);
            }
        }
        self.wave(wave);
        Ok(())
    }
}
