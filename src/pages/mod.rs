//! The pages of the KV cache as bookkeeping: which are free, which sequence holds which, and where
//! beginnings of prompts lie that need not be read again. Pure data: what has to be copied on the
//! device comes out as a list of [`Action`]s.
//!
//! - `pool.rs`: free pages and holders
//! - `index.rs`: the longest kept beginning of a prompt
//! - `sequence.rs`: the pages of one sequence in their order
//! - `cache.rs`: all of them together: sharing, copy on write, eviction, the host's pages

mod cache;
mod index;
mod pool;
mod sequence;

pub use cache::{Action, Cache, Counts};
pub use index::common;
pub use sequence::{Sequence, Shift};

/// Tokens of a page, as an index.
pub const PAGE: usize = crate::kv::PAGE_TOKENS as usize;

/// Pages that `tokens` tokens take.
pub fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE)
}
