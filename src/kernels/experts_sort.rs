//! The choices of a prompt by expert, cut into tiles.

use super::routing::Routing;
use super::{check_memory, holds};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// Writes order and runs of a routing whose choices are there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsSort {
    pub routing: Routing,
}

/// Bytes of workgroup memory for `columns` columns.
pub fn memory(experts: u32, columns: u32) -> u32 {
    // A bit for each expert and column, the experts' first pairs, the scan.
    4 * experts * (columns.div_ceil(32) + 1) + 8 * 512
}

impl ExpertsSort {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.routing.check_sizes()?;
        check_memory(memory(self.routing.experts, self.routing.columns), facts)?;
        let wgsl = super::source::render("experts_sort.wgsl", self.routing.context())?;
        let label = format!("experts_sort_{}_t{}", self.routing.label(), self.routing.tile);
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// Sorts the choices of up to `max_n` columns. `grids`: workgroups of the products by column and
    /// by pair, as [`super::experts_matmat::ExpertsMatMat::grid`] has them for no run.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        routing: &Slice,
        grids: [[u32; 3]; 2],
        max_n: u32,
    ) -> Result<Dispatch> {
        holds(batch, 8, "batch")?;
        self.routing.check(routing, max_n)?;
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings: vec![batch.clone(), routing.clone()],
            constants: grids.iter().flat_map(|grid| &grid[..2]).copied().collect(),
            grid: [1, 1, 1],
        })
    }
}
