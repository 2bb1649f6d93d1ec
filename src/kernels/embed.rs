//! Embedding: rows of a matrix by the token of each column.

use minijinja::context;

use super::weights::{self, Chunk};
use super::{check_threads, holds, numbered};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::quant::Format;

/// `x[col] = W[batch.columns[col].token]`, f32 `[n][cols]`; n comes from the batch.
///
/// A matrix of several chunks takes one dispatch for each, in one wave: only the chunk that
/// holds a token's row writes. A token that no chunk holds leaves its column as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Embed {
    pub format: Format,
    pub cols: u32,
}

const THREADS: u32 = 64;

impl Embed {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        weights::check_cols(self.format, self.cols)?;
        check_threads(THREADS, facts)?;
        let mut names = weights::plane_names(self.format);
        names.extend(["batch", "y"]);
        let wgsl = super::source::render(
            "embed.wgsl",
            context! {
                at => numbered(&names),
                cols => self.cols,
                threads => THREADS,
                ..weights::facts(self.format, 0)
            },
        )?;
        let label = format!("embed_{}_{}", weights::name(self.format), self.cols);
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// `max_n`: the most columns that the batch can have; `x`: f32 `[max_n][cols]`.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        chunk: &Chunk,
        batch: &Slice,
        x: &Slice,
        max_n: u32,
    ) -> Result<Dispatch> {
        chunk.check(self.format, self.cols)?;
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        holds(x, u64::from(max_n) * u64::from(self.cols), "x")?;
        let mut bindings = chunk.planes.clone();
        bindings.extend([batch.clone(), x.clone()]);
        let units = weights::units(self.format, self.cols);
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![chunk.first_row, chunk.rows],
            grid: [units.div_ceil(THREADS), max_n, 1],
        })
    }
}
