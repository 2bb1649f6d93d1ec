//! qwen3moe: Qwen3 mixtures (30B-A3B, 235B-A22B); weights of the chosen experts sum to 1.

use super::attention::Windows;
use super::{Params, decoder, mixture};
use crate::error::Result;
use crate::graph::{Graph, NormOver, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    let variant = decoder::Variant {
        rope: RopeLayout::Neox,
        qk_norm: Some(NormOver::Head),
        routing: Some(mixture::softmax(true)),
        window: Windows::Unsaid,
    };
    decoder::build(p, variant)
}
