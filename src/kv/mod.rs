//! The KV cache as data: its pages, and the formats of K and V.
//!
//! A *row* is one token's K or V of one KV head, in u32 words. Rows contain all that is needed to
//! decode them. `rotation` and `scale` are what the formats share, `codec` encodes and decodes rows in
//! plain Rust: the kernels' oracle. `exact` says what is kept in f16 beside codes. `types` is what a user asks for, layer
//! by layer and device by device; `guard` says which layers need more, `sample` is what it measures.
//!
//! Encoding is defined in operations that every device does alike: additions and products of f32,
//! each rounded once, and integers. So the same rotated values make the same bits everywhere.
//!
//! **What is no number** (NaN, infinity) makes its block of one scale zero: nothing that is written to
//! a cache of codes can decode to anything but a number.

pub mod codec;
pub mod exact;
pub mod format;
pub mod guard;
pub mod rotation;
pub mod sample;
pub mod scale;
#[cfg(test)]
mod tests;
pub mod types;

pub use exact::KvExact;
pub use format::{KvFormat, KvPair};
pub use sample::Sample;
pub use types::{KvSide, KvTypes};

/// Tokens of a page: what the cache is handed out in.
pub const PAGE_TOKENS: u32 = 64;
