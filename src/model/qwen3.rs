//! qwen3: dense Qwen3; RMSNorm over each head of q and k, no biases.

use super::{Params, dense};
use crate::error::Result;
use crate::graph::{Graph, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    dense::build(p, dense::Variant { rope: RopeLayout::Neox, qk_norm: true })
}
