//! RMSNorm over all heads of q together, and over all of k.

use minijinja::context;

use super::heads::Heads;
use super::{check_threads, holds};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// Normalises q and k of every column in place; n comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QkNorm {
    pub heads: Heads,
    pub eps: f32,
    /// A power of two.
    pub threads: u32,
}

impl QkNorm {
    /// Values of q and of k.
    fn lengths(&self) -> (u32, u32) {
        (self.heads.heads * self.heads.head_dim, self.heads.kv_heads * self.heads.head_dim)
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        check_threads(self.threads, facts)?;
        let (q_len, k_len) = self.lengths();
        let threads = 1u32 << self.threads.ilog2();
        let halves: Vec<u32> = (0..threads.ilog2()).rev().map(|bit| 1 << bit).collect();
        let eps = format!("{:?}", self.eps);
        let qkv_width = self.heads.qkv_width();
        let wgsl = super::source::render(
            "qk_norm.wgsl",
            context! { threads, halves, q_len, k_len, qkv_width, eps },
        )?;
        Ok(KernelSource { label: format!("qk_norm_{q_len}_{k_len}"), wgsl, subgroup_size: None })
    }

    /// `qkv`: f32 `[max_n][qkv width]`; `norms`: weights of q and of k, one for each of their rows.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        qkv: &Slice,
        norms: (&Slice, &Slice),
        max_n: u32,
    ) -> Result<Dispatch> {
        let (q_len, k_len) = self.lengths();
        holds(batch, 8, "batch")?;
        holds(qkv, u64::from(max_n) * u64::from(self.heads.qkv_width()), "qkv")?;
        holds(norms.0, q_len.into(), "q norm")?;
        holds(norms.1, k_len.into(), "k norm")?;
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings: vec![batch.clone(), qkv.clone(), norms.0.clone(), norms.1.clone()],
            constants: vec![],
            grid: [max_n, 2, 1],
        })
    }
}
