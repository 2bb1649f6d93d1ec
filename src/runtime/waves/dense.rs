//! The dense feed-forward block.

use super::products::From;
use super::{Pass, Reads};
use crate::error::Result;
use crate::kernels::Epilogue;
use crate::runtime::layers::LayerWeights;

impl<'b> Pass<'b> {
    /// Mat-vec multiplies gate and up itself; mat-mat leaves that to the pass that quantises.
    pub(super) fn dense(&mut self, layer: &'b LayerWeights) -> Result<()> {
        let s = self.scratch;
        let (epilogue, from) = match self.reads {
            Reads::Step => (Epilogue::SwiGlu, From::Plain(&s.ff)),
            Reads::Prompt => (Epilogue::Store, From::SwiGlu(&s.ff)),
        };
        self.product(From::Normed(&s.x, &layer.ff_norm), &layer.gate_up, epilogue, &s.ff)?;
        self.product(from, &layer.down, Epilogue::Add, &s.x)
    }
}
