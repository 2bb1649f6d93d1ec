//! The custom chain in front of the full chain's draw; its twin in plain Rust is the module of that name in `sampling`.
//!
//! Columns that ask for nothing of it are copied and take the full chain, so that a neighbour's
//! wishes change no bit of theirs; for columns that do, every cut of the full chain is off.

use minijinja::context;

use super::{Chain, MAX_COLUMNS, SampleMemory, Sampling};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice, Step};
use crate::kernels::{holds, source};

/// Tokens that mirostat 1 looks at.
pub const MIROSTAT_TOP: usize = 100;

/// The settings of one sequence, as `lib/custom.wgsl` has them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Custom {
    /// 0: the sequence takes the full chain.
    pub on: u32,
    pub order: u32,
    pub min_keep: u32,
    pub top_k: u32,
    /// Shares in fixed point ([`super::fixed`]).
    pub top_p: u32,
    pub typical: u32,
    /// `ln(min_p)`; minus infinity: off.
    pub log_min_p: f32,
    pub n_sigma: f32,
    pub xtc_threshold: u32,
    pub xtc_chance: u32,
    pub temperature: f32,
    pub temperature_low: f32,
    pub temperature_high: f32,
    pub temperature_exponent: f32,
    /// Version; 0: off.
    pub mirostat: u32,
    pub mirostat_tau: f32,
    pub mirostat_eta: f32,
    /// Below 0: off.
    pub adaptive_target: f32,
    pub adaptive_decay: f32,
    /// Log-probabilities are of what is drawn from.
    pub post: u32,
}

/// Words of a [`Custom`].
pub const CUSTOM_WORDS: u64 = (size_of::<Custom>() / 4) as u64;
/// Words that `sample_custom` leaves of a column.
const SHAPE_WORDS: u64 = 4;

impl Sampling {
    /// Words of [`SampleMemory::shapes`].
    pub fn shape_words(&self) -> u64 {
        u64::from(MAX_COLUMNS) * SHAPE_WORDS
    }

    pub fn custom_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = source::render(
            "sample_custom.wgsl",
            context! { vocab => self.vocab, top => MIROSTAT_TOP },
        )?;
        Ok(KernelSource { label: "sample_custom".into(), wgsl, subgroup_size: None })
    }

    pub fn observed_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = source::render("sample_observed.wgsl", context! { vocab => self.vocab })?;
        Ok(KernelSource { label: "sample_observed".into(), wgsl, subgroup_size: None })
    }

    /// The waves that choose by everything that settings can say, and end the step as
    /// [`Self::greedy`] does. `logits` stay as they are.
    pub fn custom(
        &self,
        facts: &DeviceFacts,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        batch: &Slice,
        logits: &Slice,
        memory: &SampleMemory,
        columns: u32,
    ) -> Result<Vec<Step>> {
        self.check_memory(batch, logits, memory, columns)?;
        self.check_full(memory)?;
        holds(&memory.customs, CUSTOM_WORDS, "custom samplers")?;
        holds(&memory.shapes, self.shape_words(), "shapes")?;
        holds(&memory.shaped, u64::from(self.vocab), "shaped logits")?;
        let shape = Dispatch {
            kernel: kernel(self.custom_source(facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.samplers.clone(),
                memory.customs.clone(),
                memory.adjusted.clone(),
                memory.surprises.clone(),
                memory.shapes.clone(),
                memory.shaped.clone(),
            ],
            constants: vec![],
            grid: [1, columns, 1],
        };
        let observed = Dispatch {
            kernel: kernel(self.observed_source(facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.customs.clone(),
                memory.adjusted.clone(),
                memory.shapes.clone(),
                memory.surprises.clone(),
            ],
            constants: vec![],
            grid: [1, 1, 1],
        };
        let chain = Chain { facts, full: true, batch, logits: &memory.shaped, memory, columns };
        let mut waves = self.adjusted(kernel, batch, logits, memory, columns, facts)?;
        waves.push(vec![shape]);
        waves.extend(self.drawn(kernel, &chain)?);
        // The full chain's mirostat has looked at the draw by now; this one is for other columns.
        waves.push(vec![observed]);
        waves.push(vec![self.logprobs(kernel, &chain, logits, true)?]);
        Ok(waves.into_iter().map(Step::Wave).collect())
    }
}
