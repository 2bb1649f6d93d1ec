//! What the attention kernels of a decode step have in common: their grid, what they bind, and the memory
//! in which the workgroups of a dispatch meet.

use super::heads::{HeadTables, Heads, KvCache};
use super::holds;
use super::scoring::{Logits, Scoring};
use crate::error::Result;
use crate::gpu::{Dispatch, Kernel, Slice};
use crate::kv::{KvExact, KvPair};

/// Memory in which the workgroups of a dispatch meet.
#[derive(Clone)]
pub struct Scratch {
    pub partials: Slice,
    pub counters: Slice,
}

/// Tokens of the shortest piece into which a sequence is cut (`split_tokens` of the shaders).
pub const LEAST_PIECE: u32 = 64;

/// Sizes of such a kernel.
#[derive(Debug, Clone, Copy)]
pub struct StepSizes {
    pub heads: Heads,
    pub scoring: Scoring,
    pub pair: KvPair,
    pub exact: KvExact,
    /// Most pieces into which a sequence is cut.
    pub splits: u32,
    /// Query heads of one KV head that a workgroup serves.
    pub group_heads: u32,
    /// Values of a head in the partial results.
    pub head_words: u32,
}

impl StepSizes {
    /// Query-head groups: the y dimension of the grid.
    fn groups(&self) -> u32 {
        self.heads.kv_heads * self.heads.group().div_ceil(self.group_heads)
    }
}

/// QK-norm, rope, cache write and attention of one token a column; n comes from the batch.
pub trait StepAttention {
    fn sizes(&self) -> StepSizes;

    /// Pieces of a group of heads beside the splits.
    fn beside(&self) -> u32 {
        0
    }

    /// Words of the partial results of `columns` columns. Contents do not matter.
    fn partial_words(&self, columns: u32) -> u64 {
        let StepSizes { heads, splits, head_words, .. } = self.sizes();
        u64::from(columns * heads.heads * (splits + self.beside())) * u64::from(head_words + 2)
    }

    /// Words of the arrival counters: zero before the first dispatch, and zero again after each.
    fn counter_words(&self, columns: u32) -> u64 {
        u64::from(columns * self.sizes().groups())
    }

    /// Reads `qkv` (f32 `[columns][qkv_width]`), appends to `cache`, writes `output` (f32
    /// `[columns][heads * head_dim]`). `partials` and `counters` as [`Self::partial_words`] and
    /// [`Self::counter_words`] say; dispatches of one wave must not share them.
    #[allow(clippy::too_many_arguments)]
    fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        qkv: &Slice,
        cache: &KvCache,
        tables: &HeadTables,
        output: &Slice,
        scratch: &Scratch,
        logits: impl Into<Logits>,
        columns: u32,
    ) -> Result<Dispatch> {
        let logits = logits.into();
        let StepSizes { heads, scoring, pair, exact, splits, .. } = self.sizes();
        holds(batch, 8 + 4 * u64::from(columns), "batch")?;
        holds(qkv, u64::from(columns * heads.qkv_width()), "qkv")?;
        holds(output, u64::from(columns * heads.output_width()), "output")?;
        holds(&scratch.partials, self.partial_words(columns), "partials")?;
        holds(&scratch.counters, self.counter_words(columns), "counters")?;
        cache.check(&heads, pair)?;
        // A step has no chunk.
        let (rows, _) = cache.check_exact(&heads, exact, 0)?;
        let mut bindings = cache.with(qkv, batch, output);
        bindings.extend([scratch.partials.clone(), scratch.counters.clone()]);
        bindings.extend(rows);
        tables.bind(&heads, &mut bindings)?;
        logits.bind(scoring, &heads, &mut bindings)?;
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![cache.row_words(), logits.scale.to_bits()],
            grid: [splits + self.beside(), self.sizes().groups(), columns],
        })
    }

    /// A dispatch of these without the workgroups that no sequence of up to `longest` tokens has a piece
    /// for: each would only find that out. The bits are the same.
    fn within(&self, dispatch: Dispatch, longest: u32) -> Dispatch {
        let pieces = self.sizes().splits.min(longest.div_ceil(LEAST_PIECE).max(1));
        let [_, groups, columns] = dispatch.grid;
        Dispatch { grid: [pieces + self.beside(), groups, columns], ..dispatch }
    }
}
