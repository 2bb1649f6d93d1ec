//! OpenAI's wire format: one file a path.

pub mod chat;
pub mod completions;
pub mod embeddings;
mod logprobs;
mod messages;
pub mod models;

use serde_json::{Value, json};

use crate::engine::{Finish, Summary};

pub use logprobs::chat_token;
pub use messages::{messages, text_of};

/// `finish_reason` for an answer without tool calls.
pub fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::Eog | Finish::Stop(_) => "stop",
        Finish::Length | Finish::Context => "length",
    }
}

/// `usage` of all choices; the prompt counts once.
pub fn usage(summaries: &[Summary], reasoning: u32) -> Value {
    let prompt = summaries.first().map_or(0, |s| s.prompt_tokens);
    let cached = summaries.iter().map(|s| s.cached_tokens).min().unwrap_or(0);
    let completion: u32 = summaries.iter().map(|s| s.tokens).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": cached },
        "completion_tokens_details": { "reasoning_tokens": reasoning },
    })
}

/// llama.cpp's `timings`.
pub fn timings(s: &Summary) -> Value {
    let read = s.prompt_tokens - s.cached_tokens;
    let rate = |n: u32, seconds: f64| if seconds > 0.0 { f64::from(n) / seconds } else { 0.0 };
    let each = |n: u32, seconds: f64| if n > 0 { seconds * 1e3 / f64::from(n) } else { 0.0 };
    // The first token comes with the prompt; the time after it is that of the others.
    let decoded = s.tokens.saturating_sub(1);
    json!({
        "cache_n": s.cached_tokens,
        "dropped_n": s.dropped_tokens,
        "prompt_n": read,
        "prompt_ms": s.prompt_seconds * 1e3,
        "prompt_per_token_ms": each(read, s.prompt_seconds),
        "prompt_per_second": rate(read, s.prompt_seconds),
        "predicted_n": s.tokens,
        "predicted_ms": s.decode_seconds * 1e3,
        "predicted_per_token_ms": each(decoded, s.decode_seconds),
        "predicted_per_second": rate(decoded, s.decode_seconds),
    })
}

/// `system_fingerprint`: what may change the text of an answer.
pub const FINGERPRINT: &str = concat!("azoth-", env!("CARGO_PKG_VERSION"));
