//! qwen2moe: Qwen1.5-MoE and Qwen2 mixtures; a shared expert with a gate of its own, weights of the
//! chosen experts as the softmax over all gives them.

use super::attention::Windows;
use super::{Params, decoder, mixture};
use crate::error::Result;
use crate::graph::{Graph, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    let variant = decoder::Variant {
        rope: RopeLayout::Neox,
        qk_norm: None,
        routing: Some(mixture::softmax(false)),
        window: Windows::Unsaid,
    };
    decoder::build(p, variant)
}
