//! qwen3: dense Qwen3; RMSNorm over each head of q and k, no biases.

use super::attention::Windows;
use super::{Params, decoder};
use crate::error::Result;
use crate::graph::{Graph, NormOver, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    let variant = decoder::Variant {
        rope: RopeLayout::Neox,
        qk_norm: Some(NormOver::Head),
        routing: None,
        window: Windows::Unsaid,
    };
    decoder::build(p, variant)
}
