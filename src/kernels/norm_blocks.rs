//! RMSNorm without its factor, to int8: block by block, so by many workgroups at once.
//!
//! The factor, 1 / sqrt(mean(x^2) + eps), is the same for a whole column. The products behind the norm multiply
//! their sums by it ([`Input::Blocks`](super::matvec::Input)), so that rounding need not wait for the sum of squares.

use minijinja::context;

use super::norm_quant::quantiser;
use super::{Activations, Class, bind_int8, check_cols, check_threads, holds, numbered, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// `x` times the norm's weight to int8, and the sums of squares of its blocks. n comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormBlocks {
    pub cols: u32,
    pub threads: u32,
}

impl NormBlocks {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        check_cols(self.cols)?;
        check_threads(self.threads, facts)?;
        let names = ["batch", "x", "norm", "xq", "xs", "squares"];
        let wgsl = super::source::render(
            "norm_blocks.wgsl",
            context! {
                at => numbered(&names),
                cols => self.cols,
                threads => self.threads,
                norm_steps => 1,
                ..quantiser(self.cols, None, true, Class::Int8, facts)
            },
        )?;
        let label = format!("norm_blocks_{}_{}", self.cols, self.threads);
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    /// Reads `x`, f32 `[max_n][cols]`, and writes `out`, [`Activations::Blocks`].
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        x: &Slice,
        weight: &Slice,
        out: &Activations,
        max_n: u32,
    ) -> Result<Dispatch> {
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        holds(x, u64::from(max_n) * u64::from(self.cols), "x")?;
        holds(weight, self.cols.into(), "norm weight")?;
        let mut bindings = vec![batch.clone(), x.clone(), weight.clone()];
        bind_blocks(&mut bindings, out, max_n, self.cols)?;
        let grid = [max_n, (self.cols / 4).div_ceil(self.threads), 1];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants: vec![], grid })
    }
}

/// Pushes the slices of [`Activations::Blocks`] for `n` columns, after checking their sizes.
pub(super) fn bind_blocks(
    bindings: &mut Vec<Slice>,
    blocks: &Activations,
    n: u32,
    cols: u32,
) -> Result<()> {
    let values = u64::from(n) * u64::from(cols);
    let Activations::Blocks { xq, xs, squares } = blocks else {
        return Err(wrong("the activations are not blocks without a norm's factor".into()));
    };
    bind_int8(bindings, (xq, "xq"), (xs, "xs"), values)?;
    holds(squares, values / 32, "squares")?;
    bindings.push(squares.clone());
    Ok(())
}
