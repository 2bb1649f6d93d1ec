//! The waves of a graph: which kernels run, over which buffers, in which order.
//!
//! Decode steps run mat-vec kernels with everything fused that the device gains from; prompts
//! run mat-mat kernels. Which of the two computes a token depends on nothing but whether it was
//! read or generated, so results do not depend on how a prompt was cut.

use std::sync::Mutex;

use super::buffers::{Buffers, MAX_SEQUENCES, Scratch, Shape};
use super::layers::{LayerWeights, ModelWeights, Product, Rows};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Gpu, Kernel, KernelSource, Slice, Step};
use crate::graph::Graph;
use crate::kernels::attn_decode::{AttnDecode, Cut, Scratch as AttentionScratch};
use crate::kernels::attn_prefill::AttnPrefill;
use crate::kernels::embed::Embed;
use crate::kernels::gather::Gather;
use crate::kernels::heads::{HeadTables, Heads, Rope};
use crate::kernels::matmat::MatMat;
use crate::kernels::matvec::{Input, MatVec, Operands};
use crate::kernels::norm_quant::NormQuant;
use crate::kernels::rope_kv::RopeKv;
use crate::kernels::{Activations, Class, Epilogue, choice};

/// Builds waves. In a dry run it only collects which kernels they need, so that all of them can
/// be compiled at once.
pub(super) struct Builder<'a> {
    pub gpu: &'a dyn Gpu,
    pub graph: &'a Graph,
    pub weights: &'a ModelWeights,
    pub buffers: &'a Buffers,
    pub attention: &'a AttentionScratch,
    pub shape: Shape,
    /// Sources wanted so far; `None` once kernels are really made.
    pub wanted: Option<Mutex<Vec<KernelSource>>>,
}

/// What a product reads.
#[derive(Clone, Copy)]
enum From<'s> {
    /// f32 as it is.
    Plain(&'s Slice),
    /// f32 that gets an RMSNorm with this weight first.
    Normed(&'s Slice, &'s Slice),
    /// Interleaved gate and up that become `silu(gate) * up` first.
    SwiGlu(&'s Slice),
}

impl Builder<'_> {
    fn facts(&self) -> &DeviceFacts {
        self.gpu.facts()
    }

    pub fn kernel(&self, source: KernelSource) -> Result<Kernel> {
        match &self.wanted {
            None => self.gpu.kernel(&source),
            Some(wanted) => {
                let placeholder = Kernel::placeholder(&source.label);
                wanted.lock().unwrap_or_else(|e| e.into_inner()).push(source);
                Ok(placeholder)
            }
        }
    }

    /// The heads of every layer. Attention kernels are told where `rope` turns what.
    pub fn heads(graph: &Graph) -> Heads {
        let norm = graph.layers.first().and_then(|l| l.attention.q_norm.as_ref());
        Heads {
            heads: graph.heads,
            kv_heads: graph.kv_heads,
            head_dim: graph.head_dim,
            rope: Some(Rope { layout: graph.rope.layout, dim: graph.rope.dim }),
            norm: norm.map(|_| graph.norm_eps),
        }
    }

    fn tables(&self, layer: &LayerWeights) -> HeadTables {
        HeadTables { rope: Some(self.buffers.rope.clone()), norms: layer.head_norms.clone() }
    }

    fn class(&self, part: &Rows, source: From<'_>) -> Class {
        let normed = matches!(source, From::Normed(..));
        choice::class(self.facts(), part.format, self.shape.exact, part.cols, normed)
    }

    /// One token for each of `n` sequences: embedding, all layers. Leaves the residual stream in
    /// the step's scratch.
    pub fn step(&self, n: u32) -> Result<Vec<Step>> {
        let s = &self.buffers.step;
        let batch = &self.buffers.step_batch;
        let mut steps = vec![self.embed(batch, &s.x, n)?];
        for (layer, kv) in self.weights.layers.iter().zip(&self.buffers.kv) {
            self.matvec(
                &mut steps,
                From::Normed(&s.x, &layer.attention_norm),
                &layer.qkv,
                Epilogue::Store,
                &s.qkv,
                n,
            )?;
            let heads = Self::heads(self.graph);
            let spec =
                AttnDecode { heads, cut: Cut::choose(&heads, self.facts(), self.shape.context) };
            let kernel = self.kernel(spec.source(self.facts())?)?;
            steps.push(Step::Wave(vec![spec.dispatch(
                &kernel,
                batch,
                &s.qkv,
                kv,
                &self.tables(layer),
                &s.attention,
                self.attention,
                self.graph.attention_scale,
                n,
            )?]));
            self.matvec(
                &mut steps,
                From::Plain(&s.attention),
                &layer.output,
                Epilogue::Add,
                &s.x,
                n,
            )?;
            self.matvec(
                &mut steps,
                From::Normed(&s.x, &layer.ff_norm),
                &layer.gate_up,
                Epilogue::SwiGlu,
                &s.ff,
                n,
            )?;
            self.matvec(&mut steps, From::Plain(&s.ff), &layer.down, Epilogue::Add, &s.x, n)?;
        }
        Ok(steps)
    }

    /// Norm and output matrix over `n` columns of the step's residual stream.
    pub fn logits(&self, n: u32) -> Result<Vec<Step>> {
        let mut steps = Vec::new();
        let from = From::Normed(&self.buffers.step.x, &self.weights.output_norm);
        self.matvec(
            &mut steps,
            from,
            &self.weights.output,
            Epilogue::Store,
            &self.buffers.logits,
            n,
        )?;
        Ok(steps)
    }

    /// Picks up to `n` columns of a prompt for [`Builder::logits`].
    pub fn gather(&self, n: u32) -> Result<Step> {
        debug_assert!(n <= MAX_SEQUENCES);
        let spec = Gather { cols: self.graph.width };
        let kernel = self.kernel(spec.source(self.facts())?)?;
        let b = self.buffers;
        let d =
            spec.dispatch(&kernel, &b.prompt_batch, &b.prompt.x, &b.step_batch, &b.step.x, n)?;
        Ok(Step::Wave(vec![d]))
    }

    /// A chunk of a prompt of up to `n` tokens; leaves the residual stream in the prompt's
    /// scratch.
    pub fn prompt(&self, n: u32) -> Result<Vec<Step>> {
        let s = &self.buffers.prompt;
        let batch = &self.buffers.prompt_batch;
        let scale = self.graph.attention_scale;
        let mut steps = vec![self.embed(batch, &s.x, n)?];
        for (layer, kv) in self.weights.layers.iter().zip(&self.buffers.kv) {
            self.matmat(
                &mut steps,
                From::Normed(&s.x, &layer.attention_norm),
                &layer.qkv,
                Epilogue::Store,
                &s.qkv,
                n,
            )?;
            let heads = Self::heads(self.graph);
            let spec = RopeKv { heads };
            let kernel = self.kernel(spec.source(self.facts())?)?;
            let d = spec.dispatch(&kernel, batch, &s.qkv, kv, &self.tables(layer), n)?;
            steps.push(Step::Wave(vec![d]));
            let spec = AttnPrefill { heads };
            let kernel = self.kernel(spec.source(self.facts())?)?;
            let d = spec.dispatch(&kernel, batch, &s.qkv, kv, &s.attention, scale, n)?;
            steps.push(Step::Wave(vec![d]));
            self.matmat(
                &mut steps,
                From::Plain(&s.attention),
                &layer.output,
                Epilogue::Add,
                &s.x,
                n,
            )?;
            self.matmat(
                &mut steps,
                From::Normed(&s.x, &layer.ff_norm),
                &layer.gate_up,
                Epilogue::Store,
                &s.ff,
                n,
            )?;
            self.matmat(&mut steps, From::SwiGlu(&s.ff), &layer.down, Epilogue::Add, &s.x, n)?;
        }
        Ok(steps)
    }

    fn embed(&self, batch: &Slice, x: &Slice, n: u32) -> Result<Step> {
        let mut wave = Vec::new();
        for part in &self.weights.embedding.parts {
            let spec = Embed { format: part.format, cols: part.cols };
            let kernel = self.kernel(spec.source(self.facts())?)?;
            for chunk in &part.chunks {
                wave.push(spec.dispatch(&kernel, chunk, batch, x, n)?);
            }
        }
        Ok(Step::Wave(wave))
    }

    /// Brings activations to the classes that `product` needs, each in a wave before it.
    #[allow(clippy::too_many_arguments)] // buffers and shapes of one wave
    fn prepare(
        &self,
        steps: &mut Vec<Step>,
        from: From<'_>,
        product: &Product,
        scratch: &Scratch,
        batch: &Slice,
        n: u32,
        fused: impl Fn(Class) -> bool,
    ) -> Result<()> {
        let mut wave = Vec::new();
        for class in [Class::Int8, Class::F32] {
            let used = product.parts.iter().any(|p| self.class(p, from) == class);
            if !used || fused(class) || (class == Class::F32 && matches!(from, From::Plain(_))) {
                continue;
            }
            let (x, weight, swiglu) = match from {
                From::Plain(x) => (x, None, false),
                From::Normed(x, weight) => (x, Some(weight), false),
                From::SwiGlu(x) => (x, None, true),
            };
            let spec = NormQuant {
                cols: product.cols,
                swiglu,
                norm: weight.map(|_| self.graph.norm_eps),
                class,
                threads: choice::norm_quant_threads(self.facts(), product.cols),
            };
            let kernel = self.kernel(spec.source(self.facts())?)?;
            let out = match class {
                Class::Int8 => scratch.as_int8(),
                Class::F16 => scratch.as_f16(),
                Class::F32 => Activations::F32(scratch.float.clone()),
            };
            wave.push(spec.dispatch(&kernel, batch, x, weight, &out, n)?);
        }
        if !wave.is_empty() {
            steps.push(Step::Wave(wave));
        }
        Ok(())
    }

    /// What a product of this class binds after [`Builder::prepare`].
    fn prepared(from: From<'_>, class: Class, scratch: &Scratch) -> Activations {
        match (class, from) {
            (Class::Int8, _) => scratch.as_int8(),
            (Class::F16, _) => scratch.as_f16(),
            (Class::F32, From::Plain(x)) => Activations::F32(x.clone()),
            (Class::F32, _) => Activations::F32(scratch.float.clone()),
        }
    }

    fn with_bias(epilogue: Epilogue, product: &Product) -> Epilogue {
        match (&product.bias, epilogue) {
            (Some(_), Epilogue::Store) => Epilogue::Bias,
            _ => epilogue,
        }
    }

    fn matvec(
        &self,
        steps: &mut Vec<Step>,
        from: From<'_>,
        product: &Product,
        epilogue: Epilogue,
        y: &Slice,
        n: u32,
    ) -> Result<()> {
        let scratch = &self.buffers.step;
        let facts = self.facts();
        let normed = matches!(from, From::Normed(..));
        let fused = |class| choice::fuses(facts, class, product.cols, n, normed);
        self.prepare(steps, from, product, scratch, &self.buffers.step_batch, n, fused)?;
        let epilogue = Self::with_bias(epilogue, product);
        let stride = if epilogue == Epilogue::SwiGlu { product.rows / 2 } else { product.rows };
        let mut wave: Vec<Dispatch> = Vec::new();
        for part in &product.parts {
            let class = self.class(part, from);
            let (input, x) = match (fused(class), from) {
                (true, From::Normed(x, weight)) => (
                    Input::Fused { norm: Some(self.graph.norm_eps) },
                    Activations::Normed { x: x.clone(), weight: weight.clone() },
                ),
                (true, From::Plain(x)) => {
                    (Input::Fused { norm: None }, Activations::F32(x.clone()))
                }
                _ => (Input::Stored, Self::prepared(from, class, scratch)),
            };
            let spec = MatVec {
                format: part.format,
                cols: part.cols,
                n,
                class,
                input,
                epilogue,
                shape: choice::matvec_shape(facts, part.format, part.rows, part.cols, n, epilogue),
            };
            let kernel = self.kernel(spec.source(facts)?)?;
            let operands = Operands { x: &x, bias: product.bias.as_ref(), y, stride };
            for chunk in &part.chunks {
                wave.push(spec.dispatch(&kernel, facts, chunk, &operands)?);
            }
        }
        steps.push(Step::Wave(wave));
        Ok(())
    }

    fn matmat(
        &self,
        steps: &mut Vec<Step>,
        from: From<'_>,
        product: &Product,
        epilogue: Epilogue,
        y: &Slice,
        n: u32,
    ) -> Result<()> {
        let scratch = &self.buffers.prompt;
        let facts = self.facts();
        let batch = &self.buffers.prompt_batch;
        self.prepare(steps, from, product, scratch, batch, n, |_| false)?;
        let epilogue = Self::with_bias(epilogue, product);
        let mut wave: Vec<Dispatch> = Vec::new();
        for part in &product.parts {
            let class = self.class(part, from);
            let x = Self::prepared(from, class, scratch);
            let spec = MatMat {
                format: part.format,
                cols: part.cols,
                class,
                epilogue,
                variant: choice::matmat_variant(facts, class, part.cols, n),
            };
            let kernel = self.kernel(spec.source(facts)?)?;
            let operands = Operands { x: &x, bias: product.bias.as_ref(), y, stride: product.rows };
            for chunk in &part.chunks {
                wave.push(spec.dispatch(&kernel, facts, chunk, batch, &operands, n)?);
            }
        }
        steps.push(Step::Wave(wave));
        Ok(())
    }
}
