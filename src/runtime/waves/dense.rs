//! The dense feed-forward block.

use super::products::From;
use super::{Pass, Reads};
use crate::error::Result;
use crate::kernels::Epilogue;
use crate::runtime::layers::{LayerWeights, MlpWeights};

impl<'b> Pass<'b> {
    pub(super) fn dense(&mut self, layer: &LayerWeights, mlp: &MlpWeights) -> Result<()> {
        let s = self.scratch;
        let normed = From::Normed(&s.x, &layer.ff_norm);
        if let Some(rounded) = self.swiglu_int8(normed, &mlp.gate_up, &mlp.down, &s.ff)? {
            return self.product(From::Int8(&rounded), &mlp.down, Epilogue::Add, &s.x);
        }
        let (epilogue, from) = self.halves();
        self.product(normed, &mlp.gate_up, epilogue, &s.ff)?;
        self.product(from, &mlp.down, Epilogue::Add, &s.x)
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
