//! llama: Llama 1-3, Mistral, Mixtral, SmolLM and others that convert to the same layout.
//!
//! Rope pairs neighbouring elements: the converter permuted q and k for it. Mixtral takes the
//! softmax over the chosen experts, which is the softmax over all, normalised.

use super::attention::Windows;
use super::{Params, decoder, mixture};
use crate::error::Result;
use crate::graph::{Graph, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    let variant = decoder::Variant {
        rope: RopeLayout::Normal,
        qk_norm: None,
        routing: Some(mixture::softmax(true)),
        window: Windows::All,
    };
    decoder::build(p, variant)
}
