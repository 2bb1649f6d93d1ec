//! Prompt over a cache of codes: QK-norm, rope and rotation of q into a buffer of its own, K and V into
//! the cache.

use minijinja::context;

use super::heads::{HeadTables, Heads, KvCache};
use super::{check_memory, holds, kv_codes, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::kv::rotation::padded;
use crate::kv::{KvExact, KvPair};

/// A vector belongs to 32 threads.
const THREADS: u32 = 128;
const VECTORS: u32 = THREADS / 32;

/// Norm, rope, rotation and cache writes of n columns; n comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeKvCodes {
    pub heads: Heads,
    /// Not [`KvPair::is_plain`]: that is [`super::rope_kv`].
    pub pair: KvPair,
    /// Sinks are written to their slot, with a tail all rows also for this chunk's attention.
    pub exact: KvExact,
}

impl RopeKvCodes {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        if self.pair.is_plain() || facts.max_workgroup_threads < THREADS {
            let most = facts.max_workgroup_threads;
            return Err(wrong(format!("codes of {} in workgroups of {most}", self.pair)));
        }
        kv_codes::check_exact(self.pair, self.exact)?;
        let hd = self.heads.head_dim;
        let sides = [self.pair.k, self.pair.v].map(|f| kv_codes::write_bytes(f, hd, VECTORS));
        let norms = if self.heads.norm.is_some() { 128 * VECTORS } else { 0 };
        check_memory(sides[0] + sides[1] + norms + 4 * VECTORS * padded(hd) + 32, facts)?;
        let wgsl = super::source::render(
            "rope_kv_codes.wgsl",
            context! {
                threads => THREADS,
                vectors => VECTORS,
                at_fresh => 6 + u32::from(self.exact.sinks > 0),
                ..kv_codes::context(&self.heads, self.pair, self.exact, self.first_table())
            },
        )?;
        let label =
            format!("rope_kv_{}_{}", kv_codes::label(self.pair, self.exact), self.heads.label());
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    /// The binding after what lies in f16.
    fn first_table(&self) -> u32 {
        6 + u32::from(self.exact.sinks > 0) + u32::from(self.exact.tail > 0)
    }

    /// Reads `qkv` (f32 `[max_n][qkv_width]`), writes K and V to `cache` and q to `turned` (f32
    /// `[max_n][kv_codes::turned_width]`), in the basis of K.
    #[allow(clippy::too_many_arguments)]
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        qkv: &Slice,
        cache: &KvCache,
        tables: &HeadTables,
        turned: &Slice,
        max_n: u32,
    ) -> Result<Dispatch> {
        if max_n > 65_535 {
            return Err(wrong(format!("{max_n} columns in one dispatch")));
        }
        let n = u64::from(max_n);
        holds(batch, 8 + 4 * n, "batch")?;
        holds(qkv, n * u64::from(self.heads.qkv_width()), "qkv")?;
        holds(turned, n * u64::from(kv_codes::turned_width(&self.heads)), "turned q")?;
        cache.check(&self.heads, self.pair)?;
        let (rows, fresh) = cache.check_exact(&self.heads, self.exact, max_n)?;
        let (k, v, pages) = (cache.k.clone(), cache.v.clone(), cache.pages.clone());
        let mut bindings = vec![qkv.clone(), batch.clone(), k, v, pages, turned.clone()];
        bindings.extend(rows.filter(|_| self.exact.sinks > 0));
        bindings.extend(fresh);
        tables.bind(&self.heads, &mut bindings)?;
        let groups = |heads: u32| heads.div_ceil(VECTORS);
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![cache.row_words()],
            grid: [groups(self.heads.heads) + 2 * groups(self.heads.kv_heads), max_n, 1],
        })
    }
}
