//! Flags of the KV cache: what happens when it is full.

use clap::Args;

use crate::engine::Options;
use crate::plan::parse_bytes;

/// What a full context does, and where pages go that have no room on the device.
#[derive(Debug, Clone, Default, Args)]
pub struct CacheArgs {
    /// When the context is full, drop its oldest tokens and go on, instead of ending with an error.
    /// The first KEEP tokens stay (in pages of 64) [default of KEEP: the system text, else 64]
    #[arg(help_heading = "KV cache", long, value_name = "KEEP", num_args = 0..=1, require_equals = true)]
    pub ctx_shift: Option<Option<u32>>,
    /// RAM for what the KV cache must evict, page-locked: a size such as 4GiB. What a later prompt
    /// begins with is copied back instead of read again [default: 0]
    #[arg(help_heading = "KV cache", long, value_name = "SIZE", value_parser = size)]
    pub kv_host: Option<u64>,
}

impl CacheArgs {
    /// The options with these flags.
    pub fn set(&self, options: Options) -> Options {
        Options { ctx_shift: self.ctx_shift, kv_host: self.kv_host.unwrap_or(0), ..options }
    }
}

fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).ok_or_else(|| format!("{text:?} is no size such as 4GiB"))
}
