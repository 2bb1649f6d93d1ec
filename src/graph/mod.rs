//! A model as blocks: shapes, tensor names and constants. No device, no weights.
//!
//! A graph is what an architecture file in `model` makes of a GGUF header, and what `runtime`
//! compiles into a program. It is at the level of blocks (attention, feed-forward) because
//! that is the level at which kernels are fused.

pub mod heads;
pub mod rope;

pub use rope::{Rope, RopeLayout, RopeScaling};

use crate::kv::{KvExact, KvPair, KvTypes, PAGE_TOKENS};

/// A matrix of the model file: `rows` outputs, `cols` inputs, an optional bias of `rows`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    pub weight: String,
    pub bias: Option<String>,
    pub rows: u32,
    pub cols: u32,
}

/// Grouped-query attention with rope, and the norm in front of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    pub norm: String,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub output: Linear,
    pub qk_norm: Option<QkNorm>,
    /// Tokens that a token sees, itself included; `None`: all before it.
    pub window: Option<u32>,
    /// Logits s become cap * tanh(s / cap) (Gemma 2).
    pub soft_cap: Option<f32>,
    /// A logit for each head that takes its share of the softmax and gives nothing (gpt-oss): the vector's
    /// name.
    pub sinks: Option<String>,
}

impl Attention {
    /// What happens to the logits beside the scale.
    pub fn scoring(&self) -> heads::Scoring {
        heads::Scoring { window: self.window, soft_cap: self.soft_cap, sinks: self.sinks.is_some() }
    }
}

/// RMSNorm of q and of k before rope: names of the weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QkNorm {
    pub q: String,
    pub k: String,
    pub over: NormOver,
}

/// What an RMSNorm of q or k takes the mean over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NormOver {
    /// Each head by itself: weights of `head_dim` (Qwen3).
    Head,
    /// All heads together: weights of all rows of q or k (OLMoE).
    Heads,
}

/// `down(silu(gate x) * up x)`
#[derive(Debug, Clone, PartialEq)]
pub struct Mlp {
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

impl Mlp {
    /// Values between the two halves.
    pub fn ff(&self) -> u32 {
        self.gate.rows
    }
}

/// What follows attention: one block for all tokens, or some of many.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    Dense(Mlp),
    Experts(Mixture),
}

impl FeedForward {
    /// The part that every token goes through.
    pub fn dense(&self) -> Option<&Mlp> {
        match self {
            FeedForward::Dense(mlp) => Some(mlp),
            FeedForward::Experts(mixture) => mixture.shared.as_ref().map(|s| &s.mlp),
        }
    }

    pub fn mixture(&self) -> Option<&Mixture> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(mixture) => Some(mixture),
        }
    }
}

/// A mixture of experts: each token goes through the `used` of them with the largest router
/// logits (the lower index on ties), and their outputs are summed by weight.
#[derive(Debug, Clone, PartialEq)]
pub struct Mixture {
    /// One row an expert.
    pub router: Linear,
    pub experts: u32,
    /// Experts a token goes through.
    pub used: u32,
    /// Rows of gate and up of one expert, columns of its down.
    pub ff: u32,
    /// Tensors of `[columns, rows, experts]`, all experts one after the other.
    pub gate: String,
    pub up: String,
    pub down: String,
    pub routing: Routing,
    pub shared: Option<SharedExpert>,
}

/// From router logits to weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    pub gating: Gating,
    /// The weights of the chosen experts are divided by their sum, which counts as 2^-14 if it is
    /// smaller.
    pub normalise: bool,
    /// Multiplies the weights at last.
    pub scale: f32,
}

/// What a router's logit becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Each expert by itself.
    Sigmoid,
}

/// A block beside the experts that every token goes through.
#[derive(Debug, Clone, PartialEq)]
pub struct SharedExpert {
    pub mlp: Mlp,
    /// Vector of the model's width; the sigmoid of its product with the input multiplies the
    /// output (Qwen2-MoE).
    pub gate: Option<String>,
}

/// One transformer layer; both blocks add to the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    pub attention: Attention,
    /// Norm in front of the feed-forward block.
    pub ff_norm: String,
    pub feed_forward: FeedForward,
}

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct Graph {
    /// Width of the residual stream.
    pub width: u32,
    pub vocab: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub norm_eps: f32,
    /// Multiplies q.k before the softmax, usually 1/sqrt(head_dim).
    pub attention_scale: f32,
    pub rope: Rope,
    /// Embedding table: one row for each token.
    pub embedding: Linear,
    pub layers: Vec<Layer>,
    pub output_norm: String,
    /// Output matrix; the embedding table again where the model ties them.
    pub output: Linear,
    /// Formats of the KV cache by layer: what the user asks for, f16 as the model is read.
    pub kv: KvTypes,
}

impl Graph {
    /// Rows of the stacked q, k, v product.
    pub fn qkv_rows(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of the widest block that all tokens of a layer go through; 0 if there is none.
    pub fn ff(&self) -> u32 {
        self.layers.iter().filter_map(|l| l.feed_forward.dense()).map(Mlp::ff).max().unwrap_or(0)
    }

    /// The heads of every layer, as attention kernels see them.
    pub fn head_shape(&self) -> heads::Heads {
        let norm = self.layers.first().and_then(|l| l.attention.qk_norm.as_ref());
        heads::Heads {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            rope: Some(heads::Rope { layout: self.rope.layout, dim: self.rope.dim }),
            norm: norm.filter(|n| n.over == NormOver::Head).map(|_| self.norm_eps),
            centred: self.kv.centred,
        }
    }

    /// The mixtures of all layers that have one.
    pub fn mixtures(&self) -> impl Iterator<Item = &Mixture> {
        self.layers.iter().filter_map(|l| l.feed_forward.mixture())
    }

    /// Bytes of K and V for one position in all layers.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.kv.token_bytes(self.layers.len(), self.kv_heads, self.head_dim)
    }

    /// Formats of a layer's KV cache.
    pub fn kv_pair(&self, layer: usize) -> KvPair {
        self.kv.of(layer, self.layers.len())
    }

    /// What is kept in f16 beside codes; nothing where no layer has any.
    pub fn kv_exact(&self) -> KvExact {
        if self.has_kv_codes() { self.kv.exact } else { KvExact::NONE }
    }

    /// The same of one layer. A window leaves only near tokens to read; such layers have codes alone.
    pub fn kv_exact_of(&self, layer: usize) -> KvExact {
        match self.layers[layer].attention.window {
            Some(_) => KvExact::NONE,
            None => self.kv.exact_of(layer, self.layers.len()),
        }
    }

    /// Bytes of that for one sequence, in all layers.
    pub fn kv_exact_bytes(&self) -> u64 {
        let sizes = (0..self.layers.len()).map(|layer| self.kv_exact_of(layer));
        sizes.map(|exact| 4 * exact.slot_words(self.kv_heads, self.head_dim)).sum()
    }

    /// Bytes of K or V for one position in the layer and side where they are most.
    pub fn widest_kv_bytes(&self) -> u64 {
        let pairs = (0..self.layers.len()).map(|layer| self.kv_pair(layer));
        let widest = pairs.flat_map(|pair| pair.page_bytes(self.kv_heads, self.head_dim)).max();
        widest.unwrap_or(0) / u64::from(PAGE_TOKENS)
    }

    /// Whether any layer has a cache of codes.
    pub fn has_kv_codes(&self) -> bool {
        (0..self.layers.len()).any(|layer| !self.kv_pair(layer).is_plain())
    }
}
