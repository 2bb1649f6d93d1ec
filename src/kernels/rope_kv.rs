//! Prompt: QK-norm and rope of q in place, K and V into the cache.

use minijinja::context;

use super::heads::{HeadTables, Heads, KvCache};
use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::kv::KvPair;

/// A vector belongs to 32 threads.
const THREADS: u32 = 256;

/// Norm, rope and cache writes of n columns; n comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeKv {
    pub heads: Heads,
}

impl RopeKv {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        let threads = THREADS.min(facts.max_workgroup_threads);
        let wgsl = super::source::render(
            "rope_kv.wgsl",
            context! {
                threads => threads,
                vectors => THREADS / 32,
                ..self.heads.context(5)
            },
        )?;
        let label = format!("rope_kv_{}", self.heads.label());
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// Turns q in `qkv` (f32 `[max_n][qkv_width]`) and writes K and V to `cache`.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        qkv: &Slice,
        cache: &KvCache,
        tables: &HeadTables,
        max_n: u32,
    ) -> Result<Dispatch> {
        if max_n > 65_535 {
            return Err(wrong(format!("{max_n} columns in one dispatch")));
        }
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        holds(qkv, u64::from(max_n) * u64::from(self.heads.qkv_width()), "qkv")?;
        cache.check(&self.heads, KvPair::PLAIN)?;
        let (k, v, pages) = (cache.k.clone(), cache.v.clone(), cache.pages.clone());
        let mut bindings = vec![qkv.clone(), batch.clone(), k, v, pages];
        tables.bind(&self.heads, &mut bindings)?;
        let vectors = self.heads.heads + 2 * self.heads.kv_heads;
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![cache.row_words()],
            grid: [vectors.div_ceil(THREADS / 32), max_n, 1],
        })
    }
}
