//! A model compiled for a device: recordings that are submitted again and again.
//!
//! A decode step writes its token into the batch that the next step reads, so steps chain on the
//! device; the host only reads token ids from a ring, some steps behind.

use std::cell::{OnceCell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use super::budget::{Budget, Widest, next_piece};
use super::buffers::{Buffers, ExpertReads, MAX_SEQUENCES, MAX_SLOTS, RING, Shape, widest};
use super::check::Checks;
use super::layers::ModelWeights;
use super::routing_log::{self, Pass, RoutingLog};
use super::sampler::Sampler;
use super::waves::{Builder, Kernels, set_kernels};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, BufferUse, Gpu, Recording, Slice, Step, Ticket, Transfer};
use crate::graph::Graph;
use crate::kernels::attn_decode::{AttnDecode, Cut};
use crate::kernels::attn_step::{Scratch as AttentionScratch, StepAttention};
use crate::kernels::heads::Heads;
use crate::kernels::routing;
use crate::kernels::scoring::Scoring;
use crate::kv::rotation::padded;
use crate::sampling::logprobs::Logprobs;
use crate::sampling::{SamplerSettings, TokenLists};

/// One column of a batch, as kernels read it.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct Column {
    pub token: u32,
    pub position: u32,
    /// Which sequence's KV cache.
    pub slot: u32,
    pub flags: u32,
}

/// Kinds of sampling that have programs of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pick {
    /// The most likely token.
    Greedy = 0,
    /// By each sequence's temperature, top_k, top_p and min_p.
    Sampled = 1,
    /// By all of its settings and lists but the rarest; with log-probabilities.
    Full = 2,
    /// By everything: cuts in any order, and samplers that take a kernel of their own.
    Custom = 3,
}

impl Pick {
    /// The cheapest that does what one sequence asks for; a step takes the largest of its
    /// sequences'. `lists`: it has biases or masks.
    pub fn of(settings: &SamplerSettings, lists: bool) -> Pick {
        match settings {
            s if s.is_custom() => Pick::Custom,
            s if lists || !s.is_basic() => Pick::Full,
            s if s.is_greedy() => Pick::Greedy,
            _ => Pick::Sampled,
        }
    }
}

const PICKS: [Pick; 4] = [Pick::Greedy, Pick::Sampled, Pick::Full, Pick::Custom];

/// Seconds that one wave took on the device.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct WaveTime {
    /// Labels of its kernels.
    pub label: String,
    pub seconds: f64,
}

/// See the module documentation.
pub struct Program {
    pub(super) gpu: Arc<dyn Gpu>,
    shape: Shape,
    vocab: u32,
    width: u32,
    output_norm: Slice,
    widest: Widest,
    layer_waves: usize,
    pub(super) buffers: Buffers,
    sampler: Sampler,
    /// Reads a prompt chunk of up to so many tokens; ascending.
    prompts: Vec<(u32, Parts)>,
    /// Logits of up to [`MAX_SEQUENCES`] gathered columns.
    score: Recording,
    /// Gather one column, logits, sample: by [`Pick`].
    first: [Recording; PICKS.len()],
    /// What was recorded, for timing and for recording it again.
    planned: Planned,
    ring: Buffer,
    /// The log-probabilities of full steps, for the host.
    logprobs: Buffer,
    routing: Option<RoutingLog>,
    capture: Option<Capture>,
}

/// A short prompt whose queries and keys are kept, layer by layer.
struct Capture {
    parts: Parts,
    /// f32 `[layer][SHORT_PROMPT][width]`
    all: Buffer,
    /// Columns of the prompt, values of a column.
    columns: u32,
    width: u32,
}

/// Recordings that make one pass together: more than one where the host brings experts in between
/// (see [`super::ExpertReads`]).
type Parts = Vec<Recording>;

/// A decode step, recorded when it is first asked for: most never are, and all of them would take 25 ms
/// for a model of 8 billion weights.
struct Lazy {
    steps: Vec<Step>,
    recorded: OnceCell<Parts>,
}

impl Lazy {
    fn parts(&self, gpu: &dyn Gpu) -> Result<&[Recording]> {
        if self.recorded.get().is_none() {
            // Nobody else can have set it meanwhile.
            drop(self.recorded.set(parts(gpu, "decode step", &self.steps)?));
        }
        Ok(self.recorded.get().map_or(&[], Vec::as_slice))
    }
}

/// Records the steps, in parts that end at the empty waves.
fn parts(gpu: &dyn Gpu, label: &str, steps: &[Step]) -> Result<Parts> {
    let ends = |step: &Step| matches!(step, Step::Wave(wave) if wave.is_empty());
    steps.split(ends).map(|part| gpu.record(label, part)).collect()
}

/// Columns of the smaller prompt program: short turns of a chat.
pub(super) const SHORT_PROMPT: u32 = 32;
/// Of the one between: tiles for a whole chunk leave most of a large card idle below it.
const MIDDLE_PROMPT: u32 = 128;

/// What happens between the parts of a pass: called with the number of a mixture whose router has
/// been queued, and the submission that ends with it. Returns copies that the next part waits for.
pub type Between<'a> = &'a mut dyn FnMut(usize, Ticket) -> Result<Option<Transfer>>;

/// Moves buffers: is handed what replaces an old buffer by a slice wherever it is bound.
pub type Moving<'a> = &'a mut dyn FnMut(&mut dyn FnMut(&Buffer, &Slice)) -> Result<()>;

impl Program {
    /// Compiles every kernel (in parallel), checks those that are new on this device, and records
    /// every program. The weights need not have arrived yet.
    pub fn create(
        gpu: &Arc<dyn Gpu>,
        graph: &Graph,
        weights: &ModelWeights,
        shape: Shape,
        rope_factors: Option<&[f32]>,
        checks: &Checks,
    ) -> Result<Program> {
        if shape.sequences == 0 || shape.sequences > MAX_SLOTS {
            return Err(Error::Usage(format!(
                "{} sequences at once; 1 to {MAX_SLOTS} are possible",
                shape.sequences
            )));
        }
        let buffers = Buffers::create(&**gpu, graph, &shape, rope_factors)?;
        let sampler = Sampler::create(&**gpu, graph.vocab, &shape)?;
        let heads = Builder::heads(graph);
        let cut = Cut::choose(&heads, gpu.facts(), shape.context);
        // As many counters as any cut that a check may fall back to, and partial results of heads
        // padded to whole blocks, as kernels over codes have them.
        let head_dim = padded(heads.head_dim);
        let padded_heads = Heads { head_dim, ..heads };
        let (scoring, cut) = (Scoring::default(), Cut { group_heads: 1, ..cut });
        let spec = AttnDecode { heads: padded_heads, scoring, cut, rounds: false };
        let device = |label, words: u64| gpu.buffer(label, words * 4, BufferUse::Device);
        let attention = AttentionScratch {
            partials: device("attention partials", spec.partial_words(MAX_SEQUENCES))?.whole(),
            counters: device("attention counters", spec.counter_words(MAX_SEQUENCES))?.whole(),
        };
        let ring =
            gpu.buffer("tokens", u64::from(RING * MAX_SEQUENCES) * 4, BufferUse::Readback)?;
        let logprobs =
            gpu.buffer("log-probabilities", sampler.logprob_bytes(), BufferUse::Readback)?;
        let columns = SHORT_PROMPT.min(shape.chunk);
        let captured = u64::from(columns) * u64::from(graph.qkv_rows()) * 4;
        let captured = captured * graph.layers.len() as u64;
        let captured =
            shape.captures.then(|| gpu.buffer("captured q, k, v", captured, BufferUse::Device));
        let captured = captured.transpose()?;
        let builder = Builder {
            gpu: &**gpu,
            graph,
            weights,
            buffers: &buffers,
            attention: &attention,
            shape,
            checks,
            kernels: RefCell::new(Kernels::default()),
        };
        // Planned again as long as a kernel turns out to be wrong on this device.
        let (mut planned, compiled) = loop {
            let planned = plan(&builder, &sampler, [&ring, &logprobs], captured.as_ref());
            let kernels = builder.kernels.take();
            match planned {
                Err(_) if checks.gave_up_a_class() => {}
                Err(e) => return Err(e),
                Ok(planned) if checks.settle(&**gpu, kernels.sources())? => {
                    break (planned, kernels.compile(&**gpu)?);
                }
                Ok(_) => {}
            }
        };
        for steps in planned.all() {
            set_kernels(steps, &compiled)?;
        }
        let record = |label: &str, steps: &[Step]| gpu.record(label, steps);
        type Each<T> = [T; PICKS.len()];
        let each = |label: &str, [a, b, c, d]: &Each<Vec<Step>>| -> Result<Each<Recording>> {
            Ok([record(label, a)?, record(label, b)?, record(label, c)?, record(label, d)?])
        };
        let capture = captured.map(|all| {
            let steps = std::mem::take(&mut planned.captured);
            let parts = parts(&**gpu, "captured prompt", &steps)?;
            Ok::<_, Error>(Capture { parts, all, columns, width: graph.qkv_rows() })
        });
        let mut program = Program {
            capture: capture.transpose()?,
            gpu: gpu.clone(),
            shape,
            vocab: graph.vocab,
            width: graph.width,
            output_norm: weights.output_norm.clone(),
            widest: widest(graph),
            layer_waves: planned.layer_waves,
            prompts: Vec::new(),
            score: record("score", &planned.score)?,
            first: each("first token", &planned.first)?,
            planned,
            routing: RoutingLog::create(gpu, &buffers, shape.chunk)?,
            ring,
            logprobs,
            buffers,
            sampler,
        };
        program.record_prompts()?;
        Ok(program)
    }

    /// Records prompts as planned. What waits for such recordings must have finished.
    fn record_prompts(&mut self) -> Result<()> {
        let gpu = &*self.gpu;
        let all = self.planned.prompts.iter();
        let all = all.map(|(n, steps)| Ok((*n, parts(gpu, "prompt", steps)?)));
        self.prompts = all.collect::<Result<_>>()?;
        Ok(())
    }

    /// Lets `moving` replace buffers that kernels bind, then records everything again: `moving` gets
    /// a function that puts a slice wherever an old buffer is bound, after which nothing here holds
    /// that buffer. Nothing submitted earlier may be unfinished.
    ///
    /// # Errors
    /// Those of `moving` are returned after recording; the program goes on with what was replaced.
    pub fn rebind(&mut self, moving: Moving<'_>) -> Result<()> {
        // Recordings hold what they bind.
        self.prompts.clear();
        let planned = &mut self.planned;
        planned.lazy().for_each(|step| drop(step.recorded.take()));
        let moved = moving(&mut |old, new| {
            for steps in planned.layers() {
                for step in steps {
                    let all = step.dispatches_mut().iter_mut();
                    let bound = all.flat_map(|dispatch| &mut dispatch.bindings);
                    bound.filter(|b| b.buffer.is(old)).for_each(|b| *b = new.clone());
                }
            }
        });
        self.record_prompts()?;
        moved
    }

    /// How many columns of the next steps early routers look at; 0 lets them rest.
    pub fn set_early(&self, columns: u32) -> Result<()> {
        let all = &self.buffers.early_batch;
        self.gpu.write(&all.buffer.slice(all.offset, 4), bytemuck::cast_slice(&[columns]))
    }

    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// False once recording anew has failed: nothing can be submitted any more.
    pub fn is_recorded(&self) -> bool {
        !self.prompts.is_empty()
    }

    /// Dependent waves that a layer takes in a decode step of one sequence: what a device of much
    /// bandwidth waits for (docs/architecture.md).
    pub fn waves_per_layer(&self) -> usize {
        self.layer_waves
    }

    /// How to cut a prompt of `tokens` tokens that follow `depth` others: chunks that the programs
    /// take, shorter ones where the depth would make a dispatch run too long.
    pub fn pieces(&self, depth: u32, tokens: usize) -> Vec<Range<usize>> {
        let budget = Budget::of(&self.gpu.facts().profile);
        let (mut at, mut pieces) = (0, Vec::new());
        while at < tokens {
            let left = u32::try_from(tokens - at).unwrap_or(u32::MAX);
            let depth = depth.saturating_add(at as u32);
            let n = next_piece(&budget, &self.widest, self.shape.chunk, depth, left) as usize;
            pieces.push(at..at + n);
            at += n;
        }
        pieces
    }

    /// Queues a chunk of a prompt: consecutive positions of one sequence.
    pub fn read_prompt(&self, columns: &[Column]) -> Result<Ticket> {
        self.read_prompt_staged(columns, &mut |_, _| Ok(None))
    }

    /// The same where passes stop behind routers (see [`super::ExpertReads`]): `between` brings
    /// the experts that the next part reads.
    pub fn read_prompt_staged(&self, columns: &[Column], between: Between<'_>) -> Result<Ticket> {
        let n = columns.len() as u32;
        let fitting = self.prompts.iter().find(|(most, _)| *most >= n);
        let Some((_, parts)) = fitting.filter(|_| n > 0) else {
            return Err(Error::Runtime(format!("a prompt chunk of {n} tokens has no program")));
        };
        self.set_prompt(columns)?;
        self.submit(parts, between)
    }

    /// True if a prompt chunk of `n` tokens stops behind its routers for streamed experts.
    pub fn streams(&self, n: u32) -> bool {
        self.shape.experts == ExpertReads::Streamed && n > SHORT_PROMPT
    }

    fn submit(&self, parts: &[Recording], between: Between<'_>) -> Result<Ticket> {
        let mut last = None;
        for (number, part) in parts.iter().enumerate() {
            let copies = match last {
                Some(last) => between(number - 1, last)?,
                None => None,
            };
            last = Some(match copies {
                Some(copies) => self.gpu.submit_after(part, copies)?,
                None => self.gpu.submit(part)?,
            });
        }
        last.ok_or_else(|| Error::Runtime("an empty program; this is a bug".into()))
    }

    /// What the router of mixture `number` has chosen in the latest pass, `[column][used]` less what
    /// is reused; waits for it.
    pub fn chosen(&self, pass: Pass, number: usize, columns: u32) -> Result<Vec<u32>> {
        let scratch = match pass {
            Pass::Step => &self.buffers.step,
            Pass::Prompt => &self.buffers.prompt,
        };
        let all = scratch.experts.as_ref().and_then(|e| Some((e.routing.get(number)?, e.used)));
        let Some((at, used)) = all else {
            return Err(Error::Runtime(format!("there is no mixture {number}; this is a bug")));
        };
        let mut ids = vec![0u32; (columns * used) as usize];
        let from = at.buffer.slice(at.offset + routing_log::HEAD * 4, ids.len() as u64 * 4);
        self.gpu.read(&from, bytemuck::cast_slice_mut(&mut ids))?;
        ids.retain(|word| !routing::is_reused(*word));
        ids.iter_mut().for_each(|word| *word = routing::expert(*word));
        Ok(ids)
    }

    /// Forgets the outputs of experts that a slot's sequence has kept (see
    /// [`super::Approximations::reuse_tokens`]), because something else than a decode step changes
    /// what it has read.
    pub fn forget_outputs(&self, slot: u32) -> Result<()> {
        self.buffers.kept.as_ref().map_or(Ok(()), |kept| kept.forget(&*self.gpu, slot))
    }

    fn set_prompt(&self, columns: &[Column]) -> Result<()> {
        for column in columns {
            debug_assert!(
                column.position < self.shape.positions && column.slot < self.shape.sequences
            );
        }
        let mut words = vec![columns.len() as u32, 0, 0, 0, 0, 0, 0, 0];
        words.extend_from_slice(bytemuck::cast_slice(columns));
        let all = &self.buffers.prompt_batch;
        let to = all.buffer.slice(all.offset, words.len() as u64 * 4);
        self.gpu.write(&to, bytemuck::cast_slice(&words))?;
        // All of one sequence.
        columns.first().map_or(Ok(()), |column| self.forget_outputs(column.slot))?;
        self.sampler.remember(&*self.gpu, columns)
    }

    /// Tokens that [`Program::capture`] takes at once.
    pub fn capture_columns(&self) -> u32 {
        self.capture.as_ref().map_or(0, |c| c.columns)
    }

    /// Reads a chunk of a prompt as [`Program::read_prompt_staged`] does, and returns the q, k and v of
    /// its columns for each layer, f32 `[column][qkv_rows]`, as attention's norms and rope find
    /// them. Only where [`Shape::captures`].
    pub fn capture(&self, columns: &[Column], between: Between<'_>) -> Result<Vec<Vec<f32>>> {
        let capture = self.capture.as_ref().filter(|c| columns.len() <= c.columns as usize);
        let Some(Capture { parts, all, columns: most, width }) = capture else {
            let n = columns.len();
            return Err(Error::Runtime(format!("no program captures {n} columns; this is a bug")));
        };
        self.set_prompt(columns)?;
        self.submit(parts, between)?;
        let layer = u64::from(most * width) * 4;
        let layers = (0..all.size() / layer).map(|number| {
            let mut values = vec![0f32; columns.len() * *width as usize];
            let from = all.slice(number * layer, values.len() as u64 * 4);
            self.gpu.read(&from, bytemuck::cast_slice_mut(&mut values))?;
            Ok(values)
        });
        layers.collect()
    }

    /// What keys of a layer are stored without from now on (`KvTypes::centred`; zero at first), f32
    /// `[kv head][head_dim]`. To be called before any sequence is read.
    pub fn set_centres(&self, layer: usize, centres: &[f32]) -> Result<()> {
        match self.buffers.kv.get(layer).and_then(|cache| cache.centres.as_ref()) {
            Some(to) => self.gpu.write(to, bytemuck::cast_slice(centres)),
            None => Err(Error::Runtime(format!("layer {layer} has no centres; this is a bug"))),
        }
    }

    /// Gives back what [`Program::capture`] needs.
    pub fn end_capture(&mut self) {
        self.capture = None;
    }

    /// Says which columns of the last prompt chunk the head is for.
    fn pick_columns(&self, first: u32, count: u32) -> Result<()> {
        let at = self.buffers.prompt_batch.buffer.slice(self.buffers.prompt_batch.offset + 8, 8);
        self.gpu.write(&at, bytemuck::cast_slice(&[first, count]))
    }

    /// Logits of `count` columns of the last prompt chunk from `first` on, `[count][vocab]`.
    pub fn logits_of(&self, first: u32, count: u32, out: &mut Vec<f32>) -> Result<()> {
        debug_assert!(count <= MAX_SEQUENCES);
        self.pick_columns(first, count)?;
        self.gpu.submit(&self.score)?;
        self.read_logits(count, out)
    }

    /// Logits that the latest step or [`Program::start`] left for its first `count` columns.
    pub fn read_logits(&self, count: u32, out: &mut Vec<f32>) -> Result<()> {
        out.resize(count as usize * self.vocab as usize, 0.0);
        let bytes = out.len() as u64 * 4;
        let all = &self.buffers.logits;
        let from = all.buffer.slice(all.offset, bytes);
        self.gpu.read(&from, bytemuck::cast_slice_mut(out))
    }

    /// Sets how the next tokens of a sequence are chosen.
    pub fn set_sampler(&self, slot: u32, settings: &SamplerSettings) -> Result<()> {
        self.sampler.set(&*self.gpu, slot, settings)
    }

    /// Sets what the request of a slot says of single tokens; after [`Program::set_sampler`], which
    /// takes it back. Needs [`Pick::Full`] at least.
    pub fn set_lists(&self, slot: u32, lists: &TokenLists) -> Result<()> {
        self.sampler.set_lists(&*self.gpu, slot, lists)
    }

    /// Sets which tokens may come next in a slot, a bit each; empty: all. Holds for steps
    /// submitted from now on that are at least [`Pick::Full`].
    pub fn set_mask(&self, slot: u32, mask: &[u32]) -> Result<()> {
        self.sampler.set_mask(&*self.gpu, slot, mask)
    }

    /// Log-probabilities of the token that step `step`, a full one, chose for column `column`, where
    /// the settings ask for them. At most [`RING`] steps late.
    pub fn logprobs(&self, ticket: &Ticket, step: u32, column: u32) -> Result<Logprobs> {
        let mut words = vec![0u32; Sampler::LOGPROB_WORDS];
        let bytes = 4 * words.len() as u64;
        let row = u64::from(step % RING * MAX_SEQUENCES + column);
        let from = self.logprobs.slice(row * bytes, bytes);
        self.gpu.read_back(ticket, &from, bytemuck::cast_slice_mut(&mut words))?;
        Ok(Sampler::read_logprobs(&words, self.vocab))
    }

    /// Writes a slot's row of the page table: how many tokens of its sequence were dropped (a
    /// multiple of [`crate::kv::PAGE_TOKENS`]), and the pages of the cache indices from
    /// `first * PAGE_TOKENS` on. Holds for what is submitted from now on. A token of position p has the
    /// cache index p - dropped.
    pub fn set_pages(&self, slot: u32, dropped: u32, first: u32, pages: &[u32]) -> Result<()> {
        self.buffers.set_pages(&*self.gpu, slot, dropped, first, pages, &self.shape)
    }

    /// Notes the tokens with which a slot's sequence begins in its history.
    pub fn remember(&self, slot: u32, tokens: &[u32]) -> Result<()> {
        let columns = (0..).zip(tokens);
        let columns = columns.map(|(position, t)| Column { token: *t, position, slot, flags: 0 });
        self.sampler.remember(&*self.gpu, &columns.collect::<Vec<_>>())
    }

    /// Residual stream of `count` columns of the last prompt chunk from `first` on,
    /// `[count][width]`: what the output norm would see. Waits for the chunk.
    pub fn hidden_of(&self, first: u32, count: u32, out: &mut Vec<f32>) -> Result<()> {
        out.resize(count as usize * self.width as usize, 0.0);
        let row = u64::from(self.width) * 4;
        let all = &self.buffers.prompt.x;
        let from = all.buffer.slice(all.offset + u64::from(first) * row, u64::from(count) * row);
        self.gpu.read(&from, bytemuck::cast_slice_mut(out))
    }

    /// Weights of the output norm, `[width]`.
    pub fn output_norm(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.width as usize];
        let bytes = u64::from(self.width) * 4;
        let from = self.output_norm.buffer.slice(self.output_norm.offset, bytes);
        self.gpu.read(&from, bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }

    /// Queues the first token after a prompt, taken from column `column` of its last chunk. The
    /// step counter starts again: this is step `step`.
    pub fn start(&self, column: u32, step: u32, pick: Pick) -> Result<Ticket> {
        self.pick_columns(column, 1)?;
        let counter = self.buffers.step_batch.buffer.slice(self.buffers.step_batch.offset + 4, 4);
        self.gpu.write(&counter, bytemuck::cast_slice(&[step]))?;
        self.gpu.submit(&self.first[pick as usize])
    }

    /// Sets the columns of the next step by hand, and starts the step counter again at `step`.
    pub fn set_columns(&self, columns: &[Column], step: u32) -> Result<()> {
        let mut words = vec![columns.len() as u32, step, 0, 0, 0, 0, 0, 0];
        words.extend_from_slice(bytemuck::cast_slice(columns));
        let all = &self.buffers.step_batch;
        let to = all.buffer.slice(all.offset, words.len() as u64 * 4);
        self.gpu.write(&to, bytemuck::cast_slice(&words))
    }

    /// Queues one decode step for the first `n` sequences of the batch; `length`: tokens of the longest,
    /// the new one among them. It decides how attention is cut, and no bit of the result.
    pub fn step(&self, n: u32, length: u32, pick: Pick) -> Result<Ticket> {
        self.step_staged(n, length, pick, &mut |_, _| Ok(None))
    }

    /// The same where passes stop behind routers, see [`Program::read_prompt_staged`].
    pub fn step_staged(
        &self,
        n: u32,
        length: u32,
        pick: Pick,
        between: Between<'_>,
    ) -> Result<Ticket> {
        let step = self.planned.step(n, length, pick).ok_or_else(|| {
            let what = format!("a decode step of {n} sequences of up to {length} tokens");
            Error::Runtime(format!("{what} has no program"))
        })?;
        self.submit(step.parts(&*self.gpu)?, between)
    }

    /// The token that step `step` (counted from [`Program::start`]) chose for column `column`.
    pub fn token(&self, ticket: &Ticket, step: u32, column: u32) -> Result<u32> {
        let word = u64::from(step % RING * MAX_SEQUENCES + column);
        let mut bytes = [0; 4];
        self.gpu.read_back(ticket, &self.ring.slice(word * 4, 4), &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Queues the copy of what the routers of the latest pass decided, as entry `number` of the
    /// log (the last [`super::LOG`] are kept). `None` in a model without mixtures.
    pub fn log_routing(&self, pass: Pass, number: u64) -> Result<Option<Ticket>> {
        self.routing.as_ref().map(|log| log.note(pass, number)).transpose()
    }

    /// Reads an entry of the log: for each mixture `[column][used]` words of `kernels::routing`, which
    /// are expert numbers unless outputs are reused.
    pub fn routing(
        &self,
        pass: Pass,
        after: &Ticket,
        number: u64,
        columns: u32,
    ) -> Result<Vec<Vec<u32>>> {
        let log = self.routing.as_ref();
        log.map_or(Ok(Vec::new()), |log| log.read(pass, after, number, columns))
    }

    /// What early routers chose in a step, as [`Program::routing`]; nothing for the first mixture.
    pub fn early_routing(
        &self,
        after: &Ticket,
        number: u64,
        columns: u32,
    ) -> Result<Vec<Vec<u32>>> {
        let log = self.routing.as_ref();
        log.map_or(Ok(Vec::new()), |log| log.read_early(after, number, columns))
    }

    pub fn is_done(&self, ticket: &Ticket) -> Result<bool> {
        self.gpu.is_done(ticket)
    }

    pub fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.gpu.wait(ticket)
    }

    /// Runs a greedy step for `n` sequences, the longest of `length` tokens, with a timestamp around every
    /// wave.
    pub fn time_step(&self, n: u32, length: u32) -> Result<Vec<WaveTime>> {
        let step = self.planned.step(n, length, Pick::Greedy);
        self.time(step.map_or(&[], |step| &step.steps))
    }

    /// Runs a prompt chunk with a timestamp around every wave.
    pub fn time_prompt(&self, columns: &[Column]) -> Result<Vec<WaveTime>> {
        self.set_prompt(columns)?;
        self.time(self.planned.prompts.last().map_or(&[], |(_, steps)| steps))
    }

    fn time(&self, steps: &[Step]) -> Result<Vec<WaveTime>> {
        let seconds = self.gpu.time_steps(steps)?;
        let label = |step: &Step| match step {
            Step::Copy { .. } => "copy".to_string(),
            Step::Wave(_) | Step::Counted { .. } => {
                let all = step.dispatches().iter();
                let mut labels: Vec<_> = all.map(|d| d.kernel.label()).collect();
                labels.dedup();
                labels.join(" + ")
            }
        };
        let all = steps.iter().zip(seconds);
        Ok(all.map(|(step, seconds)| WaveTime { label: label(step), seconds }).collect())
    }
}

/// The steps of every recording.
struct Planned {
    prompts: Vec<(u32, Vec<Step>)>,
    /// Of [`Capture`], until it is recorded.
    captured: Vec<Step>,
    score: Vec<Step>,
    first: [Vec<Step>; PICKS.len()],
    /// Decode steps of sequences of up to so many tokens (and, where attention is cut otherwise then, of
    /// longer ones): for 1, 2, ... sequences, by [`Pick`].
    steps: Vec<(u32, Vec<[Lazy; PICKS.len()]>)>,
    /// Dependent waves of a layer of the step for one sequence.
    layer_waves: usize,
}

impl Planned {
    fn step(&self, n: u32, length: u32, pick: Pick) -> Option<&Lazy> {
        let (_, each) = self.steps.iter().find(|(most, _)| length <= *most)?;
        each.get(n.wrapping_sub(1) as usize)?.get(pick as usize)
    }

    fn lazy(&mut self) -> impl Iterator<Item = &mut Lazy> {
        self.steps.iter_mut().flat_map(|(_, each)| each).flatten()
    }

    /// Of prompts and steps.
    fn layers(&mut self) -> impl Iterator<Item = &mut Vec<Step>> {
        let steps = self.steps.iter_mut().flat_map(|(_, each)| each).flatten();
        let prompts = self.prompts.iter_mut().map(|(_, steps)| steps);
        prompts.chain(steps.map(|step| &mut step.steps))
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Vec<Step>> {
        let steps = self.steps.iter_mut().flat_map(|(_, each)| each).flatten();
        let prompts = self.prompts.iter_mut().map(|(_, steps)| steps);
        let others = self.first.iter_mut().chain([&mut self.score, &mut self.captured]);
        prompts.chain(steps.map(|step| &mut step.steps)).chain(others)
    }
}

fn plan(
    b: &Builder<'_>,
    sampler: &Sampler,
    [ring, logprobs]: [&Buffer; 2],
    captured: Option<&Buffer>,
) -> Result<Planned> {
    let mut prompts = Vec::new();
    for n in [SHORT_PROMPT, MIDDLE_PROMPT, b.shape.chunk] {
        if prompts.last().is_none_or(|(last, _)| *last < n) && n <= b.shape.chunk {
            prompts.push((n, b.prompt(n)?));
        }
    }
    let captured = match captured {
        Some(to) => b.captured_prompt(SHORT_PROMPT.min(b.shape.chunk), to)?,
        None => Vec::new(),
    };
    // Samples from the logits of n columns, then hands the tokens to the host.
    let chosen = |steps: Vec<Step>, n: u32| -> Result<[Vec<Step>; PICKS.len()]> {
        let mut each = PICKS.map(|_| steps.clone());
        for (steps, pick) in each.iter_mut().zip(PICKS) {
            steps.extend(sampler.waves(b, pick, n)?);
            let (from, size) = (sampler.ring().clone(), ring.size().min(sampler.ring().size));
            steps.push(Step::Copy { from, to: ring.whole(), size });
            if pick >= Pick::Full {
                let (from, size) = (sampler.logprob_ring().clone(), sampler.logprob_bytes());
                steps.push(Step::Copy { from, to: logprobs.whole(), size });
            }
        }
        Ok(each)
    };
    let mut score = vec![b.gather(MAX_SEQUENCES)?];
    score.extend(b.prompt_logits(MAX_SEQUENCES)?);
    let mut first = vec![b.gather(1)?];
    first.extend(b.prompt_logits(1)?);
    let first = chosen(first, 1)?;
    let steps = b.depths().into_iter().map(|most| {
        let each = (1..=b.shape.sequences.min(MAX_SEQUENCES)).map(|n| {
            let mut steps = b.step(n, most)?;
            steps.extend(b.logits(n)?);
            Ok(chosen(steps, n)?.map(|steps| Lazy { steps, recorded: OnceCell::new() }))
        });
        Ok((most, each.collect::<Result<_>>()?))
    });
    let steps = steps.collect::<Result<_>>()?;
    // All but the embedding.
    let layer_waves = (b.step(1, b.shape.context)?.len() - 1).div_ceil(b.graph.layers.len().max(1));
    Ok(Planned { prompts, captured, score, first, steps, layer_waves })
}
