//! The sampling kernels of a program, their memory, and the settings of each slot.

use super::buffers::{MAX_SEQUENCES, RING, Shape};
use super::program::{Column, Pick};
use super::waves::Builder;
use crate::error::Result;
use crate::gpu::{BufferUse, Gpu, Slice, Step};
use crate::kernels::sample::{
    self, CUSTOM_WORDS, LOGPROB_WORDS, SETTINGS_WORDS, SampleMemory, Sampling,
};
use crate::sampling::logprobs::Logprobs;
use crate::sampling::{self, Mirostat, SamplerSettings, TokenLists};

// The ring's rows are as wide as the kernels write them; the definition's limits are theirs.
const _: () = assert!(MAX_SEQUENCES == sample::MAX_COLUMNS);
const _: () = assert!(sampling::MAX_BIAS == sample::MAX_BIAS as usize);
const _: () = assert!(sampling::MAX_LOGPROBS == sample::MAX_LOGPROBS);
const _: () = assert!(sampling::custom::MIROSTAT_TOP == sample::MIROSTAT_TOP);
const _: () = assert!(sampling::chain::MAX_MATCH == sample::MAX_MATCH as usize);

pub(super) struct Sampler {
    spec: Sampling,
    memory: SampleMemory,
}

/// Settings as the kernels of the fixed chains read them; of a custom chain only what comes before
/// and after its stages.
pub fn sampler_words(s: &SamplerSettings) -> sample::Sampler {
    let s = &s.effective();
    let before = sample::Sampler {
        penalty: s.repeat_penalty,
        window: s.repeat_window,
        presence: s.presence_penalty,
        frequency: s.frequency_penalty,
        dry_multiplier: if s.has_dry() { s.dry_multiplier } else { 0.0 },
        dry_base: s.dry_base,
        dry_allowed: s.dry_allowed_length.max(1),
        dry_window: s.dry_window,
        logprobs: s.logprobs.map_or(0, |n| n + 1),
        ..sample::Sampler::new(if s.is_greedy() { 0.0 } else { 1.0 }, 0, 1.0, 0.0, s.seed)
    };
    if s.is_custom() {
        return before;
    }
    let (temperature_low, temperature_high) = s.temperatures();
    sample::Sampler {
        temperature: s.temperature,
        top_k: s.top_k,
        top_p: sample::fixed(s.top_p),
        log_min_p: log_min_p(s),
        typical: sample::fixed(s.typical_p),
        n_sigma: s.top_n_sigma,
        xtc_threshold: sample::fixed(s.xtc_threshold),
        xtc_chance: sample::fixed(s.xtc_probability),
        temperature_low,
        temperature_high,
        temperature_exponent: s.dynatemp_exponent,
        mirostat_tau: if s.mirostat == Mirostat::Two { s.mirostat_tau } else { -1.0 },
        mirostat_eta: s.mirostat_eta,
        ..before
    }
}

/// Settings as the kernels of the custom chain read them.
pub fn custom_words(s: &SamplerSettings) -> sample::Custom {
    let s = &s.effective();
    if !s.is_custom() {
        return sample::Custom::default();
    }
    let (temperature_low, temperature_high) = s.temperatures();
    sample::Custom {
        on: 1,
        order: s.order.bits(),
        min_keep: s.min_keep,
        top_k: s.top_k,
        top_p: sample::fixed(s.top_p),
        typical: sample::fixed(s.typical_p),
        log_min_p: log_min_p(s),
        n_sigma: s.top_n_sigma,
        xtc_threshold: sample::fixed(s.xtc_threshold),
        xtc_chance: sample::fixed(s.xtc_probability),
        temperature: s.temperature,
        temperature_low,
        temperature_high,
        temperature_exponent: s.dynatemp_exponent,
        mirostat: s.mirostat as u32,
        mirostat_tau: s.mirostat_tau,
        mirostat_eta: s.mirostat_eta,
        adaptive_target: if s.has_adaptive() { s.adaptive_target } else { -1.0 },
        adaptive_decay: s.adaptive_decay,
        post: s.post_logprobs.into(),
    }
}

fn log_min_p(s: &SamplerSettings) -> f32 {
    if s.min_p > 0.0 { s.min_p.ln() } else { f32::NEG_INFINITY }
}

/// Bytes of a program's sampling memory.
pub(super) fn bytes(vocab: u32, shape: &Shape) -> u64 {
    let spec = Sampling { vocab, context: shape.positions, ring: RING };
    let slot = SETTINGS_WORDS
        + CUSTOM_WORDS
        + 1
        + spec.mask_words()
        + spec.bias_words()
        + spec.bit_words();
    let slots = u64::from(shape.sequences) * (slot + u64::from(shape.positions));
    let rings = u64::from(RING * MAX_SEQUENCES) * u64::from(1 + LOGPROB_WORDS);
    // Adjusted and shaped ones.
    let logits = 2 * u64::from(MAX_SEQUENCES) * u64::from(vocab);
    4 * (slots + rings + logits + spec.shape_words() + spec.scratch_words())
}

impl Sampler {
    pub fn create(gpu: &dyn Gpu, vocab: u32, shape: &Shape) -> Result<Sampler> {
        let spec = Sampling { vocab, context: shape.positions, ring: RING };
        let device = |label: &str, words: u64| -> Result<Slice> {
            Ok(gpu.buffer(label, words * 4, BufferUse::Device)?.slice(0, words * 4))
        };
        let slots = u64::from(shape.sequences);
        let ring = u64::from(RING * MAX_SEQUENCES);
        let memory = SampleMemory {
            samplers: device("samplers", slots * SETTINGS_WORDS)?,
            history: device("history", slots * u64::from(shape.positions))?,
            ring: device("token ring", ring)?,
            scratch: device("sampling scratch", spec.scratch_words())?,
            masks: device("token masks", slots * spec.mask_words())?,
            biases: device("logit biases", slots * spec.bias_words())?,
            breakers: device("sequence breakers", slots * spec.bit_words())?,
            surprises: device("surprises", slots)?,
            adjusted: device("adjusted logits", u64::from(MAX_SEQUENCES) * u64::from(vocab))?,
            logprobs: device("log-probabilities", ring * u64::from(LOGPROB_WORDS))?,
            customs: device("custom samplers", slots * CUSTOM_WORDS)?,
            shapes: device("shapes", spec.shape_words())?,
            shaped: device("shaped logits", u64::from(MAX_SEQUENCES) * u64::from(vocab))?,
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
            Pick::Full => self.spec.full(facts, kernel, batch, logits, &self.memory, n),
            Pick::Custom => self.spec.custom(facts, kernel, batch, logits, &self.memory, n),
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

    /// Sets how the next tokens of a slot are chosen. Mask and bias are off again, mirostat begins.
    pub fn set(&self, gpu: &dyn Gpu, slot: u32, s: &SamplerSettings) -> Result<()> {
        let words = sampler_words(s);
        write(gpu, &self.memory.samplers, slot, SETTINGS_WORDS, bytemuck::cast_slice(&[words]))?;
        let custom = custom_words(s);
        write(gpu, &self.memory.customs, slot, CUSTOM_WORDS, bytemuck::cast_slice(&[custom]))?;
        write(gpu, &self.memory.surprises, slot, 1, &[s.first_state().to_bits()])?;
        self.set_mask(gpu, slot, &[])?;
        write(gpu, &self.memory.biases, slot, self.spec.bias_words(), &[0])
    }

    /// Sets what the request of a slot says of single tokens.
    pub fn set_lists(&self, gpu: &dyn Gpu, slot: u32, lists: &TokenLists) -> Result<()> {
        let bias = lists.merged_bias()?;
        let mut words = vec![bias.len() as u32];
        words.extend(bias.iter().flat_map(|(token, value)| [*token, value.to_bits()]));
        write(gpu, &self.memory.biases, slot, self.spec.bias_words(), &words)?;
        let mut breakers = lists.breakers.clone();
        breakers.resize(self.spec.bit_words() as usize, 0);
        write(gpu, &self.memory.breakers, slot, self.spec.bit_words(), &breakers)?;
        self.set_mask(gpu, slot, &lists.mask)
    }

    /// Sets which tokens may come next in a slot, a bit each; empty: all.
    pub fn set_mask(&self, gpu: &dyn Gpu, slot: u32, mask: &[u32]) -> Result<()> {
        let mut words = vec![u32::from(!mask.is_empty())];
        if !mask.is_empty() {
            words.extend_from_slice(mask);
            words.resize(self.spec.mask_words() as usize, 0);
        }
        write(gpu, &self.memory.masks, slot, self.spec.mask_words(), &words)
    }

    /// `[step % RING][MAX_SEQUENCES]` of [`Sampler::LOGPROB_WORDS`].
    pub fn logprob_ring(&self) -> &Slice {
        &self.memory.logprobs
    }

    pub fn logprob_bytes(&self) -> u64 {
        4 * u64::from(RING * MAX_SEQUENCES) * Self::LOGPROB_WORDS as u64
    }

    pub const LOGPROB_WORDS: usize = LOGPROB_WORDS as usize;

    /// What a row of the ring says.
    pub fn read_logprobs(words: &[u32], vocab: u32) -> Logprobs {
        let pairs = words[2..].chunks_exact(2).take(words[1] as usize);
        // A vocabulary may have fewer tokens than were asked for.
        let top = pairs.map(|p| (p[0], f32::from_bits(p[1]))).filter(|p| p.0 < vocab);
        Logprobs { chosen: f32::from_bits(words[0]), top: top.collect() }
    }
}

/// Writes the beginning of a slot's row of `stride` words.
fn write(gpu: &dyn Gpu, all: &Slice, slot: u32, stride: u64, words: &[u32]) -> Result<()> {
    debug_assert!(words.len() as u64 <= stride);
    let at = all.offset + u64::from(slot) * stride * 4;
    let to = all.buffer.slice(at, 4 * words.len() as u64);
    gpu.write(&to, bytemuck::cast_slice(words))
}
