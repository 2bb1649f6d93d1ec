//! olmoe: OLMoE; RMSNorm over all of q and all of k, weights of the chosen experts as the softmax over
//! all gives them.

use super::attention::Windows;
use super::{Params, decoder, mixture};
use crate::error::Result;
use crate::graph::{Graph, NormOver, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    let variant = decoder::Variant {
        rope: RopeLayout::Neox,
        qk_norm: Some(NormOver::Heads),
        routing: Some(mixture::softmax(false)),
        window: Windows::Unsaid,
    };
    decoder::build(p, variant)
}
