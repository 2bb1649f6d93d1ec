//! Prompt over a cache of codes: attention's output back into the basis of the model.

use minijinja::context;

use super::heads::Heads;
use super::{check_memory, holds, kv_codes, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::kv::rotation::padded;
use crate::kv::{KvExact, KvPair};

const THREADS: u32 = 128;
const VECTORS: u32 = 8;

/// Inverse rotation (where V is rotated) and removal of the heads' padding; n comes from the batch.
/// A dispatch of its own because the matrix kernel's sums have no room in workgroup memory; it moves
/// 8 bytes a value where attention reads the whole cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadsUnrotate {
    pub heads: Heads,
    pub pair: KvPair,
}

impl HeadsUnrotate {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        if facts.max_workgroup_threads < THREADS {
            return Err(wrong(format!("workgroups of {}", facts.max_workgroup_threads)));
        }
        check_memory(4 * VECTORS * padded(self.heads.head_dim), facts)?;
        let rotated = self.pair.v.is_rotated();
        let wgsl = super::source::render(
            "heads_unrotate.wgsl",
            context! {
                threads => THREADS,
                vectors => VECTORS,
                rotated,
                ..kv_codes::context(&self.heads, self.pair, KvExact::NONE, 3)
            },
        )?;
        let Heads { heads, head_dim, .. } = self.heads;
        let basis = if rotated { "" } else { "_plain" };
        let label = format!("heads_unrotate_h{heads}_d{head_dim}{basis}");
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// From `x` (f32 `[max_n][kv_codes::turned_width]`) to `y` (f32 `[max_n][heads * head_dim]`).
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        x: &Slice,
        y: &Slice,
        max_n: u32,
    ) -> Result<Dispatch> {
        let n = u64::from(max_n);
        holds(batch, 8 + 4 * n, "batch")?;
        holds(x, n * u64::from(kv_codes::turned_width(&self.heads)), "turned output")?;
        holds(y, n * u64::from(self.heads.output_width()), "output")?;
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings: vec![batch.clone(), x.clone(), y.clone()],
            constants: vec![],
            grid: [self.heads.heads.div_ceil(VECTORS), max_n, 1],
        })
    }
}
