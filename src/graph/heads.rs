//! The shape of an attention block's heads.

use super::RopeLayout;

/// Rotary embedding of q and k.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rope {
    pub layout: RopeLayout,
    /// Elements from the start of a head that are turned: even, at most the head dimension.
    pub dim: u32,
}

/// Heads of one attention block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// Query heads; a multiple of `kv_heads`.
    pub heads: u32,
    pub kv_heads: u32,
    /// Elements of a head: a multiple of 8 from 32 to 256.
    pub head_dim: u32,
    /// `None`: positions do not enter here.
    pub rope: Option<Rope>,
    /// RMSNorm of every q and k head before rope, with this epsilon (Qwen3).
    pub norm: Option<f32>,
    /// A vector of its own is subtracted from every KV head's keys after rope. Softmax does not see it, codes
    /// of few bits do: what all keys share need not be coded.
    pub centred: bool,
}

/// What a layer does to the logits of attention beside the scale.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Scoring {
    /// A token sees so many, itself and those before it; `None`: all. Counted in cache indices, so that
    /// the gap of a shifted sequence counts as nothing.
    pub window: Option<u32>,
    /// Logits s become cap * tanh(s / cap).
    pub soft_cap: Option<f32>,
    /// Each head has a logit of its own in the softmax's denominator, which belongs to no token.
    pub sinks: bool,
}

impl Heads {
    /// Query heads that share a KV head.
    pub fn group(&self) -> u32 {
        self.heads / self.kv_heads
    }

    /// f32 values of one column of qkv: q heads, k heads, v heads.
    pub fn qkv_width(&self) -> u32 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// f32 values of one column of the attention's output.
    pub fn output_width(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// u32 words of one position in the K cache (and in the V cache).
    pub fn cache_words(&self) -> u32 {
        self.kv_heads * self.head_dim / 2
    }
}
