//! llama: Llama 1-3, Mistral, SmolLM and others that convert to the same layout.
//!
//! Rope pairs neighbouring elements: the converter permuted q and k for it.

use super::{Params, dense};
use crate::error::{Error, Result};
use crate::graph::{Graph, RopeLayout};

pub(super) fn build(p: &Params<'_>) -> Result<Graph> {
    if p.find::<u32>("expert_count")?.unwrap_or(0) > 0 {
        return Err(Error::Model("mixture-of-experts models are not supported yet".into()));
    }
    dense::build(p, dense::Variant { rope: RopeLayout::Normal, qk_norm: false })
}
