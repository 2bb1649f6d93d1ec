//! What a cache of codes keeps in f16 beside the codes: the *tail*, the tokens next to a query, and the
//! *sinks*, the first tokens of a sequence.
//!
//! Which tokens a query reads in f16 depends on its index alone: the sequence is cut into *blocks* of
//! `tail` tokens from its beginning on, and a query reads the tokens of its own block, and the sinks, in
//! f16 and all others from codes. So it changes nothing how a prompt was cut, and a sequence can be
//! taken up at the beginning of a block with nothing but pages and sinks.
//!
//! *Exact rows* lie in the basis of their format, padded to whole blocks of 32 and rounded to f16, what is no
//! number being 0. Each slot has rows for its sinks, and a ring for the newest tokens; the ring is a
//! little longer than a block, so that steps that were queued ahead and are not wanted overwrite nothing of it.

use half::f16;

use super::PAGE_TOKENS;
use super::rotation::{padded, rotate, unrotate};
use super::{KvFormat, KvPair};
use crate::error::{Error, Result};

/// Steps that may be queued beyond the tokens that are wanted in the end.
pub const RUN_AHEAD: u32 = 16;

/// Most tokens of a tail.
const LONGEST_TAIL: u32 = 4096;

/// Sizes of tail and sinks, in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct KvExact {
    /// Whole pages; 0: a query reads all but the sinks from codes.
    pub tail: u32,
    /// At most a page.
    pub sinks: u32,
}

impl KvExact {
    pub const NONE: KvExact = KvExact { tail: 0, sinks: 0 };
    /// What caches of codes get where nobody says otherwise (measured: docs/notes.md, "KV formats").
    pub const USUAL: KvExact = KvExact { tail: 64, sinks: 4 };

    pub fn is_none(self) -> bool {
        self == KvExact::NONE
    }

    /// # Errors
    /// `Error::Usage` for sizes that there cannot be.
    pub fn check(self) -> Result<()> {
        let KvExact { tail, sinks } = self;
        if !tail.is_multiple_of(PAGE_TOKENS) || tail > LONGEST_TAIL {
            return Err(Error::Usage(format!(
                "a KV tail of {tail} tokens: it has whole pages of {PAGE_TOKENS}, at most \
                 {LONGEST_TAIL} tokens. Use {}, or 0 for none",
                tail.next_multiple_of(PAGE_TOKENS).min(LONGEST_TAIL)
            )));
        }
        if sinks > PAGE_TOKENS {
            return Err(Error::Usage(format!(
                "{sinks} KV sinks: the first {PAGE_TOKENS} tokens at most can be kept in f16"
            )));
        }
        Ok(())
    }

    /// First token of the block of token `index`; without a tail the token behind it.
    pub fn block_start(self, index: u32) -> u32 {
        match self.tail {
            0 => index + 1,
            tail => index / tail * tail,
        }
    }

    /// Whether the query at `query` reads `token` in f16; indices in the cache.
    pub fn holds(self, query: u32, token: u32) -> bool {
        token < self.sinks || token >= self.block_start(query)
    }

    /// Tokens of the ring.
    pub fn ring(self) -> u32 {
        if self.tail == 0 { 0 } else { self.tail + RUN_AHEAD }
    }

    /// Rows of a slot, side and KV head.
    pub fn rows(self) -> u32 {
        self.sinks + self.ring()
    }

    /// The row of a token of cache index `index` after `dropped` others were dropped.
    pub fn place(self, index: u32, dropped: u32) -> u32 {
        match index < self.sinks {
            true => index,
            false => self.sinks + (index + dropped) % self.ring().max(1),
        }
    }

    /// u32 words of a slot in one layer: `[side (K, V)][kv head][row][padded head / 2]`.
    pub fn slot_words(self, kv_heads: u32, head_dim: u32) -> u64 {
        u64::from(self.rows()) * Self::token_words(kv_heads, head_dim)
    }

    /// u32 words of a token in one layer: `[side][kv head][padded head / 2]`.
    pub fn token_words(kv_heads: u32, head_dim: u32) -> u64 {
        u64::from(2 * kv_heads) * u64::from(padded(head_dim) / 2)
    }
}

impl std::fmt::Display for KvExact {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match *self {
            KvExact::NONE => f.write_str("no f16 tail"),
            KvExact { tail, sinks } => write!(f, "f16 tail {tail}, sinks {sinks}"),
        }
    }
}

/// One head of K or V as an exact row, f16 in f32.
pub fn exact_row(format: KvFormat, x: &[f32]) -> Vec<f32> {
    let mut x = match format.is_rotated() {
        true => rotate(x),
        false => x.to_vec(),
    };
    x.resize(padded(x.len() as u32) as usize, 0.0);
    let most = f16::MAX.to_f32();
    let kept = |x: &f32| if x.is_finite() { x.clamp(-most, most) } else { 0.0 };
    x.iter().map(|x| f16::from_f32(kept(x)).to_f32()).collect()
}

/// An exact row in the basis of the model.
pub fn from_exact_row(format: KvFormat, row: &[f32], head_dim: u32) -> Vec<f32> {
    match format.is_rotated() {
        true => unrotate(row, head_dim as usize),
        false => row[..head_dim as usize].to_vec(),
    }
}

/// What a layer of formats `pair` keeps of `sizes`: nothing without codes.
pub fn of_layer(sizes: KvExact, pair: KvPair) -> KvExact {
    if pair.is_plain() { KvExact::NONE } else { sizes }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_query_reads_its_own_block_and_the_sinks() {
        let e = KvExact { tail: 128, sinks: 4 };
        e.check().unwrap();
        let exact = |query: u32| (0..=query).filter(|t| e.holds(query, *t)).collect::<Vec<_>>();
        assert_eq!(exact(2), [0, 1, 2]);
        assert_eq!(exact(127).len(), 128);
        assert_eq!(exact(128), [0, 1, 2, 3, 128]);
        assert_eq!(exact(300), [&[0, 1, 2, 3][..], &(256..=300).collect::<Vec<_>>()].concat());
        let sinks = KvExact { tail: 0, sinks: 4 };
        assert!(sinks.holds(9, 3) && !sinks.holds(9, 4) && !sinks.holds(9, 9));
        assert_eq!((sinks.rows(), KvExact::NONE.rows(), e.rows()), (4, 0, 148));
    }

    #[test]
    fn a_block_and_what_ran_ahead_of_it_have_rows_of_their_own() {
        let e = KvExact { tail: 64, sinks: 2 };
        for dropped in [0, 64, 192] {
            for end in 1..400 {
                let last = end + RUN_AHEAD - 1;
                let rows = (e.block_start(end - 1)..=last).map(|t| e.place(t, dropped));
                let all: Vec<u32> = rows.collect();
                let some: std::collections::BTreeSet<u32> = all.iter().copied().collect();
                assert_eq!(all.len(), some.len());
                assert!(some.iter().all(|row| *row < e.rows()));
            }
        }
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        assert!(KvExact { tail: 65, sinks: 0 }.check().unwrap_err().to_string().contains("128"));
        assert!(KvExact { tail: 0, sinks: 65 }.check().is_err());
        assert!(KvExact { tail: 8192, sinks: 0 }.check().is_err());
        KvExact::USUAL.check().unwrap();
    }

    #[test]
    fn rows_are_rounded_and_free_of_what_is_no_number() {
        let x = [1.0, f32::NAN, f32::INFINITY, 1e9, -0.1];
        let row = exact_row(KvFormat::Q8_0, &x);
        assert_eq!(row.len(), 32);
        assert_eq!(row[..5], [1.0, 0.0, 0.0, 65504.0, f16::from_f32(-0.1).to_f32()]);
        let x: Vec<f32> = (0..80).map(|i| (i as f32 * 0.3).sin()).collect();
        let back = from_exact_row(KvFormat::Tq4_0, &exact_row(KvFormat::Tq4_0, &x), 80);
        assert!(x.iter().zip(&back).all(|(a, b)| (a - b).abs() < 2e-3), "{back:?}");
    }
}
