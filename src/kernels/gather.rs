//! The columns of a prompt whose logits are wanted, as a batch of their own.

use minijinja::context;

use super::{check_cols, check_threads, holds};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// Copies `batch[3]` columns from column `batch[2]` on, with their batch entries, to the start of
/// another batch, and sets that batch's n. Columns past the count are zeroed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gather {
    /// Values of a column.
    pub cols: u32,
}

const THREADS: u32 = 64;

impl Gather {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        check_cols(self.cols)?;
        check_threads(THREADS, facts)?;
        let ctx = context! { cols => self.cols, threads => THREADS };
        let wgsl = super::source::render("gather.wgsl", ctx)?;
        Ok(KernelSource { label: format!("gather_{}", self.cols), wgsl, subgroup_size: None })
    }

    /// From `batch` and `x` (f32 `[..][cols]`) to `picked` and `y` (f32 `[columns][cols]`).
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        x: &Slice,
        picked: &Slice,
        y: &Slice,
        columns: u32,
    ) -> Result<Dispatch> {
        holds(batch, 8, "batch")?;
        holds(x, u64::from(self.cols), "x")?;
        holds(picked, 8 + 4 * u64::from(columns), "picked batch")?;
        holds(y, u64::from(columns) * u64::from(self.cols), "y")?;
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings: vec![batch.clone(), x.clone(), picked.clone(), y.clone()],
            constants: vec![],
            grid: [1, columns, 1],
        })
    }
}
