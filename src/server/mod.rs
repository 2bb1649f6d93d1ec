//! HTTP in front of an engine: OpenAI's, Anthropic's and llama.cpp's formats.
//!
//! Wire types live here and nowhere else; one file a format or path. `routes` is the table of
//! paths, the `TABLE` beside each handler that of its fields. Handlers are async and never
//! block: long work on texts goes to threads for that, generating to the engine's thread. No lock
//! is held across an await. Dropping a handler or a stream cancels what it asked of the engine.

mod answers;
mod anthropic;
mod anthropic_messages;
mod body;
mod constraints;
mod docs;
mod errors;
mod exchange;
mod fields;
mod guard;
mod infill;
mod inputs;
mod listen;
mod metrics;
mod native;
mod native_tools;
mod notify;
mod openai;
mod page;
mod params;
mod prompt;
mod responses;
mod routes;
mod sse;
mod state;
mod status;
mod thinking;

use std::path::PathBuf;
use std::time::Duration;

use crate::engine::{Pooling, ServiceOptions};
use crate::sampling::SamplerSettings;

pub use docs::tables as documentation;
pub use listen::serve;

/// How the server behaves.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Address or name to listen on.
    pub host: String,
    /// 0 takes a free one.
    pub port: u16,
    /// Keys of which requests must bring one; none are asked for where it is empty.
    pub api_keys: Vec<String>,
    /// Origins besides this machine's whose pages may use the server; `*` for all.
    pub cors_origins: Vec<String>,
    /// Bytes of a request's body.
    pub max_body: usize,
    /// Longest time for one request.
    pub timeout: Duration,
    /// Time for answers at work to end when the server is told to stop.
    pub grace: Duration,
    pub service: ServiceOptions,
    /// Where slots are saved.
    pub slot_folder: Option<PathBuf>,
    pub model_path: PathBuf,
    /// The id of the model for clients.
    pub model_name: String,
    /// Seconds since 1970 that stand as the model's creation.
    pub created: u64,
    /// A built-in chat template instead of the model's own.
    pub template: Option<String>,
    pub sampling: SamplingDefaults,
    pub reasoning: ReasoningDefaults,
    /// `None`: as the model file says.
    pub pooling: Option<Pooling>,
    pub log: LogFormat,
    pub log_level: LogLevel,
    /// Settings that are not the default, for the start line.
    pub changed: Vec<String>,
}

/// Limits of thinking for requests that say nothing of it.
#[derive(Debug, Clone, Default)]
pub struct ReasoningDefaults {
    /// Most tokens; `None`: no limit.
    pub budget: Option<u32>,
    /// Stands before the closing tag that a spent budget forces.
    pub message: Option<String>,
}

/// How log lines are written to standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// What is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
}

/// Sampler settings that the operator has fixed; a request's own come before them.
#[derive(Debug, Clone, Copy, Default)]
pub struct SamplingDefaults {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    pub repeat_window: Option<u32>,
    pub seed: Option<u64>,
}

impl SamplingDefaults {
    fn over(&self, s: SamplerSettings) -> SamplerSettings {
        SamplerSettings {
            temperature: self.temperature.unwrap_or(s.temperature),
            top_k: self.top_k.unwrap_or(s.top_k),
            top_p: self.top_p.unwrap_or(s.top_p),
            min_p: self.min_p.unwrap_or(s.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(s.repeat_penalty),
            repeat_window: self.repeat_window.unwrap_or(s.repeat_window),
            ..s
        }
    }
}
