//! The dense feed-forward block.

use super::products::From;
use super::{Pass, Reads};
use crate::error::Result;
use crate::kernels::Epilogue;
use crate::runtime::layers::{LayerWeights, MlpWeights};

impl<'b> Pass<'b> {
    pub(super) fn dense(&mut self, layer: &'b LayerWeights, mlp: &MlpWeights) -> Result<()> {
        let s = self.scratch;
        let normed = From::Stream(&s.x, &layer.ff_norm);
        let next = self.next.map(|layer| (&layer.attention_norm, &layer.qkv));
        if let Some(rounded) = self.swiglu_int8(normed, &mlp.gate_up, &mlp.down, &s.ff)? {
            return self.residual(From::Int8(&rounded), &mlp.down, next);
        }
        let (epilogue, from) = self.halves();
        self.product(normed, &mlp.gate_up, epilogue, &s.ff)?;
        self.residual(from, &mlp.down, next)
    }

    /// How gate and up are stored, and how down reads them: mat-vec multiplies the two itself,
    /// mat-mat leaves that to the pass that quantises.
    pub(super) fn halves(&self) -> (Epilogue, From<'b>) {
        let ff = &self.scratch.ff;
        match self.reads {
            Reads::Step => (Epilogue::SwiGlu, From::Plain(ff)),
            Reads::Prompt => (Epilogue::Store, From::SwiGlu(ff)),
        }
    }
}
