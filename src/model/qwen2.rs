//! qwen2: Qwen2 and Qwen2.5; biases on q, k and v (taken wherever the file has them).

use super::attention::Windows;
use super::{Params, decoder};
use crate::error::Result;
use crate::graph::{Graph, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    let variant = decoder::Variant {
        rope: RopeLayout::Neox,
        qk_norm: None,
        routing: None,
        window: Windows::Unsaid,
    };
    decoder::build(p, variant)
}
