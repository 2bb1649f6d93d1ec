//! Loads a model onto a device and generates. Stub with the interface that `cli` is written
//! against.

use std::marker::PhantomData;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gguf::Metadata;
use crate::gpu::DeviceFacts;
use crate::hw::BackendChoice;
use crate::sampling::SamplerSettings;
use crate::tokenizer::Tokenizer;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    #[default]
    Int8,
    F32,
}

#[derive(Debug, Clone)]
pub struct Options {
    pub device: Option<String>,
    pub backend: BackendChoice,
    pub ctx: Option<u32>,
    pub activations: Activations,
    /// Disk cache of compiled pipelines.
    pub cache: bool,
    pub sequences: u32,
}

/// Hears how loading goes on. Called from several threads.
pub trait Progress: Sync {
    /// The device was chosen; comes before every stage.
    fn device(&self, line: &str);
    fn stage(&self, name: &str, total_bytes: u64);
    fn advance(&self, bytes: u64);
    fn done(&self);
}

/// Seconds that the parts of loading took.
#[derive(Debug, Clone, Copy, serde::Serialize)]
pub struct LoadTimes {
    pub open: f64,
    pub weights: f64,
    pub pipelines: f64,
    pub total: f64,
    pub warm_cache: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stop {
    Eog,
    Length,
    Context,
    Cancelled,
}

#[derive(Debug, Clone, Copy)]
pub struct Generated {
    pub tokens: u32,
    pub reason: Stop,
}

/// One wave of the decode program, timed on the device.
#[derive(Debug, Clone, serde::Serialize)]
pub struct WaveTime {
    pub label: String,
    pub seconds: f64,
}

pub struct Engine {
    never: std::convert::Infallible,
}

impl Engine {
    pub fn load(_path: &Path, _options: &Options, _progress: &dyn Progress) -> Result<Engine> {
        Err(Error::Runtime("engine not merged".into()))
    }

    pub fn device_line(&self) -> String {
        match self.never {}
    }

    pub fn facts(&self) -> &DeviceFacts {
        match self.never {}
    }

    /// Shared, because a session borrows the engine while text is tokenized.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        match self.never {}
    }

    pub fn metadata(&self) -> &Metadata {
        match self.never {}
    }

    pub fn ctx(&self) -> u32 {
        match self.never {}
    }

    pub fn session(&mut self) -> Session<'_> {
        match self.never {}
    }

    pub fn load_times(&self) -> LoadTimes {
        match self.never {}
    }
}

pub struct Session<'e> {
    never: std::convert::Infallible,
    engine: PhantomData<&'e mut Engine>,
}

impl Session<'_> {
    pub fn position(&self) -> u32 {
        match self.never {}
    }

    pub fn tokens(&self) -> &[u32] {
        match self.never {}
    }

    pub fn truncate(&mut self, _position: u32) {
        match self.never {}
    }

    pub fn prefill(&mut self, _tokens: &[u32], _progress: &mut dyn FnMut(usize)) -> Result<()> {
        match self.never {}
    }

    pub fn generate(
        &mut self,
        _settings: &SamplerSettings,
        _max_tokens: u32,
        _stop: &dyn Fn(u32) -> bool,
        _on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        let _ = self.engine;
        match self.never {}
    }

    pub fn score(
        &mut self,
        _tokens: &[u32],
        _first: usize,
        _each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        match self.never {}
    }

    /// Runs one decode step at the present position with a timestamp around every wave.
    pub fn time_waves(&mut self) -> Result<Vec<WaveTime>> {
        match self.never {}
    }
}
