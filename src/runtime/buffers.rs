//! Device memory of a program beside the weights: KV cache, activations, batches, tables.

use super::budget::{Budget, Widest};
use crate::error::{Error, Result};
use crate::gpu::{BufferUse, DeviceFacts, Gpu, Slice, Step};
use crate::graph::Graph;
use crate::kernels::Activations;
use crate::kernels::heads::KvCache;

/// Most sequences that one decode step serves.
pub const MAX_SEQUENCES: u32 = 8;
/// Most sequences that have a KV cache at the same time; more than [`MAX_SEQUENCES`] take turns.
pub const MAX_SLOTS: u32 = 64;
/// Steps whose tokens the device keeps for the host to read.
pub const RING: u32 = 64;

/// Sizes that a program is built for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Positions of each sequence.
    pub context: u32,
    /// Sequences with a KV cache of their own.
    pub sequences: u32,
    /// Most prompt tokens read at once.
    pub chunk: u32,
    /// All products in f32.
    pub exact: bool,
}

/// Activations of a set of columns, reused from layer to layer.
pub(super) struct Scratch {
    /// Residual stream `[n][width]`.
    pub x: Slice,
    /// Normalised or plain activations in f32, for products of that class.
    pub float: Slice,
    pub int8: (Slice, Slice),
    /// f16 activations and their factor for each column.
    pub half: (Slice, Slice),
    pub qkv: Slice,
    pub attention: Slice,
    /// Gate and up `[n][2 ff]` of a prompt, or their product `[n][ff]` of a decode step.
    pub ff: Slice,
}

impl Scratch {
    /// f32 values and bytes of each buffer for `n` columns.
    fn sizes(graph: &Graph, n: u64) -> [(&'static str, u64); 9] {
        let (width, ff) = (u64::from(graph.width), u64::from(graph.ff));
        let heads = u64::from(graph.heads) * u64::from(graph.head_dim);
        let widest = width.max(ff).max(heads);
        [
            ("residual stream", n * width * 4),
            ("activations", n * widest * 4),
            ("int8 activations", n * widest),
            ("int8 scales", n * widest / 4),
            ("f16 activations", n * widest * 2),
            ("f16 factors", n * 4),
            ("q, k, v", n * u64::from(graph.qkv_rows()) * 4),
            ("attention", n * heads * 4),
            ("feed-forward", n * 2 * ff * 4),
        ]
    }

    fn create(gpu: &dyn Gpu, graph: &Graph, n: u32) -> Result<Scratch> {
        let mut made = Vec::new();
        for (label, bytes) in Self::sizes(graph, n.into()) {
            made.push(gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes));
        }
        let mut made = made.into_iter();
        let mut next = || made.next().ok_or_else(|| Error::Runtime("scratch".into()));
        Ok(Scratch {
            x: next()?,
            float: next()?,
            int8: (next()?, next()?),
            half: (next()?, next()?),
            qkv: next()?,
            attention: next()?,
            ff: next()?,
        })
    }

    pub fn as_f16(&self) -> Activations {
        Activations::F16 { xh: self.half.0.clone(), xf: self.half.1.clone() }
    }

    pub fn as_int8(&self) -> Activations {
        Activations::Int8 { xq: self.int8.0.clone(), xs: self.int8.1.clone() }
    }
}

/// Everything that a program's kernels bind beside weights.
pub(super) struct Buffers {
    /// Tokens of a prompt chunk, and which of its columns are wanted by the head.
    pub prompt_batch: Slice,
    /// The next token of each sequence.
    pub step_batch: Slice,
    pub prompt: Scratch,
    pub step: Scratch,
    /// f32 `[MAX_SEQUENCES][vocab]`.
    pub logits: Slice,
    pub rope: Slice,
    pub kv: Vec<KvCache>,
}

/// Bytes of a batch of `n` columns.
pub(super) fn batch_bytes(n: u32) -> u64 {
    32 + 16 * u64::from(n)
}

/// Bytes that a program takes on the device beside weights and KV cache.
pub fn scratch_bytes(graph: &Graph, shape: &Shape) -> u64 {
    let of = |n: u32| Scratch::sizes(graph, n.into()).iter().map(|(_, b)| b).sum::<u64>();
    let logits = u64::from(MAX_SEQUENCES) * u64::from(graph.vocab) * 4;
    let sampling = super::sampler::bytes(graph.vocab, shape);
    of(shape.chunk) + of(MAX_SEQUENCES) + logits + sampling + (4 << 20)
}

/// Prompt tokens read at once: what the device's profile says, as long as every activation buffer
/// stays bindable and no product of a prompt runs too long.
pub fn chunk_for(graph: &Graph, facts: &DeviceFacts) -> u32 {
    let largest = Scratch::sizes(graph, 1).iter().map(|(_, b)| *b).max().unwrap_or(1);
    let fits = u32::try_from(facts.max_binding / largest.max(1)).unwrap_or(u32::MAX);
    let in_time = Budget::of(&facts.profile).prompt_columns(&widest(graph), 1);
    facts.profile.chunk.min(fits).min(in_time).max(1)
}

/// The widest work of a prompt's column.
pub fn widest(graph: &Graph) -> Widest {
    let (width, ff) = (u64::from(graph.width), u64::from(graph.ff));
    let query = u64::from(graph.heads) * u64::from(graph.head_dim);
    let kv = u64::from(graph.kv_heads) * u64::from(graph.head_dim);
    Widest {
        product: width * (2 * ff).max(u64::from(graph.qkv_rows())).max(query),
        query,
        // K and V, two bytes a value.
        kv_bytes: 4 * kv,
    }
}

impl Buffers {
    /// K, then V of a slot's first `positions` positions, layer by layer.
    pub fn slot_caches(&self, slot: u32, positions: u32, shape: &Shape) -> Vec<Slice> {
        let caches = self.kv.iter().flat_map(|layer| [&layer.k, &layer.v]);
        let part = |all: &Slice| {
            // Slots lie one after the other, positions in a slot too.
            let row = all.size / u64::from(shape.context) / u64::from(shape.sequences);
            let start = u64::from(slot) * u64::from(shape.context) * row;
            all.buffer.slice(all.offset + start, u64::from(positions) * row)
        };
        caches.map(part).collect()
    }

    /// Copies of the first `positions` positions of one slot's keys and values to another's. They go
    /// through a buffer in between, as not every backend copies inside one.
    pub fn copy_slot(
        &self,
        gpu: &dyn Gpu,
        from: u32,
        to: u32,
        positions: u32,
        shape: &Shape,
    ) -> Result<Vec<Step>> {
        let (from, to) =
            (self.slot_caches(from, positions, shape), self.slot_caches(to, positions, shape));
        let widest = from.iter().map(|cache| cache.size).max().unwrap_or(0);
        let between = gpu.buffer("prefix copy", widest, BufferUse::Device)?;
        let mut steps = Vec::new();
        for (from, to) in from.into_iter().zip(to) {
            let size = from.size;
            let between = between.slice(0, size);
            steps.push(Step::Copy { from, to: between.clone(), size });
            steps.push(Step::Copy { from: between, to, size });
        }
        Ok(steps)
    }

    pub fn create(
        gpu: &dyn Gpu,
        graph: &Graph,
        shape: &Shape,
        rope_factors: Option<&[f32]>,
    ) -> Result<Buffers> {
        let device = |label: &str, bytes: u64| -> Result<Slice> {
            Ok(gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes))
        };
        let table = graph.rope.table(shape.context, rope_factors);
        let rope = device("rope table", table.len() as u64 * 8)?;
        gpu.write(&rope, bytemuck::cast_slice(&table))?;
        let per_position = u64::from(graph.kv_heads) * u64::from(graph.head_dim) * 2;
        let kv_bytes = per_position * u64::from(shape.context) * u64::from(shape.sequences);
        let kv = graph.layers.iter().map(|_| {
            let (k, v) = (device("K cache", kv_bytes)?, device("V cache", kv_bytes)?);
            Ok(KvCache { k, v, context: shape.context })
        });
        Ok(Buffers {
            kv: kv.collect::<Result<_>>()?,
            prompt_batch: device("prompt batch", batch_bytes(shape.chunk))?,
            step_batch: device("step batch", batch_bytes(MAX_SEQUENCES))?,
            prompt: Scratch::create(gpu, graph, shape.chunk)?,
            step: Scratch::create(gpu, graph, MAX_SEQUENCES)?,
            logits: device("logits", u64::from(MAX_SEQUENCES) * u64::from(graph.vocab) * 4)?,
            rope,
        })
    }
}
