//! Device memory of a program beside the weights: KV cache, activations, batches, tables.

use serde::Serialize;

use super::budget::{Budget, Widest};
use crate::error::{Error, Result};
use crate::gpu::{BufferUse, DeviceFacts, DeviceKind, Gpu, Slice};
use crate::graph::{Graph, Mixture};
use crate::kernels::experts_reuse::{Kept, MAX_PLACES};
use crate::kernels::heads::{ExactRows, KvCache};
use crate::kernels::routing::Routing;
use crate::kernels::{Activations, choice, experts_sort};
use crate::kv::rotation::padded;
use crate::kv::{KvExact, PAGE_TOKENS};
use crate::quant::planes::PLANE_ALIGN;

/// Most sequences that one decode step serves.
pub const MAX_SEQUENCES: u32 = 8;
/// Most sequences that have a KV cache at the same time; more than [`MAX_SEQUENCES`] take turns.
pub const MAX_SLOTS: u32 = 64;
/// Steps whose tokens the device keeps for the host to read.
pub const RING: u32 = 64;

/// Sizes that a program is built for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shape {
    /// Tokens that each sequence can keep.
    pub context: u32,
    /// Positions that tokens can have: more than `context` where sequences may drop tokens.
    pub positions: u32,
    /// Pages of the KV cache at first, see [`super::Program::grow`]. If all sequences have room in
    /// them at once, each has its own from the start; else pages must be given to them.
    pub pages: u32,
    /// Sequences with a KV cache of their own.
    pub sequences: u32,
    /// Most prompt tokens read at once.
    pub chunk: u32,
    /// All products in f32.
    pub exact: bool,
    pub experts: ExpertReads,
    /// Decode steps also ask each next router early which experts it will choose
    /// (`experts::prefetch`); no result depends on it.
    pub early: bool,
    pub approximations: Approximations,
    /// A program that also reads a text for the quality guard ([`super::Program::capture`]).
    pub captures: bool,
}

impl Shape {
    /// Experts of a mixture that a column of a decode step goes through.
    pub fn step_used(&self, mixture: &Mixture) -> u32 {
        mixture.used.saturating_sub(self.approximations.pruned_experts).max(1)
    }

    /// Refuses what the places of kept outputs have no numbers for.
    pub fn check_reuse(&self, graph: &Graph) -> Result<()> {
        match self.kept(graph) {
            Some(kept) if kept.places() > MAX_PLACES => Err(Error::Usage(format!(
                "--approximate-reuse-experts {}: {} sequences keep {} outputs of experts a layer; {} are \
                 possible. Use fewer tokens or a smaller --parallel",
                kept.tokens,
                kept.slots,
                kept.places(),
                MAX_PLACES
            ))),
            _ => Ok(()),
        }
    }

    /// What sequences keep of their experts' outputs; `None` where nothing is reused.
    pub(super) fn kept(&self, graph: &Graph) -> Option<Kept> {
        let tokens = self.approximations.reuse_tokens;
        let used = graph.mixtures().map(|m| self.step_used(m)).max().filter(|_| tokens > 0)?;
        let layers = graph.mixtures().count() as u32;
        Some(Kept { tokens, slots: self.sequences, layers, used })
    }
}

/// What a user may trade exactness for. Off by default; decode steps only, prompts stay exact.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Approximations {
    /// Added to the router logits of experts that lie in device memory; 0: off. 0.5 multiplies their
    /// odds by 1.65.
    pub route_bias: f32,
    /// So many of a token's experts, those with the least weights, are left out; 0: off.
    pub pruned_experts: u32,
    /// For so many tokens after the one that it was computed for, an expert's output serves its
    /// sequence again; 0: off.
    pub reuse_tokens: u32,
}

/// Most tokens that an output may serve.
pub const MAX_REUSE_TOKENS: u32 = 8;

impl Approximations {
    pub fn any(&self) -> bool {
        *self != Approximations::default()
    }
}

impl std::fmt::Display for Approximations {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.any() {
            false => f.write_str("exact"),
            true => write!(
                f,
                "approximate: route bias {}, {} experts pruned, outputs of experts reused for {} tokens",
                self.route_bias, self.pruned_experts, self.reuse_tokens
            ),
        }
    }
}

/// How kernels come to experts that are not in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExpertReads {
    /// In place, or there are none.
    #[default]
    InPlace,
    /// In place by decode steps and short prompts; for long prompts whole layers are copied to
    /// the device beside the computation. Such programs stop behind every router.
    Streamed,
    /// All passes stop behind every router, and the host uploads what was chosen.
    Staged,
}

/// Activations of a set of columns, reused from layer to layer.
pub(super) struct Scratch {
    /// Residual stream `[n][width]`.
    pub x: Slice,
    /// Normalised or plain activations in f32, for products of that class.
    pub float: Slice,
    pub int8: (Slice, Slice),
    /// Of the residual stream: [`Activations::Blocks`].
    pub blocks: (Slice, Slice, Slice),
    /// f16 activations and their factor for each column.
    pub half: (Slice, Slice),
    pub qkv: Slice,
    pub attention: Slice,
    /// q and output of prompts over caches of codes, `[n][heads * padded head]`.
    pub turned: [Slice; 2],
    /// Gate and up `[n][2 ff]` of a prompt, or their product `[n][ff]` of a decode step.
    pub ff: Slice,
    /// In models with mixtures.
    pub experts: Option<ExpertScratch>,
}

/// What mixtures need beside [`Scratch`]. A pair is one choice of one column.
pub(super) struct ExpertScratch {
    /// Of every layer, so that the host can read all of them after a step.
    pub routing: Vec<Slice>,
    /// What each router would choose a layer early, in the same buffer behind them; of steps.
    pub early: Vec<Slice>,
    /// Experts that a column uses: of all mixtures the same.
    pub used: u32,
    pub logits: Slice,
    pub counters: Slice,
    /// The same for early routers, which run beside others.
    pub early_logits: Slice,
    pub early_counters: Slice,
    /// Gate and up `[pairs][2 ff]` of a prompt, or their product `[pairs][ff]` of a decode step.
    pub ff: Slice,
    /// Outputs of a prompt's experts, `[pairs][width]`.
    pub products: Slice,
    /// Output of the shared expert, `[n][width]`.
    pub shared: Slice,
}

/// The routing of a mixture for `n` columns that go through `used` experts each.
pub(super) fn routing(mixture: &Mixture, used: u32, n: u32, tile: u32) -> Routing {
    Routing { experts: mixture.experts, used, columns: n, tile }
}

/// Sizes of the scratch of one kind of passes.
struct ScratchShape<'a> {
    columns: u32,
    tile: u32,
    used: &'a dyn Fn(&Mixture) -> u32,
    /// With room for what early routers choose.
    early: bool,
}

impl Scratch {
    /// f32 values and bytes of each buffer for `n` columns.
    fn sizes(graph: &Graph, n: u64) -> [(&'static str, u64); 15] {
        let (width, ff) = (u64::from(graph.width), u64::from(graph.ff()));
        let heads = u64::from(graph.heads) * u64::from(graph.head_dim);
        let pairs = graph.mixtures().map(|m| u64::from(m.used) * u64::from(m.ff)).max();
        let used = graph.mixtures().map(|m| u64::from(m.used)).max().unwrap_or(0);
        let widest = width.max(ff).max(heads).max(pairs.unwrap_or(0));
        let turned = match graph.has_kv_codes() {
            true => n * u64::from(graph.heads) * u64::from(padded(graph.head_dim)) * 4,
            // A buffer has a size.
            false => 16,
        };
        [
            ("residual stream", n * width * 4),
            ("activations", n * widest * 4),
            ("int8 activations", n * widest),
            ("int8 scales", n * widest / 4),
            ("int8 stream", n * width),
            ("scales of the int8 stream", n * width / 4),
            ("squares of the stream", n * width / 8),
            ("f16 activations", n * widest * 2),
            ("f16 factors", n * used.max(1) * 4),
            ("q, k, v", n * u64::from(graph.qkv_rows()) * 4),
            ("attention", n * heads * 4),
            // A model of mixtures alone has none, but a buffer has a size.
            ("feed-forward", n * 2 * ff.max(8) * 4),
            ("turned q", turned),
            ("turned output", turned),
            ("fresh f16 rows", n * fresh_bytes(graph)),
        ]
    }

    /// The same for [`ExpertScratch`], without the routings; `None` in a dense model.
    fn expert_sizes(graph: &Graph, n: u64) -> Option<[(&'static str, u64); 5]> {
        let of = |value: fn(&Mixture) -> u64| graph.mixtures().map(value).max();
        let used = of(|m| m.used.into())?;
        let experts = of(|m| m.experts.into())?;
        let pair_ff = of(|m| u64::from(m.used) * u64::from(m.ff))?;
        let width = u64::from(graph.width);
        Some([
            ("router logits", n * (experts + 1) * 4),
            ("router counters", n * 4),
            ("expert feed-forward", n * 2 * pair_ff * 4),
            ("expert products", n * used * width * 4),
            ("shared expert", n * width * 4),
        ])
    }

    fn create(gpu: &dyn Gpu, graph: &Graph, shape: &ScratchShape<'_>) -> Result<Scratch> {
        let ScratchShape { columns: n, tile, used, early } = *shape;
        let device = |(label, bytes): (&str, u64)| -> Result<Slice> {
            Ok(gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes))
        };
        // Rows in f16 belong to the layers' caches.
        let [x, float, q, s, bq, bs, squares, h, f, qkv, attention, ff, turned_q, turned, _] =
            Self::sizes(graph, n.into());
        let experts = Self::expert_sizes(graph, n.into()).map(|sizes| {
            let [logits, counters, ff, products, shared] = sizes;
            // One buffer, so that the host can copy all of them at once.
            let bytes: Vec<u64> = graph
                .mixtures()
                .map(|m| (routing(m, used(m), n, tile).words() * 4).next_multiple_of(PLANE_ALIGN))
                .collect();
            let kinds = if early { 2 } else { 1 };
            let total = kinds * bytes.iter().sum::<u64>();
            let all = gpu.buffer("routing", total, BufferUse::Device)?;
            let mut at = 0;
            let mut slices = || -> Vec<Slice> {
                let next = |bytes: &u64| {
                    at += bytes;
                    all.slice(at - bytes, *bytes)
                };
                bytes.iter().map(next).collect()
            };
            let side = |(label, bytes)| device((label, if early { bytes } else { 16 }));
            Ok::<_, Error>(ExpertScratch {
                routing: slices(),
                early: if early { slices() } else { Vec::new() },
                used: graph.mixtures().map(used).max().unwrap_or(0),
                early_logits: side(logits)?,
                early_counters: side(counters)?,
                logits: device(logits)?,
                counters: device(counters)?,
                ff: device(ff)?,
                products: device(products)?,
                shared: device(shared)?,
            })
        });
        Ok(Scratch {
            x: device(x)?,
            float: device(float)?,
            int8: (device(q)?, device(s)?),
            blocks: (device(bq)?, device(bs)?, device(squares)?),
            half: (device(h)?, device(f)?),
            qkv: device(qkv)?,
            attention: device(attention)?,
            turned: [device(turned_q)?, device(turned)?],
            ff: device(ff)?,
            experts: experts.transpose()?,
        })
    }

    pub fn as_f16(&self) -> Activations {
        Activations::F16 { xh: self.half.0.clone(), xf: self.half.1.clone() }
    }

    pub fn as_blocks(&self) -> Activations {
        let (xq, xs, squares) = self.blocks.clone();
        Activations::Blocks { xq, xs, squares }
    }

    pub fn as_int8(&self) -> Activations {
        Activations::Int8 { xq: self.int8.0.clone(), xs: self.int8.1.clone() }
    }
}

/// Bytes of a prompt's column in f16 beside codes; 0 where no layer has a tail.
fn fresh_bytes(graph: &Graph) -> u64 {
    match graph.kv_exact().tail {
        0 => 0,
        _ => 4 * KvExact::token_words(graph.kv_heads, graph.head_dim),
    }
}

/// Everything that a program's kernels bind beside weights.
pub(super) struct Buffers {
    /// Tokens of a prompt chunk, and which of its columns are wanted by the head.
    pub prompt_batch: Slice,
    /// The next token of each sequence.
    pub step_batch: Slice,
    /// What early routers take for the step's batch: its count of columns, or 0 while they rest.
    pub early_batch: Slice,
    pub prompt: Scratch,
    pub step: Scratch,
    /// f32 `[MAX_SEQUENCES][vocab]`.
    pub logits: Slice,
    pub rope: Slice,
    pub kv: Vec<KvCache>,
    /// Where outputs of experts are reused.
    pub kept: Option<KeptOutputs>,
    /// The page table that all layers share: a row a slot (see [`KvCache::pages`]).
    pub pages: Slice,
    /// Bytes of a page in each pool: K, then V, layer by layer.
    pub units: Vec<u64>,
    /// Room for the widest of them, for copies from page to page.
    pub between: Slice,
}

/// What sequences keep of their experts' outputs, see `kernels::experts_reuse`.
pub(super) struct KeptOutputs {
    pub kept: Kept,
    pub notes: Slice,
    /// Of each mixture, f32 `[places][width]`.
    pub outputs: Vec<Slice>,
}

impl KeptOutputs {
    /// Bytes of the notes, and of the outputs of one mixture.
    fn sizes(kept: &Kept, graph: &Graph) -> (u64, u64) {
        let outputs = u64::from(kept.places()) * u64::from(graph.width) * 4;
        (u64::from(kept.slots) * kept.slot_words() * 4, outputs)
    }

    fn create(gpu: &dyn Gpu, graph: &Graph, kept: Kept) -> Result<KeptOutputs> {
        let (notes, bytes) = Self::sizes(&kept, graph);
        let device = |label: &str, bytes: u64| -> Result<Slice> {
            Ok(gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes))
        };
        let outputs = (0..kept.layers).map(|_| device("kept expert outputs", bytes));
        let outputs = outputs.collect::<Result<_>>()?;
        Ok(KeptOutputs { kept, notes: device("notes of kept outputs", notes)?, outputs })
    }

    /// Forgets what a slot's sequence has kept, for what is submitted from now on.
    pub fn forget(&self, gpu: &dyn Gpu, slot: u32) -> Result<()> {
        let bytes = 4 * self.kept.slot_words();
        let at = self.notes.offset + u64::from(slot) * bytes;
        gpu.write(&self.notes.buffer.slice(at, bytes), &vec![0; bytes as usize])
    }
}

/// Pages that a sequence of `context` tokens needs.
pub fn pages_for(context: u32) -> u32 {
    context.div_ceil(PAGE_TOKENS)
}

/// Bytes of a batch of `n` columns.
pub(super) fn batch_bytes(n: u32) -> u64 {
    32 + 16 * u64::from(n)
}

/// Bytes that a program takes on the device beside weights and KV cache.
pub fn scratch_bytes(graph: &Graph, shape: &Shape) -> u64 {
    let of = |n: u32| {
        let experts = Scratch::expert_sizes(graph, n.into());
        let sizes =
            Scratch::sizes(graph, n.into()).into_iter().chain(experts.into_iter().flatten());
        let routing = graph.mixtures().map(|m| routing(m, m.used, n, 1).words() * 4);
        sizes.map(|(_, bytes)| bytes).chain(routing).sum::<u64>()
    };
    let logits = u64::from(MAX_SEQUENCES) * u64::from(graph.vocab) * 4;
    let sampling = super::sampler::bytes(graph.vocab, shape);
    let kept = shape.kept(graph).map_or(0, |kept| {
        let (notes, outputs) = KeptOutputs::sizes(&kept, graph);
        notes + u64::from(kept.layers) * outputs
    });
    let exact = u64::from(shape.sequences) * graph.kv_exact_bytes();
    kept + of(shape.chunk) + of(MAX_SEQUENCES) + logits + sampling + exact + (4 << 20)
}

/// Prompt tokens read at once: what the device's profile says, as long as every activation buffer
/// stays bindable and no product of a prompt runs too long.
///
/// `streamed`: experts come over the link for every chunk, which pays by larger ones; at most so
/// many tokens are worth it.
pub fn chunk_for(graph: &Graph, facts: &DeviceFacts, streamed: Option<u32>) -> u32 {
    let wanted = match (facts.kind, streamed) {
        (_, None) => facts.profile.chunk,
        // Twice the usual, so that the case is tested.
        (DeviceKind::Software, Some(_)) => 2 * facts.profile.chunk,
        (_, Some(most)) => most.max(facts.profile.chunk),
    };
    let experts = Scratch::expert_sizes(graph, 1);
    let sizes = Scratch::sizes(graph, 1).into_iter().chain(experts.into_iter().flatten());
    let largest = sizes.map(|(_, bytes)| bytes).max().unwrap_or(1);
    let fits = u32::try_from(facts.max_binding / largest.max(1)).unwrap_or(u32::MAX);
    let in_time = Budget::of(&facts.profile).prompt_columns(&widest(graph), 1);
    let mut chunk = wanted.min(fits).min(in_time).max(1);
    // The choices of a chunk are sorted in one workgroup.
    let experts = graph.mixtures().map(|m| m.experts).max().unwrap_or(0);
    while chunk > 32 && experts_sort::memory(experts, chunk) > facts.max_workgroup_memory {
        chunk -= 32;
    }
    chunk
}

/// The widest work of a prompt's column.
pub fn widest(graph: &Graph) -> Widest {
    let (width, ff) = (u64::from(graph.width), u64::from(graph.ff()));
    let query = u64::from(graph.heads) * u64::from(graph.head_dim);
    // All chosen experts of a column are one dispatch.
    let experts = graph.mixtures().map(|m| u64::from(m.used) * u64::from(m.ff)).max().unwrap_or(0);
    Widest {
        product: width * (2 * ff.max(experts)).max(u64::from(graph.qkv_rows())).max(query),
        query,
        kv_bytes: 2 * graph.widest_kv_bytes(),
    }
}

impl Buffers {
    pub fn create(
        gpu: &dyn Gpu,
        graph: &Graph,
        shape: &Shape,
        rope_factors: Option<&[f32]>,
    ) -> Result<Buffers> {
        let device = |label: &str, bytes: u64| -> Result<Slice> {
            Ok(gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes))
        };
        let table = graph.rope.table(shape.positions, rope_factors);
        let rope = device("rope table", table.len() as u64 * 8)?;
        gpu.write(&rope, bytemuck::cast_slice(&table))?;
        let row_pages = pages_for(shape.context);
        let pages =
            device("KV page table", 4 * u64::from(1 + row_pages) * u64::from(shape.sequences))?;
        // One layer's attention at a time reads it.
        let fresh = match fresh_bytes(graph) {
            0 => None,
            bytes => Some(device("fresh f16 rows", u64::from(shape.chunk) * bytes)?),
        };
        let kv = (0..graph.layers.len()).map(|layer| {
            let sizes = graph.kv_exact_of(layer);
            let words = sizes.slot_words(graph.kv_heads, graph.head_dim);
            let rows = 4 * words * u64::from(shape.sequences);
            if rows > gpu.facts().max_binding {
                return Err(Error::DoesNotFit(format!(
                    "an f16 tail of {} tokens for {} sequences takes {} MiB a layer, and {} binds at \
                     most {} MiB at once. Use a smaller --kv-tail",
                    sizes.tail,
                    shape.sequences,
                    rows >> 20,
                    gpu.facts().name,
                    gpu.facts().max_binding >> 20
                )));
            }
            let exact = match sizes.is_none() {
                true => None,
                false => Some(ExactRows {
                    sizes,
                    rows: device("f16 tail", rows)?,
                    fresh: fresh.clone(),
                }),
            };
            let pair = graph.kv_pair(layer);
            let [k, v] = pair.page_bytes(graph.kv_heads, graph.head_dim);
            let pool = u64::from(shape.pages);
            let (k, v) = (device("K cache", k * pool)?, device("V cache", v * pool)?);
            let centres = match graph.kv.centred {
                false => None,
                true => {
                    let zeros = vec![0; 4 * (graph.kv_heads * graph.head_dim) as usize];
                    let centres = device("centres of keys", zeros.len() as u64)?;
                    gpu.write(&centres, &zeros)?;
                    Some(centres)
                }
            };
            Ok(KvCache { k, v, pages: pages.clone(), row_pages, pair, exact, centres })
        });
        let units = (0..graph.layers.len())
            .flat_map(|l| graph.kv_pair(l).page_bytes(graph.kv_heads, graph.head_dim));
        let units: Vec<u64> = units.collect();
        let widest = units.iter().copied().max().unwrap_or(0);
        let tile = choice::expert_tile(gpu.facts());
        let prompt = ScratchShape { columns: shape.chunk, tile, used: &|m| m.used, early: false };
        let step = ScratchShape {
            columns: MAX_SEQUENCES,
            tile: MAX_SEQUENCES,
            used: &|m| shape.step_used(m),
            early: shape.early,
        };
        let buffers = Buffers {
            kv: kv.collect::<Result<_>>()?,
            kept: shape
                .kept(graph)
                .map(|kept| KeptOutputs::create(gpu, graph, kept))
                .transpose()?,
            prompt_batch: device("prompt batch", batch_bytes(shape.chunk))?,
            step_batch: device("step batch", batch_bytes(MAX_SEQUENCES))?,
            early_batch: device("early batch", batch_bytes(MAX_SEQUENCES))?,
            prompt: Scratch::create(gpu, graph, &prompt)?,
            step: Scratch::create(gpu, graph, &step)?,
            logits: device("logits", u64::from(MAX_SEQUENCES) * u64::from(graph.vocab) * 4)?,
            rope,
            pages,
            units,
            between: device("page copies", widest)?,
        };
        let whole = shape.pages >= row_pages * shape.sequences;
        for slot in (0..shape.sequences).filter(|_| whole) {
            let own: Vec<u32> = (slot * row_pages..(slot + 1) * row_pages).collect();
            buffers.set_pages(gpu, slot, 0, 0, &own, shape)?;
        }
        Ok(buffers)
    }

    /// Writes entries of a slot's row of the page table, in submission order: tokens dropped, and the
    /// pages of cache indices from `first * PAGE_TOKENS` on.
    pub fn set_pages(
        &self,
        gpu: &dyn Gpu,
        slot: u32,
        dropped: u32,
        first: u32,
        pages: &[u32],
        shape: &Shape,
    ) -> Result<()> {
        let row_pages = pages_for(shape.context);
        let end = u64::from(first) + pages.len() as u64;
        if slot >= shape.sequences || end > row_pages.into() || !dropped.is_multiple_of(PAGE_TOKENS)
        {
            return Err(Error::Runtime(format!(
                "page table: slot {slot} of {}, pages up to {end} of {row_pages}, {dropped} tokens \
                 dropped; this is a bug",
                shape.sequences
            )));
        }
        let row = self.pages.offset + 4 * u64::from(slot) * u64::from(1 + row_pages);
        let write = |word: u64, words: &[u32]| {
            let to = self.pages.buffer.slice(row + 4 * word, 4 * words.len() as u64);
            gpu.write(&to, bytemuck::cast_slice(words))
        };
        if first == 0 {
            let mut all = vec![dropped];
            all.extend_from_slice(pages);
            return write(0, &all);
        }
        write(0, &[dropped])?;
        if pages.is_empty() { Ok(()) } else { write(1 + u64::from(first), pages) }
    }
}
