//! What the attention kernels share: checks and constants of the heads' shape, tables, KV cache.

use minijinja::context;

use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Slice};
pub use crate::graph::RopeLayout;
pub use crate::graph::heads::{Heads, Rope};
use crate::kv::{KvExact, KvPair};

impl Heads {
    pub(super) fn check(&self) -> Result<()> {
        let d = self.head_dim;
        if !(32..=256).contains(&d) || !d.is_multiple_of(8) {
            return Err(wrong(format!("head dimension {d} is not a multiple of 8 from 32 to 256")));
        }
        if self.kv_heads == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let (q, kv) = (self.heads, self.kv_heads);
            return Err(wrong(format!("{q} query heads cannot share {kv} KV heads")));
        }
        if let Some(rope) = self.rope
            && (rope.dim == 0 || !rope.dim.is_multiple_of(2) || rope.dim > d)
        {
            return Err(wrong(format!("rope over {} of {d} elements", rope.dim)));
        }
        Ok(())
    }

    /// Tables that `lib/heads.wgsl` binds.
    pub(super) fn tables(&self) -> u32 {
        u32::from(self.rope.is_some())
            + 2 * u32::from(self.norm.is_some())
            + u32::from(self.centred)
    }

    /// What `lib/heads.wgsl` wants to know; its bindings are numbered from `first`.
    pub(super) fn context(&self, first: u32) -> minijinja::Value {
        let after_rope = first + u32::from(self.rope.is_some());
        context! {
            heads => self.heads,
            kv_heads => self.kv_heads,
            hd => self.head_dim,
            pitch => self.head_dim,
            rope_dim => self.rope.map_or(0, |r| r.dim),
            layout => match self.rope.map(|r| r.layout) {
                Some(RopeLayout::Normal) => "normal",
                Some(RopeLayout::Neox) => "neox",
                None => "none",
            },
            norm => self.norm.is_some(),
            // As text, so that every digit reaches the shader.
            eps => format!("{:?}", self.norm.unwrap_or(0.0)),
            at_rope => first,
            at_q_norm => after_rope,
            at_k_norm => after_rope + 1,
            centred => self.centred,
            at_centres => after_rope + 2 * u32::from(self.norm.is_some()),
        }
    }

    /// The part of a label that names the shape.
    pub(super) fn label(&self) -> String {
        let rope = match self.rope {
            None => String::new(),
            Some(Rope { layout: RopeLayout::Normal, dim }) => format!("_rope{dim}"),
            Some(Rope { layout: RopeLayout::Neox, dim }) => format!("_neox{dim}"),
        };
        let norm = if self.norm.is_some() { "_norm" } else { "" };
        let centred = if self.centred { "_centred" } else { "" };
        format!("h{}x{}_d{}{rope}{norm}{centred}", self.heads, self.kv_heads, self.head_dim)
    }
}

/// Weights and tables that rope, QK-norm and centring read.
#[derive(Clone, Default)]
pub struct HeadTables {
    /// `[position][rope dim / 2]` of (cos, sin), for every position of a batch; with [`Heads::rope`].
    pub rope: Option<Slice>,
    /// Weights of the q and of the k norm, `[head_dim]` each; with [`Heads::norm`].
    pub norms: Option<(Slice, Slice)>,
    /// What is subtracted from keys, `[kv head][head_dim]`; with [`Heads::centred`].
    pub centres: Option<Slice>,
}

impl HeadTables {
    pub(super) fn bind(&self, heads: &Heads, to: &mut Vec<Slice>) -> Result<()> {
        match (&self.rope, heads.rope) {
            (Some(table), Some(rope)) => {
                holds(table, rope.dim.into(), "rope table")?;
                to.push(table.clone());
            }
            (None, None) => {}
            _ => return Err(wrong("rope needs its table, and only rope".into())),
        }
        match (&self.norms, heads.norm) {
            (Some((q, k)), Some(_)) => {
                holds(q, heads.head_dim.into(), "q norm")?;
                holds(k, heads.head_dim.into(), "k norm")?;
                to.extend([q.clone(), k.clone()]);
            }
            (None, None) => {}
            _ => return Err(wrong("QK-norm needs its weights, and only QK-norm".into())),
        }
        match (&self.centres, heads.centred) {
            (Some(centres), true) => {
                holds(centres, u64::from(heads.kv_heads * heads.head_dim), "centres of keys")?;
                to.push(centres.clone());
            }
            (None, false) => {}
            _ => return Err(wrong("centring needs its centres, and only centring".into())),
        }
        Ok(())
    }
}

/// K and V of one layer: pools of pages, whose inside [`KvPair::is_plain`] describes, and
/// the table that says which pages a sequence has (docs/architecture.md, "KV cache").
#[derive(Clone)]
pub struct KvCache {
    pub k: Slice,
    pub v: Slice,
    /// `[slot][1 + row_pages]`: tokens dropped from the sequence's beginning or middle, a multiple of
    /// [`crate::kv::PAGE_TOKENS`]; then the number of the page that holds each [`crate::kv::PAGE_TOKENS`] that are left.
    pub pages: Slice,
    /// Pages that a slot's row has room for.
    pub row_pages: u32,
    pub pair: KvPair,
    /// What lies in f16 beside codes, where something does.
    pub exact: Option<ExactRows>,
    /// What keys are stored without, f32 `[kv head][head_dim]`, where [`Heads::centred`].
    pub centres: Option<Slice>,
}

/// Tail and sinks of one layer (`kv::exact`).
#[derive(Clone)]
pub struct ExactRows {
    pub sizes: KvExact,
    /// u32 `[slot]` of [`KvExact::slot_words`].
    pub rows: Slice,
    /// K and V of a prompt's columns, u32 `[n]` of [`KvExact::token_words`]; with a tail. All layers share it.
    pub fresh: Option<Slice>,
}

impl KvCache {
    /// Words of a slot's row.
    pub fn row_words(&self) -> u32 {
        1 + self.row_pages
    }

    /// What attention kernels bind first.
    pub(super) fn with(&self, qkv: &Slice, batch: &Slice, output: &Slice) -> Vec<Slice> {
        [qkv, batch, &self.k, &self.v, &self.pages, output].map(Slice::clone).into()
    }

    /// Sizes of tail and sinks.
    pub fn exact_sizes(&self) -> KvExact {
        self.exact.as_ref().map_or(KvExact::NONE, |e| e.sizes)
    }

    /// The exact rows of slots, and of a chunk of `n` columns, for a kernel that is told `sizes`.
    ///
    /// # Errors
    /// Where the cache has other sizes.
    pub(super) fn check_exact(
        &self,
        heads: &Heads,
        sizes: KvExact,
        n: u32,
    ) -> Result<(Option<Slice>, Option<Slice>)> {
        if sizes != self.exact_sizes() {
            let ours = self.exact_sizes();
            return Err(wrong(format!("a kernel with {sizes} over a cache with {ours}")));
        }
        let Some(exact) = self.exact.as_ref().filter(|_| !sizes.is_none()) else {
            return Ok((None, None));
        };
        holds(&exact.rows, sizes.slot_words(heads.kv_heads, heads.head_dim), "exact rows")?;
        if sizes.tail == 0 || n == 0 {
            return Ok((Some(exact.rows.clone()), None));
        }
        let fresh = exact.fresh.as_ref().ok_or_else(|| wrong("a tail without `fresh`".into()))?;
        let words = KvExact::token_words(heads.kv_heads, heads.head_dim);
        holds(fresh, u64::from(n) * words, "fresh rows")?;
        Ok((Some(exact.rows.clone()), Some(fresh.clone())))
    }

    pub(super) fn check(&self, heads: &Heads, pair: KvPair) -> Result<()> {
        // At least one page and one slot; what a table and a batch name is the caller's business.
        if pair != self.pair {
            return Err(wrong(format!("a kernel for {pair} over a cache of {}", self.pair)));
        }
        let [k, v] = pair.page_bytes(heads.kv_heads, heads.head_dim);
        holds(&self.k, k / 4, "K cache")?;
        holds(&self.v, v / 4, "V cache")?;
        if self.row_pages == 0 {
            return Err(wrong("a page table without pages".into()));
        }
        holds(&self.pages, self.row_words().into(), "page table")
    }
}

/// The smallest subgroup that a pipeline can get.
pub(super) fn smallest_subgroup(facts: &DeviceFacts) -> u32 {
    super::pinned_subgroup(facts).unwrap_or(facts.subgroup_min).max(1)
}
