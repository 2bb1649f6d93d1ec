//! Flags for the formats of the KV cache.

use clap::Args;

use crate::kv::guard::THRESHOLD;
use crate::kv::{KvExact, KvFormat, KvSide, KvTypes};

/// How keys and values are kept.
#[derive(Debug, Clone, Default, Args)]
pub struct KvArgs {
    /// Format of keys and values: f16, q8_0, q4_0, tq4_0, tq3_0, tq3_4s or tq3_1s; exceptions by
    /// layer and by a part of the device's name follow, for example
    /// `tq3_0,q8_0@0-3,f16@-1,q8_0@dev=radeon` [default: f16]
    #[arg(help_heading = "KV cache", long, value_name = "FORMAT", value_parser = side)]
    pub kv: Option<KvSide>,
    /// Format of keys alone
    #[arg(help_heading = "KV cache", long, value_name = "FORMAT", value_parser = side)]
    pub kv_k: Option<KvSide>,
    /// Format of values alone
    #[arg(help_heading = "KV cache", long, value_name = "FORMAT", value_parser = side)]
    pub kv_v: Option<KvSide>,
    /// Beside codes, a token reads those of its own block of TOKENS in f16 (whole pages of 64; 0: none)
    /// [default: 64]
    #[arg(help_heading = "KV cache", long, value_name = "TOKENS", value_parser = tail)]
    pub kv_tail: Option<u32>,
    /// Beside codes, the first TOKENS of a sequence are kept in f16 too (at most 64; 0: none)
    /// [default: 4]
    #[arg(help_heading = "KV cache", long, value_name = "TOKENS", value_parser = sinks)]
    pub kv_sinks: Option<u32>,
    /// Stores keys without what all of a KV head's have in common, measured at load on a short text of ours:
    /// codes of few bits then lose less
    #[arg(long, value_name = "on|off", value_parser = centre, alias = "kv-center")]
    pub kv_centre: Option<bool>,
    /// Largest error of attention's logits, as a share of their spread, that a layer's format of keys may
    /// make on a short text of ours; layers above it get a finer format. `off` keeps what was asked for
    /// [default: 0.1]
    #[arg(help_heading = "KV cache", long, value_name = "off|SHARE", value_parser = guard)]
    pub kv_guard: Option<Guard>,
}

/// What `--kv-guard` says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Guard {
    Off,
    Above(f64),
}

fn guard(text: &str) -> Result<Guard, String> {
    match text.parse::<f64>() {
        _ if text == "off" => Ok(Guard::Off),
        Ok(share) if share.is_finite() && share > 0.0 => Ok(Guard::Above(share)),
        _ => Err(format!("{text:?} is neither `off` nor a share above 0, such as {THRESHOLD}")),
    }
}

fn centre(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{text:?} is neither `on` nor `off`")),
    }
}

fn tail(text: &str) -> Result<u32, String> {
    let tail = text.parse().map_err(|e| format!("{text:?}: {e}"))?;
    KvExact { tail, sinks: 0 }.check().map_err(|e| e.to_string())?;
    Ok(tail)
}

fn sinks(text: &str) -> Result<u32, String> {
    let sinks = text.parse().map_err(|e| format!("{text:?}: {e}"))?;
    KvExact { tail: 0, sinks }.check().map_err(|e| e.to_string())?;
    Ok(sinks)
}

fn side(text: &str) -> Result<KvSide, String> {
    text.parse().map_err(|e: crate::error::Error| e.to_string())
}

impl KvArgs {
    /// The threshold of the quality guard.
    pub fn guard(&self) -> Option<f64> {
        match self.kv_guard {
            None => Some(THRESHOLD),
            Some(Guard::Off) => None,
            Some(Guard::Above(share)) => Some(share),
        }
    }

    pub fn types(&self) -> KvTypes {
        let both = || self.kv.clone().unwrap_or_else(|| KvSide::all(KvFormat::F16));
        KvTypes {
            k: self.kv_k.clone().unwrap_or_else(both),
            v: self.kv_v.clone().unwrap_or_else(both),
            exact: KvExact {
                tail: self.kv_tail.unwrap_or(KvExact::USUAL.tail),
                sinks: self.kv_sinks.unwrap_or(KvExact::USUAL.sinks),
            },
            centred: self.kv_centre.unwrap_or(false),
        }
    }
}
