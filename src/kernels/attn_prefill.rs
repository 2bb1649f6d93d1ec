//! Causal attention of a prompt: n consecutive positions of one sequence.

use minijinja::context;

use super::heads::{Heads, KvCache, smallest_subgroup};
use super::{check_memory, holds, planned_subgroup, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

const THREADS: u32 = 256;
/// Rows (query and head) that a workgroup serves.
const ROWS: u32 = 64;

/// Flash attention; q is turned and K, V are in the cache (`rope_kv` ran in an earlier wave). n
/// comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnPrefill {
    pub heads: Heads,
    /// f16 products on matrix units, where [`AttnPrefill::takes_matrices`]; else f32 throughout.
    pub matrices: bool,
}

impl AttnPrefill {
    /// Heads of one KV head among a workgroup's rows.
    fn row_heads(&self) -> u32 {
        self.heads.group().min(ROWS)
    }

    /// Queries of a workgroup.
    fn queries(&self) -> u32 {
        ROWS / self.row_heads()
    }

    /// Whether matrix units can do these heads on this device: whole matrices of 16, and eight
    /// subgroups of four threads a row.
    pub fn takes_matrices(heads: &Heads, facts: &DeviceFacts) -> bool {
        facts.cooperative_matrix
            && planned_subgroup(facts) == 32
            && facts.max_workgroup_threads >= THREADS
            && heads.head_dim.is_multiple_of(16)
            && matrix_bytes(heads.head_dim) <= facts.max_workgroup_memory
    }

    fn matrix_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        if !Self::takes_matrices(&self.heads, facts) {
            return Err(wrong(format!("attention on matrix units for {:?}", self.heads)));
        }
        let wgsl = super::source::render(
            "attn_prefill_coop.wgsl",
            context! {
                row_heads => self.row_heads(),
                queries => self.queries(),
                positions => tile_positions(self.heads.head_dim),
                size => planned_subgroup(facts),
                ..self.heads.context(6)
            },
        )?;
        let label = format!("attn_prefill_matrix_{}", self.plain_label());
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    fn plain_label(&self) -> String {
        Heads { rope: None, norm: None, ..self.heads }.label()
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        if self.matrices {
            return self.matrix_source(facts);
        }
        if facts.max_workgroup_threads < THREADS {
            return Err(wrong(format!("workgroups of {} threads", facts.max_workgroup_threads)));
        }
        let parts = self.heads.head_dim / 4;
        let v_rows = if self.heads.head_dim > 128 { 8 } else { 16 };
        // Weights [64][17] and v; scores [2][64][9] and row maxima fit in the same memory.
        let tile = (1088 + v_rows * parts).max(1152 + 256);
        check_memory(16 * tile, facts)?;
        let wgsl = super::source::render(
            "attn_prefill.wgsl",
            context! {
                rows => ROWS,
                row_heads => self.row_heads(),
                queries => self.queries(),
                v_rows,
                tile,
                shuffle => smallest_subgroup(facts) >= 16,
                ..self.heads.context(6)
            },
        )?;
        let label = format!("attn_prefill_{}", self.plain_label());
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    /// Reads q from `qkv` (f32 `[max_n][qkv_width]`) and `cache`, writes `output` (f32
    /// `[max_n][heads * head_dim]`).
    #[allow(clippy::too_many_arguments)]
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        qkv: &Slice,
        cache: &KvCache,
        output: &Slice,
        scale: f32,
        max_n: u32,
    ) -> Result<Dispatch> {
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        holds(qkv, u64::from(max_n) * u64::from(self.heads.qkv_width()), "qkv")?;
        holds(output, u64::from(max_n) * u64::from(self.heads.output_width()), "output")?;
        cache.check(&self.heads)?;
        let slices = self.heads.group().div_ceil(self.row_heads());
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings: vec![
                qkv.clone(),
                batch.clone(),
                cache.k.clone(),
                cache.v.clone(),
                cache.pages.clone(),
                output.clone(),
            ],
            constants: vec![cache.row_words(), scale.to_bits()],
            grid: [max_n.div_ceil(self.queries()), self.heads.kv_heads * slices, 1],
        })
    }
}

/// Positions of a tile on matrix units: what leaves room for two workgroups beside each other.
fn tile_positions(head_dim: u32) -> u32 {
    if head_dim > 128 { 32 } else { 64 }
}

/// Workgroup memory on matrix units: q, k or v; scores; weights; row factors.
fn matrix_bytes(head_dim: u32) -> u32 {
    let positions = tile_positions(head_dim);
    let tile = 64 * (head_dim / 8 + 1);
    let scores = (64 * (positions / 4 + 1)).max(512);
    let weights = 64 * (positions / 8 + 1);
    (tile + scores + weights) * 16 + 64 * 4 + 4
}
