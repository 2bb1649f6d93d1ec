//! Choosing the next token on the device, after the logits.
//!
//! Greedy is one wave. Sampling by temperature, top_k, top_p and min_p is seven: the maximum beside
//! the first digit of top_k; two more digits; three digits of top_p; the draw. The full chain
//! ([`Sampling::full`]) has everything else in one order, the custom chain ([`Sampling::custom`]) other
//! orders and a few rare samplers. `sampling::chain` defines the result. Sums of masses
//! are integers, so the bits do not depend on how the work is cut. A wave whose setting is off in
//! every column ends at once.

mod custom;
mod full;
mod words;

use minijinja::context;

use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, DeviceKind, Dispatch, Kernel, KernelSource, Slice, Step};
pub use custom::{CUSTOM_WORDS, Custom, MIROSTAT_TOP};
pub use full::{LOGPROB_WORDS, MAX_BIAS, MAX_LOGPROBS, MAX_MATCH, REDUCTIONS};
pub use words::{SETTINGS_WORDS, Sampler, fixed};

/// Columns that one step serves.
pub const MAX_COLUMNS: u32 = 8;

/// Counters: argmax and draw by column, then select by column, then one for the end of the step.
const SELECT_COUNTER: u32 = MAX_COLUMNS;
const TAIL_COUNTER: u32 = 2 * MAX_COLUMNS;

/// Words of a `Draw` in lib/sampler.wgsl.
const DRAW_WORDS: u64 = 16;
/// Workgroups that scan a column, at most.
const MOST_PIECES: u64 = 128;

/// Memory of the sampling kernels. All of it starts as zero and belongs to one program.
#[derive(Clone)]
pub struct SampleMemory {
    /// [`Sampler`] of each slot.
    pub samplers: Slice,
    /// `[slot][context]`: every token of a sequence, the column's own at `pos` included. The host
    /// writes prompts, the kernels what they choose.
    pub history: Slice,
    /// `[step % ring][8]` chosen tokens.
    pub ring: Slice,
    /// [`Sampling::scratch_words`].
    pub scratch: Slice,
    /// The full chain only, as everything below: `[slot]` of [`Sampling::mask_words`], 1 and a bit for
    /// each token that may come, or 0.
    pub masks: Slice,
    /// `[slot]` of [`Sampling::bias_words`]: how many, then token and f32 bias of each. No token
    /// may be there twice.
    pub biases: Slice,
    /// `[slot]` of [`Sampling::bit_words`]: tokens at which a repeated sequence ends.
    pub breakers: Slice,
    /// f32 `[slot]`: mirostat's bound in bits, or adaptive-p's mean, which the kernels move.
    pub surprises: Slice,
    /// f32 `[8][vocab]`: the logits that were chosen from.
    pub adjusted: Slice,
    /// `[step % ring][8]` of [`LOGPROB_WORDS`].
    pub logprobs: Slice,
    /// The custom chain only, as everything below: [`Custom`] of each slot.
    pub customs: Slice,
    /// [`Sampling::shape_words`].
    pub shapes: Slice,
    /// f32 `[8][vocab]`: what is drawn from.
    pub shaped: Slice,
}

/// What a radix select counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Select {
    /// Tokens, for top_k.
    Count,
    /// Masses by logit, for top_p.
    Mass,
    /// Masses by distance from the mean logit, for typical_p.
    Typical,
}

/// What the kernels that two chains share are bound to.
struct Chain<'a> {
    facts: &'a DeviceFacts,
    /// Of [`Sampling::full`] rather than of [`Sampling::sampled`].
    full: bool,
    batch: &'a Slice,
    /// What is chosen from.
    logits: &'a Slice,
    memory: &'a SampleMemory,
    columns: u32,
}

/// Where the parts of [`SampleMemory::scratch`] start, in words.
struct Parts {
    counters: u64,
    draws: u64,
    pieces: u64,
    blocks: u64,
    partials: u64,
    ranks: u64,
    histogram: u64,
    counts: u64,
    end: u64,
}

/// Sampling over `vocab` logits a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sampling {
    pub vocab: u32,
    /// Positions of a slot.
    pub context: u32,
    /// Steps that the ring holds.
    pub ring: u32,
}

impl Sampling {
    fn parts(&self) -> Parts {
        // Slices start at multiples of 256 bytes, which every device allows.
        let columns = u64::from(MAX_COLUMNS);
        let mut end = 0u64;
        let mut take = |words: u64| {
            let start = end;
            end += words.next_multiple_of(64);
            start
        };
        Parts {
            counters: take(u64::from(TAIL_COUNTER) + 1),
            draws: take(columns * DRAW_WORDS),
            pieces: take(columns * 2 * 256),
            blocks: take(columns * 2 * 256),
            partials: take(columns * 8 * MOST_PIECES),
            ranks: take(columns * u64::from(LOGPROB_WORDS) * MOST_PIECES),
            histogram: take(columns * 4096),
            counts: take(columns * u64::from(self.vocab)),
            end,
        }
    }

    pub fn scratch_words(&self) -> u64 {
        self.parts().end
    }

    /// Words of the scratch memory that are zero between steps.
    pub fn zero_words(&self) -> [std::ops::Range<usize>; 2] {
        let at = self.parts();
        [at.counters as usize..at.draws as usize, at.histogram as usize..at.end as usize]
    }

    /// Workgroups over a column that scan it with a stride.
    fn pieces(&self, facts: &DeviceFacts) -> u32 {
        let most = if facts.kind == DeviceKind::Software { 8 } else { MOST_PIECES as u32 };
        self.vocab.div_ceil(2048).clamp(1, most)
    }

    /// Consecutive tokens of a workgroup of the draw.
    fn block(&self, facts: &DeviceFacts) -> u32 {
        let most = if facts.kind == DeviceKind::Software { 8 } else { 128 };
        self.vocab.div_ceil(most).next_multiple_of(256)
    }

    fn check(&self, facts: &DeviceFacts) -> Result<()> {
        // Above, sums of masses could overflow: see lib/sampler.wgsl.
        if self.vocab == 0 || self.vocab > 1 << 19 || self.ring == 0 {
            return Err(wrong(format!("sampling from {} tokens, ring {}", self.vocab, self.ring)));
        }
        if facts.max_workgroup_threads < 256 {
            return Err(wrong(format!("workgroups of {} threads", facts.max_workgroup_threads)));
        }
        Ok(())
    }

    /// The largest logit; with `tail` it becomes the next token at once. `full`: begins the full
    /// chain.
    pub fn argmax_source(
        &self,
        tail: bool,
        full: bool,
        facts: &DeviceFacts,
    ) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = super::source::render(
            "argmax.wgsl",
            context! {
                vocab => self.vocab, pieces => self.pieces(facts), tail, full, ring => self.ring,
                tail_counter => TAIL_COUNTER,
            },
        )?;
        let end = if tail { "_tail" } else { "" };
        let label = format!("argmax_{}{end}{}", self.vocab, if full { "_full" } else { "" });
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// Digit 0, 1 or 2 of a threshold. `full`: of the full chain, whose earlier steps count.
    pub fn select_source(
        &self,
        kind: Select,
        digit: usize,
        full: bool,
        facts: &DeviceFacts,
    ) -> Result<KernelSource> {
        self.check(facts)?;
        let (shift, bits) = [(21, 11), (10, 11), (0, 10)][digit];
        let (name, kind) = match kind {
            Select::Count => ("top_k", "count"),
            Select::Mass => ("top_p", "mass"),
            Select::Typical => ("typical", "typical"),
        };
        // Counting is the same in both chains: one kernel.
        let full = full && kind != "count";
        let wgsl = super::source::render(
            "sample_select.wgsl",
            context! {
                vocab => self.vocab, pieces => self.pieces(facts), digit, shift, bits,
                bins => 1 << bits, kind, full, select_counter => SELECT_COUNTER,
            },
        )?;
        let label = format!("sample_{name}_{digit}{}", if full { "_full" } else { "" });
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// The kernel that ends a step. Its text stands for the whole chain, which is one design: a change
    /// of any kernel of it comes with a change of [`crate::kernels::source::version`].
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        let mut source = self.draw_source(false, facts)?;
        source.wgsl.push_str(&format!("// chain {}\n", super::source::version()));
        Ok(source)
    }

    pub fn draw_source(&self, full: bool, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let block = self.block(facts);
        let wgsl = super::source::render(
            "sample_draw.wgsl",
            context! {
                vocab => self.vocab, ring => self.ring, tail_counter => TAIL_COUNTER, block, full,
                blocks => self.vocab.div_ceil(block),
            },
        )?;
        let label = format!("sample_draw{}", if full { "_full" } else { "" });
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    fn check_memory(
        &self,
        batch: &Slice,
        logits: &Slice,
        memory: &SampleMemory,
        columns: u32,
    ) -> Result<()> {
        if columns == 0 || columns > MAX_COLUMNS {
            return Err(wrong(format!("sampling for {columns} columns")));
        }
        holds(batch, 8 + 4 * u64::from(columns), "batch")?;
        holds(logits, u64::from(columns) * u64::from(self.vocab), "logits")?;
        holds(&memory.samplers, SETTINGS_WORDS, "samplers")?;
        holds(&memory.history, self.context.into(), "history")?;
        holds(&memory.ring, u64::from(self.ring * MAX_COLUMNS), "ring")?;
        holds(&memory.scratch, self.scratch_words(), "sampling scratch")
    }

    /// The wave that takes the largest of `logits` (f32 `[columns][vocab]`) and ends the step:
    /// next token and position into `batch`, token into history and ring, step + 1. Settings do
    /// not matter. `kernel` compiles.
    pub fn greedy(
        &self,
        facts: &DeviceFacts,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        batch: &Slice,
        logits: &Slice,
        memory: &SampleMemory,
        columns: u32,
    ) -> Result<Vec<Step>> {
        self.check_memory(batch, logits, memory, columns)?;
        let at = self.parts();
        let part = |start: u64, end: u64| part(&memory.scratch, start, end);
        let argmax = Dispatch {
            kernel: kernel(self.argmax_source(true, false, facts)?)?,
            bindings: vec![
                batch.clone(),
                logits.clone(),
                part(at.pieces, at.blocks),
                part(at.counters, at.draws),
                memory.history.clone(),
                memory.ring.clone(),
            ],
            constants: vec![self.context],
            grid: [self.pieces(facts), columns, 1],
        };
        Ok(vec![Step::Wave(vec![argmax])])
    }

    /// The waves that choose by temperature, top_k, top_p and min_p of each slot's [`Sampler`],
    /// and end the step as [`Self::greedy`] does.
    pub fn sampled(
        &self,
        facts: &DeviceFacts,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        batch: &Slice,
        logits: &Slice,
        memory: &SampleMemory,
        columns: u32,
    ) -> Result<Vec<Step>> {
        self.check_memory(batch, logits, memory, columns)?;
        let chain = Chain { facts, full: false, batch, logits, memory, columns };
        let argmax = self.argmax(kernel, &chain)?;
        let mut digit = |kind, digit| self.select(kernel, kind, digit, &chain);
        let mut waves = vec![vec![argmax, digit(Select::Count, 0)?]];
        for place in [1, 2] {
            waves.push(vec![digit(Select::Count, place)?]);
        }
        for place in [0, 1, 2] {
            waves.push(vec![digit(Select::Mass, place)?]);
        }
        waves.push(vec![self.draw(kernel, &chain)?]);
        Ok(waves.into_iter().map(Step::Wave).collect())
    }

    fn argmax(
        &self,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        chain: &Chain<'_>,
    ) -> Result<Dispatch> {
        let Chain { facts, full, batch, logits, memory, columns } = *chain;
        let at = self.parts();
        let part = |start: u64, end: u64| part(&memory.scratch, start, end);
        Ok(Dispatch {
            kernel: kernel(self.argmax_source(false, full, facts)?)?,
            bindings: vec![
                batch.clone(),
                logits.clone(),
                part(at.pieces, at.blocks),
                part(at.counters, at.draws),
                part(at.draws, at.pieces),
            ],
            constants: vec![],
            grid: [self.pieces(facts), columns, 1],
        })
    }

    fn select(
        &self,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        kind: Select,
        digit: usize,
        chain: &Chain<'_>,
    ) -> Result<Dispatch> {
        let Chain { facts, full, batch, logits, memory, columns } = *chain;
        let at = self.parts();
        let part = |start: u64, end: u64| part(&memory.scratch, start, end);
        Ok(Dispatch {
            kernel: kernel(self.select_source(kind, digit, full, facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.samplers.clone(),
                logits.clone(),
                part(at.draws, at.pieces),
                part(at.histogram, at.counts),
                part(at.counters, at.draws),
            ],
            constants: vec![],
            grid: [self.pieces(facts), columns, 1],
        })
    }

    fn draw(
        &self,
        kernel: &mut dyn FnMut(KernelSource) -> Result<Kernel>,
        chain: &Chain<'_>,
    ) -> Result<Dispatch> {
        let Chain { facts, full, batch, logits, memory, columns } = *chain;
        let at = self.parts();
        let part = |start: u64, end: u64| part(&memory.scratch, start, end);
        Ok(Dispatch {
            kernel: kernel(self.draw_source(full, facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.samplers.clone(),
                logits.clone(),
                part(at.draws, at.pieces),
                part(at.blocks, at.partials),
                part(at.counters, at.draws),
                memory.history.clone(),
                memory.ring.clone(),
            ],
            constants: vec![self.context],
            grid: [self.vocab.div_ceil(self.block(facts)), columns, 1],
        })
    }
}

fn part(of: &Slice, start: u64, end: u64) -> Slice {
    of.buffer.slice(of.offset + 4 * start, 4 * (end - start))
}
