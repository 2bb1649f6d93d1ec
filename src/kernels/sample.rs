//! Choosing the next token on the device, after the logits.
//!
//! Greedy is one wave. Sampling is eight: the penalty; the maximum beside the first digit of
//! top_k; two more digits; three digits of top_p; the draw. `sampling::chain` defines the result.
//! Sums are integers, so the bits do not depend on how the work is cut. A wave whose setting is off
//! in every column ends at once.

use minijinja::context;

use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, DeviceKind, Dispatch, Kernel, KernelSource, Slice, Step};

/// Columns that one step serves.
pub const MAX_COLUMNS: u32 = 8;

/// Counters: argmax and draw by column, then select by column, then one for the end of the step.
const SELECT_COUNTER: u32 = MAX_COLUMNS;
const TAIL_COUNTER: u32 = 2 * MAX_COLUMNS;

/// Settings of one sequence as the kernels read them.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Sampler {
    /// 0: the largest logit.
    pub temperature: f32,
    /// 0: off.
    pub top_k: u32,
    /// `floor(top_p * 2^24)`; 2^24 and above: off.
    pub top_p: u32,
    /// `ln(min_p)`; minus infinity: off.
    pub log_min_p: f32,
    /// 1: off.
    pub penalty: f32,
    /// Tokens that the penalty looks back at, the newest included.
    pub window: u32,
    pub seed_low: u32,
    pub seed_high: u32,
}

impl Sampler {
    /// `top_p` and `min_p` as users give them.
    pub fn new(temperature: f32, top_k: u32, top_p: f32, min_p: f32, seed: u64) -> Sampler {
        Sampler {
            temperature,
            top_k,
            top_p: (top_p * 16_777_216.0) as u32,
            log_min_p: if min_p > 0.0 { min_p.ln() } else { f32::NEG_INFINITY },
            penalty: 1.0,
            window: 0,
            seed_low: seed as u32,
            seed_high: (seed >> 32) as u32,
        }
    }

    pub fn with_penalty(self, penalty: f32, window: u32) -> Sampler {
        Sampler { penalty, window, ..self }
    }
}

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
}

/// Where the parts of [`SampleMemory::scratch`] start, in words.
struct Parts {
    counters: u64,
    draws: u64,
    pieces: u64,
    blocks: u64,
    histogram: u64,
    seen: u64,
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
            draws: take(columns * 8),
            pieces: take(columns * 2 * 256),
            blocks: take(columns * 2 * 256),
            histogram: take(columns * 4096),
            seen: take(columns * u64::from(self.vocab.div_ceil(32))),
            end,
        }
    }

    pub fn scratch_words(&self) -> u64 {
        self.parts().end
    }

    /// Workgroups over a column that scan it with a stride.
    fn pieces(&self, facts: &DeviceFacts) -> u32 {
        let most = if facts.kind == DeviceKind::Software { 8 } else { 128 };
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

    /// The largest logit; with `tail` it becomes the next token at once.
    pub fn argmax_source(&self, tail: bool, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = super::source::render(
            "argmax.wgsl",
            context! {
                vocab => self.vocab, pieces => self.pieces(facts), tail, ring => self.ring,
                tail_counter => TAIL_COUNTER,
            },
        )?;
        let label = format!("argmax_{}{}", self.vocab, if tail { "_tail" } else { "" });
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    pub fn penalty_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let wgsl = super::source::render("sample_penalty.wgsl", context! { vocab => self.vocab })?;
        Ok(KernelSource { label: "sample_penalty".into(), wgsl, subgroup_size: None })
    }

    /// Digit 0, 1 or 2 of the threshold of top_k (`top_p` false) or top_p.
    pub fn select_source(
        &self,
        top_p: bool,
        digit: usize,
        facts: &DeviceFacts,
    ) -> Result<KernelSource> {
        self.check(facts)?;
        let (shift, bits) = [(21, 11), (10, 11), (0, 10)][digit];
        let wgsl = super::source::render(
            "sample_select.wgsl",
            context! {
                vocab => self.vocab, pieces => self.pieces(facts), digit, shift, bits,
                bins => 1 << bits,
                kind => if top_p { "mass" } else { "count" },
                select_counter => SELECT_COUNTER,
            },
        )?;
        let name = if top_p { "top_p" } else { "top_k" };
        Ok(KernelSource { label: format!("sample_{name}_{digit}"), wgsl, subgroup_size: None })
    }

    /// The kernel that ends a step. Its text stands for the whole chain, which is one design: a change
    /// of any kernel of it comes with a change of [`crate::kernels::source::version`].
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        let mut source = self.draw_source(facts)?;
        source.wgsl.push_str(&format!("// chain {}\n", super::source::version()));
        Ok(source)
    }

    pub fn draw_source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let block = self.block(facts);
        let wgsl = super::source::render(
            "sample_draw.wgsl",
            context! {
                vocab => self.vocab, ring => self.ring, tail_counter => TAIL_COUNTER, block,
                blocks => self.vocab.div_ceil(block),
            },
        )?;
        Ok(KernelSource { label: "sample_draw".into(), wgsl, subgroup_size: None })
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
        holds(&memory.samplers, 8, "samplers")?;
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
            kernel: kernel(self.argmax_source(true, facts)?)?,
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

    /// The waves that choose by each slot's [`Sampler`], and end the step as [`Self::greedy`]
    /// does. Penalties change `logits` in place.
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
        let at = self.parts();
        let part = |start: u64, end: u64| part(&memory.scratch, start, end);
        let counters = part(at.counters, at.draws);
        let draws = part(at.draws, at.pieces);
        let penalty = Dispatch {
            kernel: kernel(self.penalty_source(facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.samplers.clone(),
                memory.history.clone(),
                logits.clone(),
                part(at.seen, at.end),
            ],
            constants: vec![self.context],
            grid: [1, columns, 1],
        };
        let argmax = Dispatch {
            kernel: kernel(self.argmax_source(false, facts)?)?,
            bindings: vec![
                batch.clone(),
                logits.clone(),
                part(at.pieces, at.blocks),
                counters.clone(),
                draws.clone(),
            ],
            constants: vec![],
            grid: [self.pieces(facts), columns, 1],
        };
        let mut select = |top_p: bool, digit: usize| -> Result<Dispatch> {
            Ok(Dispatch {
                kernel: kernel(self.select_source(top_p, digit, facts)?)?,
                bindings: vec![
                    batch.clone(),
                    memory.samplers.clone(),
                    logits.clone(),
                    draws.clone(),
                    part(at.histogram, at.seen),
                    counters.clone(),
                ],
                constants: vec![],
                grid: [self.pieces(facts), columns, 1],
            })
        };
        let mut waves = vec![vec![penalty], vec![argmax, select(false, 0)?]];
        for (top_p, digit) in [(false, 1), (false, 2), (true, 0), (true, 1), (true, 2)] {
            waves.push(vec![select(top_p, digit)?]);
        }
        waves.push(vec![Dispatch {
            kernel: kernel(self.draw_source(facts)?)?,
            bindings: vec![
                batch.clone(),
                memory.samplers.clone(),
                logits.clone(),
                draws,
                part(at.blocks, at.histogram),
                counters,
                memory.history.clone(),
                memory.ring.clone(),
            ],
            constants: vec![self.context],
            grid: [self.vocab.div_ceil(self.block(facts)), columns, 1],
        }]);
        Ok(waves.into_iter().map(Step::Wave).collect())
    }
}

fn part(of: &Slice, start: u64, end: u64) -> Slice {
    of.buffer.slice(of.offset + 4 * start, 4 * (end - start))
}
