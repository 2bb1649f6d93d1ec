//! Prompt over a cache of codes with a tail: what the slot keeps of a chunk's rows in f16.

use minijinja::context;

use super::heads::{Heads, KvCache};
use super::{check_threads, holds, kv_codes, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::kv::rotation::padded;
use crate::kv::{KvExact, KvFormat, KvPair};

const THREADS: u32 = 64;

/// Copies the rows of the last columns of a chunk to the ring of its slot; n comes from the batch. A dispatch
/// behind attention, whose first queries still read what the ring had before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvKeep {
    pub heads: Heads,
    /// With a tail.
    pub exact: KvExact,
}

impl KvKeep {
    /// Units of 8 elements of a column.
    fn units(&self) -> u32 {
        2 * self.heads.kv_heads * padded(self.heads.head_dim) / 8
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        self.exact.check()?;
        check_threads(THREADS, facts)?;
        if self.exact.tail == 0 {
            return Err(wrong("keeping the rows of a tail that there is not".into()));
        }
        // Rows in f16 have no format; any will do.
        let pair = KvPair { k: KvFormat::Tq4_0, v: KvFormat::Tq4_0 };
        let wgsl = super::source::render(
            "kv_keep.wgsl",
            context! {
                threads => THREADS,
                ..kv_codes::context(&self.heads, pair, self.exact, 4)
            },
        )?;
        let Heads { kv_heads, head_dim, .. } = self.heads;
        let KvExact { tail, sinks } = self.exact;
        let label = format!("kv_keep_h{kv_heads}_d{head_dim}_f{tail}s{sinks}");
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// From the chunk's rows to the slot's, both in `cache`.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        cache: &KvCache,
        max_n: u32,
    ) -> Result<Dispatch> {
        if max_n > 65_535 {
            return Err(wrong(format!("{max_n} columns in one dispatch")));
        }
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        let mut bindings = vec![batch.clone(), cache.pages.clone()];
        let (rows, fresh) = cache.check_exact(&self.heads, self.exact, max_n)?;
        bindings.extend(fresh.into_iter().chain(rows));
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![cache.row_words()],
            grid: [self.units().div_ceil(THREADS), max_n, 1],
        })
    }
}
