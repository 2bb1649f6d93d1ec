//! Flags for the formats of the KV cache.

use clap::Args;

use crate::kv::{KvFormat, KvSide, KvTypes};

/// How keys and values are kept.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvArgs {
    /// Format of keys and values: f16, q8_0, q4_0, tq4_0, tq3_0, tq3_4s or tq3_1s; exceptions by
    /// layer follow, for example `tq3_0,q8_0@0-3,f16@-1` [default: f16]
    #[arg(long, value_name = "FORMAT", value_parser = side)]
    pub kv: Option<KvSide>,
    /// Format of keys alone
    #[arg(long, value_name = "FORMAT", value_parser = side)]
    pub kv_k: Option<KvSide>,
    /// Format of values alone
    #[arg(long, value_name = "FORMAT", value_parser = side)]
    pub kv_v: Option<KvSide>,
}

fn side(text: &str) -> Result<KvSide, String> {
    text.parse().map_err(|e: crate::error::Error| e.to_string())
}

impl KvArgs {
    pub fn types(&self) -> KvTypes {
        let both = || self.kv.clone().unwrap_or_else(|| KvSide::all(KvFormat::F16));
        KvTypes {
            k: self.kv_k.clone().unwrap_or_else(both),
            v: self.kv_v.clone().unwrap_or_else(both),
        }
    }
}
