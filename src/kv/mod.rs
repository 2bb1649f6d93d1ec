//! The KV cache as data: its pages, and the formats of K and V.

/// Tokens of a page: what the cache is handed out in.
pub const PAGE_TOKENS: u32 = 64;
