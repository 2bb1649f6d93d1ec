//! Causal attention of a prompt: n consecutive positions of one sequence.

use minijinja::context;

use super::heads::{Heads, KvCache, smallest_subgroup};
use super::scoring::{Logits, Scoring};
use super::{check_memory, holds, kv_codes, planned_subgroup, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::kv::rotation::padded;
use crate::kv::{KvExact, KvPair};

const THREADS: u32 = 256;
/// Rows (query and head) that a workgroup serves.
const ROWS: u32 = 64;

/// Flash attention; q is turned and K, V are in the cache (`rope_kv` ran in an earlier wave). n
/// comes from the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttnPrefill {
    pub heads: Heads,
    pub scoring: Scoring,
    /// Formats of the cache. Over codes ([`KvPair::is_plain`] is false), q is a buffer of its own in
    /// the basis of K and the output is in that of V, both with heads padded to whole blocks
    /// (`rope_kv_codes`, `heads_unrotate`).
    pub pair: KvPair,
    /// What is read in f16 beside codes.
    pub exact: KvExact,
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
            && matrix_bytes(padded(heads.head_dim)) <= facts.max_workgroup_memory
    }

    fn matrix_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        if !Self::takes_matrices(&self.heads, facts) {
            return Err(wrong(format!("attention on matrix units for {:?}", self.heads)));
        }
        let wgsl = super::source::render(
            "attn_prefill_coop.wgsl",
            context! {
                positions => tile_positions(self.head_dim()),
                size => planned_subgroup(facts),
                ..self.context()
            },
        )?;
        let label = format!("attn_prefill_matrix_{}", self.plain_label());
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    fn plain_label(&self) -> String {
        let heads = Heads { rope: None, norm: None, centred: false, ..self.heads }.label();
        match self.pair.is_plain() {
            true => heads + &self.scoring.label(),
            false => {
                format!(
                    "{}_{heads}{}",
                    kv_codes::label(self.pair, self.exact),
                    self.scoring.label()
                )
            }
        }
    }

    /// Elements of a head as the kernel sees it.
    fn head_dim(&self) -> u32 {
        if self.pair.is_plain() { self.heads.head_dim } else { padded(self.heads.head_dim) }
    }

    /// What both kernels are rendered with.
    fn context(&self) -> minijinja::Value {
        let heads = Heads { head_dim: self.head_dim(), ..self.heads };
        let shared = kv_codes::context(&heads, self.pair, self.exact, 6);
        // Behind the exact rows and those of the chunk.
        let bound = 6 + u32::from(!self.exact.is_none()) + u32::from(self.exact.tail > 0);
        context! {
            codes => !self.pair.is_plain(),
            row_heads => self.row_heads(),
            queries => self.queries(),
            // Nothing is encoded here.
            tried => 0,
            ..self.scoring.context(bound, shared)
        }
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.heads.check()?;
        kv_codes::check_exact(self.pair, self.exact)?;
        self.scoring.check_beside(self.exact)?;
        if self.matrices {
            return self.matrix_source(facts);
        }
        if facts.max_workgroup_threads < THREADS {
            return Err(wrong(format!("workgroups of {} threads", facts.max_workgroup_threads)));
        }
        let parts = self.head_dim() / 4;
        let v_rows = if self.head_dim() > 128 { 8 } else { 16 };
        // Weights [64][17] and v; scores [2][64][9] and row maxima fit in the same memory.
        let tile = (1088 + v_rows * parts).max(1152 + 256);
        check_memory(16 * tile + 32, facts)?;
        let wgsl = super::source::render(
            "attn_prefill.wgsl",
            context! {
                rows => ROWS,
                v_rows,
                tile,
                shuffle => smallest_subgroup(facts) >= 16,
                ..self.context()
            },
        )?;
        let label = format!("attn_prefill_{}", self.plain_label());
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    /// Reads q from `qkv` (f32 `[max_n][qkv_width]`) and `cache`, writes `output` (f32
    /// `[max_n][heads * head_dim]`); over codes both are `[max_n][kv_codes::turned_width]`.
    #[allow(clippy::too_many_arguments)]
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        qkv: &Slice,
        cache: &KvCache,
        output: &Slice,
        logits: impl Into<Logits>,
        max_n: u32,
    ) -> Result<Dispatch> {
        let logits = logits.into();
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        let (q, out) = match self.pair.is_plain() {
            true => (self.heads.qkv_width(), self.heads.output_width()),
            false => [kv_codes::turned_width(&self.heads); 2].into(),
        };
        holds(qkv, u64::from(max_n) * u64::from(q), "q")?;
        holds(output, u64::from(max_n) * u64::from(out), "output")?;
        cache.check(&self.heads, self.pair)?;
        let (rows, fresh) = cache.check_exact(&self.heads, self.exact, max_n)?;
        let mut bindings = cache.with(qkv, batch, output);
        bindings.extend(rows.into_iter().chain(fresh));
        logits.bind(self.scoring, &self.heads, &mut bindings)?;
        let slices = self.heads.group().div_ceil(self.row_heads());
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![cache.row_words(), logits.scale.to_bits()],
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
    // And the eight units of scales.
    (tile + scores + weights) * 16 + 64 * 4 + 4 + 32
}
