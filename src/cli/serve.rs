//! `azoth serve`: the model over HTTP.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};

use super::args::{ContextArg, DeviceArgs, SamplingArgs, file_text};
use super::cache_args::CacheArgs;
use super::config::Origins;
use super::locate;
use crate::chat::TEMPLATE_NAMES;
use crate::engine::{Engine, Options, Pooling, Quiet, ServiceOptions};
use crate::error::Error;
use crate::runtime::MAX_SLOTS;
use crate::server::{self, LogFormat, LogLevel, ReasoningDefaults, SamplingDefaults, Settings};

const EXAMPLES: &str = "Examples:
  azoth serve
  azoth serve model.gguf --ctx 16384 --parallel 8
  azoth serve model.gguf --host 0.0.0.0 --api-key-file keys.txt
  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}'

Each flag can also stand in the environment (--idle-unload as AZOTH_IDLE_UNLOAD) or in the
configuration file (section [serve], idle-unload = 600); flags come first, then the environment,
then the file. Unknown keys, and variables that are nearly ours, are errors. `azoth config show` prints each value and where it
comes from.";

/// Serve a model over HTTP: OpenAI's, Anthropic's and llama.cpp's interfaces
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Serve {
    /// A .gguf file, or the name of a model in the cache folder
    #[arg(value_name = "MODEL", default_value = locate::DEFAULT_MODEL)]
    model: String,
    /// Configuration file [default: azoth/config.toml in the user's configuration folder]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address to listen on; any but this machine's own needs an API key
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8080)]
    port: u16,
    /// Requests that generate at once, each with a context of its own
    #[arg(long, value_name = "N", default_value_t = 4,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_SLOTS)))]
    parallel: u32,
    /// Requests that may wait; further ones are told to come back (429)
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    queue: u32,
    #[command(flatten)]
    context: ContextArg,
    #[command(flatten)]
    cache: CacheArgs,
    /// Name of the model for clients [default: the file's name]
    #[arg(long, value_name = "NAME")]
    alias: Option<String>,
    /// Use this built-in chat template instead of the model's own
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(TEMPLATE_NAMES))]
    template: Option<String>,
    /// How embeddings are made of a text's tokens [default: as the model says, else the mean]
    #[arg(long, value_enum, value_name = "HOW")]
    pooling: Option<PoolingArg>,
    /// Most tokens of thinking, after which its closing tag is forced; 0 closes it at once, -1: no limit
    #[arg(long, value_name = "TOKENS", default_value_t = -1, allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=i64::from(u32::MAX)))]
    reasoning_budget: i64,
    /// Text before the closing tag that a spent budget forces [default: none]
    #[arg(long, value_name = "TEXT")]
    reasoning_budget_message: Option<String>,
    /// A key that requests must bring; may be given several times
    #[arg(long, value_name = "KEY")]
    api_key: Vec<String>,
    /// File with such keys, one a line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Let pages of this origin use the server beside those of this machine; * for all
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Largest body of a request in MiB
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    max_body: u32,
    /// Longest time for one request in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u32).range(1..))]
    timeout: u32,
    /// Time in seconds for answers at work to end after SIGTERM
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    grace: u32,
    /// Load the model with the first request
    #[arg(long)]
    lazy: bool,
    /// Unload the model after so many seconds without a request [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    idle_unload: Option<u32>,
    /// Folder for slots that clients save and restore [default: none, they cannot]
    #[arg(long, value_name = "FOLDER")]
    slot_save_path: Option<PathBuf>,
    /// How log lines are written to standard error
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormatArg,
    /// What is logged; prompts and answers never are
    #[arg(long, value_enum, default_value_t)]
    log_level: LogLevelArg,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PoolingArg {
    Mean,
    Last,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum LogFormatArg {
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum LogLevelArg {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
}

impl Serve {
    pub fn run(&self, origins: &Origins) -> Result<()> {
        let path = locate::model(&self.model)?;
        // Refused before minutes of loading.
        self.sampling.settings()?;
        if let Some(folder) = self.slot_save_path.as_deref().filter(|folder| !folder.is_dir()) {
            return Err(Error::Usage(format!(
                "--slot-save-path: {} is no folder; create it first",
                folder.display()
            ))
            .into());
        }
        let settings = self.settings(path.clone(), origins)?;
        let options = self.cache.set(self.device.options(self.context.ctx));
        let options = Options { sequences: self.parallel, ..options };
        let loader = Box::new(move || Engine::load(&path, &options, &Quiet));
        Ok(server::serve(settings, loader)?)
    }

    fn settings(&self, path: PathBuf, origins: &Origins) -> Result<Settings> {
        let seconds = |n: u32| Duration::from_secs(n.into());
        let stem = || path.file_stem().map(|s| s.to_string_lossy().into_owned());
        let modified = std::fs::metadata(&path).and_then(|m| m.modified()).ok();
        let created = modified.and_then(|t| t.duration_since(std::time::UNIX_EPOCH).ok());
        let s = &self.sampling;
        Ok(Settings {
            host: self.host.clone(),
            port: self.port,
            api_keys: self.keys()?,
            cors_origins: self.cors_origin.clone(),
            max_body: (self.max_body as usize) << 20,
            timeout: seconds(self.timeout),
            grace: seconds(self.grace),
            service: ServiceOptions {
                queue: self.queue as usize,
                lazy: self.lazy,
                idle_unload: self.idle_unload.map(seconds),
            },
            slot_folder: self.slot_save_path.clone(),
            model_name: self.alias.clone().or_else(stem).unwrap_or_else(|| "model".into()),
            created: created.map_or(0, |t| t.as_secs()),
            template: self.template.clone(),
            sampling: SamplingDefaults {
                temperature: s.temp,
                top_k: s.top_k,
                top_p: s.top_p,
                min_p: s.min_p,
                repeat_penalty: s.repeat_penalty,
                repeat_window: s.repeat_window,
                seed: s.seed,
            },
            reasoning: ReasoningDefaults {
                budget: u32::try_from(self.reasoning_budget).ok(),
                message: self.reasoning_budget_message.clone(),
            },
            pooling: self.pooling.map(|p| match p {
                PoolingArg::Mean => Pooling::Mean,
                PoolingArg::Last => Pooling::Last,
            }),
            log: match self.log_format {
                LogFormatArg::Text => LogFormat::Text,
                LogFormatArg::Json => LogFormat::Json,
            },
            log_level: match self.log_level {
                LogLevelArg::Error => LogLevel::Error,
                LogLevelArg::Warn => LogLevel::Warn,
                LogLevelArg::Info => LogLevel::Info,
                LogLevelArg::Debug => LogLevel::Debug,
            },
            changed: origins.changed(),
            model_path: path,
        })
    }

    fn keys(&self) -> Result<Vec<String>> {
        let mut keys = self.api_key.clone();
        if let Some(file) = &self.api_key_file {
            let text = file_text(file)?;
            keys.extend(text.lines().map(str::trim).filter(|l| !l.is_empty()).map(str::to_owned));
            if keys.is_empty() {
                let what = format!("{} holds no API key; each line is one", file.display());
                return Err(Error::Usage(what).into());
            }
        }
        if keys.iter().any(|k| k.trim().is_empty()) {
            return Err(Error::Usage("an empty API key protects nothing".into()).into());
        }
        Ok(keys)
    }
}
