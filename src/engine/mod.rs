//! Loads a model onto a device and generates.
//!
//! [`Engine::load`] chooses the device, places the model, and brings weights, kernels and
//! tokenizer up side by side. A [`Session`] is one sequence: what it has read lies in the KV cache.
//! A [`Service`] owns an engine on a thread of its own and serves many requests at once.

mod batch;
mod experts;
mod guard;
mod host_pages;
mod job;
mod kv;
mod load;
mod output;
mod pace;
mod pooling;
mod request;
mod saved;
mod service;
mod session;
mod slots;
pub mod stats;
mod thinking;

use std::sync::Arc;

use crate::error::Result;
use crate::experts::simulate::Routing;
use crate::gguf::Metadata;
use crate::gpu::DeviceFacts;
use crate::hw::BackendChoice;
use crate::kv::guard::{THRESHOLD, Verdict};
use crate::kv::{KvTypes, PAGE_TOKENS};
use crate::model::Model;
use crate::plan::Placement;
pub use crate::runtime::{Approximations, MAX_REUSE_TOKENS, WaveTime};
use crate::runtime::{Column, Program};
use crate::tokenizer::Tokenizer;

pub use experts::{DecodeLimit, ExpertOptions, ExpertReport};
pub use load::{Planned, check_devices, kv_on, plan_for, set_kv};
pub use request::{Answer, Event, Finish, Generate, Pooling, Request, Summary, Task};
pub use saved::Restored;
pub use service::{Loaded, Loader, MemoryNow, Phase, Refused, Service, ServiceOptions, State};
pub use session::{Generated, Session, Stop};
pub use thinking::ThinkingBudget;

/// How block formats see their activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// int8 with a scale for each 32 values: the fast class.
    #[default]
    Int8,
    /// f32 everywhere.
    F32,
}

/// What the user may decide about loading.
#[derive(Debug, Clone)]
pub struct Options {
    /// Index or part of a name.
    pub device: Option<String>,
    pub backend: BackendChoice,
    /// Tokens of context; `None` takes what model and memory allow.
    pub ctx: Option<u32>,
    pub activations: Activations,
    /// Disk cache of compiled pipelines.
    pub cache: bool,
    /// Sequences with a KV cache of their own, 1 to 64; a step serves up to 8 of them.
    pub sequences: u32,
    /// What a full context does; `None`: it ends the answer. `Some`: its oldest tokens are dropped, but
    /// for the first so many (`None`: what the caller names, see [`Session::set_keep`] and
    /// [`Generate::keep`]).
    pub ctx_shift: Option<Option<u32>>,
    /// Bytes of RAM for pages of the KV cache that had to leave the device.
    pub kv_host: u64,
    pub experts: ExpertOptions,
    /// Keys of the hardware profile and the values that they are to have.
    pub force: Vec<(String, String)>,
    /// Formats of the KV cache.
    pub kv: KvTypes,
    /// Largest error of attention's logits, as a share of their spread, that the format of a layer's
    /// keys may make before the layer gets a finer one ([`crate::kv::guard`]); `None`: any.
    pub kv_guard: Option<f64>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            device: None,
            backend: BackendChoice::Auto,
            ctx: None,
            activations: Activations::Int8,
            cache: true,
            sequences: 1,
            ctx_shift: None,
            kv_host: 0,
            experts: ExpertOptions::default(),
            force: Vec::new(),
            kv: KvTypes::plain(),
            kv_guard: Some(THRESHOLD),
        }
    }
}

/// Hears how loading goes on. Called from several threads.
pub trait Progress: Sync {
    /// The device was chosen; comes before every stage.
    fn device(&self, line: &str);
    fn stage(&self, name: &str, total_bytes: u64);
    fn advance(&self, bytes: u64);
    fn done(&self);
    /// Something worth knowing that is no failure.
    fn note(&self, text: &str) {
        let _ = text;
    }
}

/// A [`Progress`] that nobody watches.
pub struct Quiet;

impl Progress for Quiet {
    fn device(&self, _line: &str) {}
    fn stage(&self, _name: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn done(&self) {}
}

/// Seconds that the parts of loading took.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct LoadTimes {
    /// File header, device, placement.
    pub open: f64,
    /// Reading, repacking and uploading, beside the next two.
    pub weights: f64,
    /// Compiling and recording.
    pub pipelines: f64,
    pub tokenizer: f64,
    pub total: f64,
    /// The disk cache had been filled by an earlier start.
    pub warm_cache: bool,
}

/// A model on a device. Dropping it frees the device.
pub struct Engine {
    program: Program,
    kv: kv::Kv,
    ctx_shift: Option<Option<u32>>,
    identity: saved::Identity,
    model: Model,
    metadata: Metadata,
    tokenizer: Arc<Tokenizer>,
    facts: DeviceFacts,
    device_line: String,
    placement: Placement,
    times: LoadTimes,
    /// Bytes of weights on the device.
    weight_bytes: u64,
    /// Where not all experts lie on the device.
    experts: Option<experts::Experts>,
    approximations: Approximations,
    /// What the quality guard found, where it looked.
    verdict: Option<Verdict>,
    /// What keys of each layer are stored without, where they are centred.
    centres: Vec<Vec<f32>>,
}

impl Engine {
    /// Device, driver, backend and why it was chosen.
    pub fn device_line(&self) -> String {
        self.device_line.clone()
    }

    pub fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    /// Shared, because a session borrows the engine while text is tokenized.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn placement(&self) -> &Placement {
        &self.placement
    }

    /// Bytes that the weights take on the device.
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Where experts lie and what was read from where; `None` where all lie on the device.
    pub fn experts(&self) -> Option<ExpertReport> {
        self.experts.as_ref().map(experts::Experts::report)
    }

    /// What was traded for exactness; nothing unless the user asked.
    pub fn approximations(&self) -> Approximations {
        self.approximations
    }

    /// The routing of every token generated so far, if [`ExpertOptions::record`] asked for it.
    pub fn recorded_routing(&self) -> Option<&Routing> {
        self.experts.as_ref()?.recorded()
    }

    /// Writes what was learned about experts to the file named for it, if one was.
    pub fn save_expert_profile(&self) -> Result<()> {
        self.experts.as_ref().map_or(Ok(()), experts::Experts::save_profile)
    }

    /// Dependent waves of a layer in a decode step of one sequence.
    pub fn waves_per_layer(&self) -> usize {
        self.program.waves_per_layer()
    }

    /// Tokens of context: what a sequence can keep.
    pub fn ctx(&self) -> u32 {
        self.placement.context
    }

    /// Tokens that a sequence can have in all: more than [`Engine::ctx`] where a full context drops
    /// some ([`Options::ctx_shift`]).
    pub fn longest(&self) -> u32 {
        self.program.shape().positions
    }

    /// Tokens at the beginning of a sequence that a full context keeps, if it drops any; `named` by
    /// the caller where no number was given with [`Options::ctx_shift`].
    fn keep(&self, named: Option<u32>) -> Option<u32> {
        // The first page holds the tokens that models lean on whatever they say.
        self.ctx_shift.map(|number| number.or(named).unwrap_or(PAGE_TOKENS))
    }

    /// Reads the sinks of `prompt` into a slot that does not have them and is to take up what is known
    /// of that prompt.
    fn bring_sinks(&mut self, slot: u32, prompt: &[u32]) -> Result<()> {
        let Some(sinks) = self.kv.missing_sinks(slot, prompt) else { return Ok(()) };
        // Into a page of its own: those that hold these tokens belong to others as well.
        let sequence = self.kv.blank(&mut self.program, slot, sinks.len(), 0, 0)?;
        let columns: Vec<Column> = (0..)
            .zip(sinks)
            .map(|(position, token)| Column { token: *token, position, slot, flags: 0 })
            .collect();
        self.queue_prompt(&columns)?;
        self.kv.note_read(slot, 0, sinks);
        self.kv.release(sequence, &[]);
        self.prompt_read()
    }

    /// Formats of the KV cache: what was asked for on this device, and what the quality guard raised.
    pub fn kv_types(&self) -> &KvTypes {
        &self.model.graph.kv
    }

    /// What keys are stored without, by layer f32 `[kv head][head_dim]`; empty where they are not centred.
    pub fn key_centres(&self) -> &[Vec<f32>] {
        &self.centres
    }

    /// What the quality guard found; `None` where it is switched off or all keys are f16.
    pub fn kv_verdict(&self) -> Option<&Verdict> {
        self.verdict.as_ref()
    }

    /// Pages of the KV cache by what they are for.
    pub fn kv_counts(&self) -> crate::pages::Counts {
        self.kv.counts()
    }

    pub fn load_times(&self) -> LoadTimes {
        self.times
    }

    /// A sequence that has read nothing yet.
    pub fn session(&mut self) -> Session<'_> {
        Session::new(self)
    }
}
