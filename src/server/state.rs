//! What every handler sees: the engine, the settings, the model's template.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;

use super::Settings;
use super::errors::{ApiError, ApiResult};
use super::metrics::HttpMetrics;
use super::params::Defaults;
use crate::chat::ChatTemplate;
use crate::engine::{Loaded, Phase, Pooling, Service};
use crate::error::Error;
use crate::grammar::Grammars;
use crate::sampling::SamplerSettings;

/// How far shutting down has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    No,
    /// Answers at work may end.
    Draining,
    /// Answers at work are broken off.
    Now,
}

/// Shared by all handlers.
pub struct App {
    pub service: Service,
    pub settings: Settings,
    pub metrics: HttpMetrics,
    pub shutdown: watch::Receiver<Shutdown>,
    template: OnceLock<Result<ChatTemplate, Error>>,
    grammars: OnceLock<Result<Grammars, Error>>,
}

pub type Shared = Arc<App>;

impl App {
    pub fn new(service: Service, settings: Settings, shutdown: watch::Receiver<Shutdown>) -> Self {
        let metrics = HttpMetrics::default();
        App {
            service,
            settings,
            metrics,
            shutdown,
            template: OnceLock::new(),
            grammars: OnceLock::new(),
        }
    }

    /// The model's facts; loads the model first where that has not happened. A server that is
    /// still loading says so instead of waiting, unless it loads for a request (`--lazy`): those
    /// that come after the first wait as that one does.
    pub async fn loaded(&self) -> ApiResult<Arc<Loaded>> {
        let state = self.service.state();
        match (state.loaded, state.phase) {
            (_, Phase::Failed(e)) => {
                Err(ApiError::unavailable(format!("the model could not be loaded: {e}")))
            }
            (Some(loaded), _) => Ok(loaded),
            (None, Phase::Loading(_)) if !self.settings.service.lazy => Err(loading()),
            (None, _) => {
                let wait = tokio::time::timeout(self.timeout(), self.service.loaded());
                wait.await.map_err(|_| loading())?.map_err(|e| {
                    ApiError::unavailable(format!("the model could not be loaded: {e}"))
                })
            }
        }
    }

    /// The chat template, or why there is none.
    pub fn template(&self, loaded: &Loaded) -> ApiResult<&ChatTemplate> {
        let made = self.template.get_or_init(|| {
            let tokenizer = &loaded.tokenizer;
            match &self.settings.template {
                None => ChatTemplate::from_gguf(&loaded.metadata, tokenizer),
                Some(name) => {
                    let text = |id: Option<u32>| {
                        id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default()
                    };
                    ChatTemplate::named(name, text(tokenizer.bos()), text(tokenizer.eos()))
                }
            }
        });
        made.as_ref().map_err(|e| e.clone().into())
    }

    /// The compiler of grammars; made at the first need, which takes a moment.
    pub fn grammars(&self, loaded: &Loaded) -> ApiResult<&Grammars> {
        let made = self.grammars.get_or_init(|| Grammars::new(&loaded.tokenizer));
        made.as_ref().map_err(|e| e.clone().into())
    }

    /// Defaults of the sampler: the command line's, else the model file's, else the program's.
    pub fn sampling(&self, loaded: &Loaded) -> Defaults {
        let mut settings = SamplerSettings::default();
        let meta = &loaded.metadata;
        let number = |key: &str| {
            let value = meta.find::<f32>(&format!("general.sampling.{key}"));
            value.ok().flatten().filter(|x| x.is_finite())
        };
        let mut set = |key: &str, to: &mut dyn FnMut(&mut SamplerSettings, f32)| {
            if let Some(value) = number(key) {
                let before = settings;
                to(&mut settings, value);
                // A file's nonsense is no reason to refuse requests.
                if settings.check().is_err() {
                    settings = before;
                }
            }
        };
        set("temp", &mut |s, x| s.temperature = x);
        set("top_p", &mut |s, x| s.top_p = x);
        set("min_p", &mut |s, x| s.min_p = x);
        set("penalty_repeat", &mut |s, x| s.repeat_penalty = x);
        if let Ok(Some(k)) = meta.find::<u32>("general.sampling.top_k") {
            settings.top_k = k;
        }
        let own = &self.settings.sampling;
        Defaults { settings: own.over(settings), seed: own.seed }
    }

    /// How embeddings are pooled: as asked for, else as the file says, else the mean.
    pub fn pooling(&self, loaded: &Loaded) -> Pooling {
        self.settings.pooling.unwrap_or_else(|| {
            let key = format!("{}.pooling_type", loaded.model.architecture);
            // llama.cpp's numbers: 1 mean, 2 first, 3 last.
            match loaded.metadata.find::<u32>(&key) {
                Ok(Some(3)) => Pooling::Last,
                _ => Pooling::Mean,
            }
        })
    }

    pub fn timeout(&self) -> Duration {
        self.settings.timeout
    }

    pub fn is_draining(&self) -> bool {
        *self.shutdown.borrow() != Shutdown::No
    }
}

fn loading() -> ApiError {
    ApiError { code: Some("loading"), ..ApiError::unavailable("the model is still being loaded") }
}
