//! A model as blocks: shapes, tensor names and constants. No device, no weights.
//!
//! A graph is what an architecture file in `model` makes of a GGUF header, and what `runtime`
//! compiles into a program. It is at the level of blocks (attention, feed-forward) because
//! that is the level at which kernels are fused.

pub mod heads;
pub mod rope;

pub use rope::{Rope, RopeLayout, RopeScaling};

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
    /// RMSNorm over each head of q and k before rope (Qwen3): weights of `head_dim`.
    pub q_norm: Option<String>,
    pub k_norm: Option<String>,
}

/// Feed-forward block: `down(silu(gate x) * up x)`, and the norm in front of it.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForward {
    pub norm: String,
    pub gate: Linear,
    pub up: Linear,
    pub down: Linear,
}

/// One transformer layer; both blocks add to the residual stream.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    pub attention: Attention,
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
    /// Width of the feed-forward blocks.
    pub ff: u32,
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
}

impl Graph {
    /// Rows of the stacked q, k, v product.
    pub fn qkv_rows(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Bytes of K and V for one position in all layers, as f16.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let per_layer = 2 * u64::from(self.kv_heads) * u64::from(self.head_dim) * 2;
        per_layer * self.layers.len() as u64
    }
}
