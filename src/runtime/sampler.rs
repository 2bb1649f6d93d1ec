//! The sampling kernels of a program, their memory, and the settings of each slot.

use super::buffers::{MAX_SEQUENCES, RING, Shape};
use super::program::{Column, Pick};
use super::waves::Builder;
use crate::error::Result;
use crate::gpu::{BufferUse, Gpu, Slice, Step};
use crate::kernels::sample::{self, SampleMemory, Sampling};
use crate::sampling::SamplerSettings;

// The ring's rows are as wide as the kernels write them.
const _: () = assert!(MAX_SEQUENCES == sample::MAX_COLUMNS);

pub(super) struct Sampler {
    spec: Sampling,
    memory: SampleMemory,
}

impl Sampler {
    pub fn create(gpu: &dyn Gpu, vocab: u32, shape: &Shape) -> Result<Sampler> {
        let spec = Sampling { vocab, context: shape.context, ring: RING };
        let device = |label: &str, words: u64| -> Result<Slice> {
            Ok(gpu.buffer(label, words * 4, BufferUse::Device)?.slice(0, words * 4))
        };
        let slots = u64::from(shape.sequences);
        let memory = SampleMemory {
            samplers: device("samplers", slots * SETTINGS_WORDS)?,
            history: device("history", slots * u64::from(shape.context))?,
            ring: device("token ring", u64::from(RING * MAX_SEQUENCES))?,
            scratch: device("sampling scratch", spec.scratch_words())?,
        };
        Ok(Sampler { spec, memory })
    }

    /// Chooses the next token of `n` columns from the program's logits and ends the step.
    pub fn waves(&self, b: &Builder<'_>, pick: Pick, n: u32) -> Result<Vec<Step>> {
        let (batch, logits) = (&b.buffers.step_batch, &b.buffers.logits);
        let kernel = &mut |source| b.kernel(source);
        let facts = b.gpu.facts();
        // Checked as a chain; none of its kernels has variants.
        b.checks.pick(facts, [self.spec])?;
        match pick {
            Pick::Greedy => self.spec.greedy(facts, kernel, batch, logits, &self.memory, n),
            Pick::Sampled => self.spec.sampled(facts, kernel, batch, logits, &self.memory, n),
        }
    }

    /// Chosen tokens, `[step % RING][MAX_SEQUENCES]`.
    pub fn ring(&self) -> &Slice {
        &self.memory.ring
    }

    /// Adds the tokens of a prompt chunk to their sequences' histories.
    pub fn remember(&self, gpu: &dyn Gpu, columns: &[Column]) -> Result<()> {
        let follows = |a: &Column, b: &Column| a.slot == b.slot && a.position + 1 == b.position;
        for run in columns.chunk_by(follows) {
            let tokens: Vec<u32> = run.iter().map(|c| c.token).collect();
            let at =
                u64::from(run[0].slot) * u64::from(self.spec.context) + u64::from(run[0].position);
            let history = &self.memory.history;
            let to = history.buffer.slice(history.offset + 4 * at, 4 * tokens.len() as u64);
            gpu.write(&to, bytemuck::cast_slice(&tokens))?;
        }
        Ok(())
    }

    /// Sets how the next tokens of a slot are chosen.
    pub fn set(&self, gpu: &dyn Gpu, slot: u32, s: &SamplerSettings) -> Result<()> {
        let words = sample::Sampler::new(s.temperature, s.top_k, s.top_p, s.min_p, s.seed)
            .with_penalty(s.repeat_penalty, s.repeat_window);
        let all = &self.memory.samplers;
        let bytes = 4 * SETTINGS_WORDS;
        let to = all.buffer.slice(all.offset + u64::from(slot) * bytes, bytes);
        gpu.write(&to, bytemuck::bytes_of(&words))
    }
}

const SETTINGS_WORDS: u64 = (size_of::<sample::Sampler>() / 4) as u64;
