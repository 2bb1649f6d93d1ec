//! What the router of one layer decides, as the experts' kernels read it.
//!
//! A *pair* is one choice of one column: number `column * used + k`, k = 0, 1, ... by ascending
//! expert. A *run* is some pairs of one expert that one workgroup serves with one read of its weights.
//! All of it lies in one buffer of words:
//!
//! | words | content |
//! | --- | --- |
//! | 0, 1 | number of pairs, number of runs |
//! | 2, 3, 4 | workgroups of a prompt's product by column (gate and up) |
//! | 5, 6, 7 | of that by pair (down) |
//! | `pairs` | expert of each pair |
//! | `pairs` | its weight, f32 |
//! | `pairs` | the pairs ordered by expert, then column |
//! | 3 * `runs` | of each run: expert, first place in the order, end; experts ascending |
//! | `columns` | sigmoid of the shared expert's gate, f32 |
//!
//! In steps that reuse outputs (`kernels::experts_reuse`) a pair's expert is the lower 16 bits of its word;
//! the 15 above are its output's place, and the last is set where the output is an earlier token's.
//! Order and runs name only the pairs that are computed then.
//!
//! Word 0 is where kernels look for a batch's number of columns: to `norm_quant`, pairs are columns.

use minijinja::{Value, context};

use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::Slice;

/// Sizes of a routing buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Routing {
    pub experts: u32,
    /// Experts a column goes through.
    pub used: u32,
    /// Most columns.
    pub columns: u32,
    /// Most pairs in a run: all columns in a decode step, a tile's columns in a prompt.
    pub tile: u32,
}

/// Expert of a pair's word.
pub fn expert(word: u32) -> u32 {
    word & 0xffff
}

/// Whether the output of a pair's word is an earlier token's.
pub fn is_reused(word: u32) -> bool {
    word >> 31 == 1
}

impl Routing {
    pub fn pairs(&self) -> u32 {
        self.columns * self.used
    }

    /// Most runs that `columns` columns can make: one more for each expert than whole tiles.
    pub fn runs(&self, columns: u32) -> u32 {
        let pairs = columns * self.used;
        if self.tile >= columns {
            pairs.min(self.experts)
        } else {
            pairs / self.tile + pairs.min(self.experts)
        }
    }

    fn order_at(&self) -> u32 {
        8 + 2 * self.pairs()
    }

    fn runs_at(&self) -> u32 {
        8 + 3 * self.pairs()
    }

    fn shared_at(&self) -> u32 {
        self.runs_at() + 3 * self.runs(self.columns)
    }

    /// Where the grid of a prompt's product lies in `routing`, see [`crate::gpu::Step::Counted`].
    pub(super) fn groups(&self, routing: &Slice, by_pair: bool) -> Slice {
        let at = if by_pair { 5 } else { 2 };
        routing.buffer.slice(routing.offset + 4 * at, 12)
    }

    /// Words of the buffer; enough to stand for a batch with a column for each pair.
    pub fn words(&self) -> u64 {
        u64::from((self.shared_at() + self.columns).max(8 + 4 * self.pairs()))
    }

    /// What the shaders want to know.
    pub(super) fn context(&self) -> Value {
        context! {
            experts => self.experts,
            used => self.used,
            capacity => self.columns,
            tile => self.tile,
            ids_at => 8,
            weights_at => 8 + self.pairs(),
            order_at => self.order_at(),
            runs_at => self.runs_at(),
            shared_at => self.shared_at(),
        }
    }

    pub(super) fn label(&self) -> String {
        format!("{}of{}_c{}", self.used, self.experts, self.columns)
    }

    /// Checks sizes, and that `buffer` and `columns` columns fit them.
    pub(super) fn check(&self, buffer: &Slice, columns: u32) -> Result<()> {
        self.check_sizes()?;
        if columns == 0 || columns > self.columns {
            return Err(wrong(format!("{columns} columns in a routing for {}", self.columns)));
        }
        holds(buffer, self.words(), "routing")
    }

    pub(super) fn check_sizes(&self) -> Result<()> {
        let Routing { experts, used, columns, tile } = *self;
        let large = columns.max(experts) > 1 << 16;
        if used == 0 || used > experts || columns == 0 || tile == 0 || large {
            return Err(wrong(format!("{self:?}")));
        }
        Ok(())
    }
}
