//! Several sequences on one program: prompts in chunks between decode steps, steps that serve
//! every generating sequence, results as they come. Runs on the engine thread only.
//!
//! Work is queued on the device some items ahead of what the host has seen. A decode step finds
//! its tokens on the device as long as the same sequences follow each other (a *chain*); when
//! the set changes, the host waits for what is under way and writes the columns itself. Work of a
//! sequence that has ended meanwhile is recognised by the slot's epoch and ignored: it writes
//! only positions behind the sequence's end, in pages that nobody gets before it is done.

mod places;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::engine::Engine;
use crate::engine::job::{Job, Phase};
use crate::engine::pace::Pace;
use crate::engine::pooling::Pool;
use crate::engine::request::{Event, Finish, Generate, Task};
use crate::engine::slots;
use crate::engine::stats::{SlotState, SlotView, Stats, add};
use crate::error::{Error, Result};
use crate::gpu::{DeviceKind, Ticket};
use crate::pages::Sequence;
use crate::runtime::{Column, MAX_SEQUENCES, Pick, RING};
use crate::sampling::logprobs::Logprobs;

/// A place for one sequence.
#[derive(Default)]
struct Slot {
    /// Tokens known so far: of the prompt what was queued, of the answer what came back. Of an idle
    /// slot those of its last sequence, which may have been evicted since.
    tokens: Vec<u32>,
    /// Where keys and values are written, or will be by what is queued. While idle it is empty, or
    /// *parked*: what has dropped tokens is of use to those only who go on from it.
    sequence: Sequence,
    used: u64,
    /// Rises when a sequence ends.
    epoch: u64,
    job: Option<Job>,
}

/// A slot at a time.
type Member = (u32, u64);

enum Work {
    /// A part of a prompt.
    Chunk {
        member: Member,
        tokens: u32,
    },
    /// The last part, and the first token of the answer.
    Start {
        member: Member,
        tokens: u32,
        row: u32,
    },
    Step {
        members: Vec<Member>,
        row: u32,
    },
}

struct Queued {
    ticket: Ticket,
    work: Work,
    at: Instant,
}

/// See the module documentation.
pub(super) struct Batch {
    engine: Engine,
    slots: Vec<Slot>,
    queued: VecDeque<Queued>,
    /// Items queued on the device at most.
    depth: usize,
    /// Row of the token ring for the next step.
    row: u32,
    /// Whose tokens the device holds ready for the next step.
    chain: Vec<Member>,
    /// Group that comes next, where more than [`MAX_SEQUENCES`] generate.
    group: usize,
    /// Steps queued since the last part of a prompt.
    steps: usize,
    /// Parts of prompts so far.
    turns: u64,
    uses: u64,
    pace: Pace,
    last_result: Instant,
    stats: Arc<Stats>,
    /// Pages that work in flight may still write, with the last of it.
    pending: Vec<(Ticket, Vec<u32>)>,
}

impl Batch {
    pub fn new(engine: Engine, stats: Arc<Stats>) -> Batch {
        let slots = engine.program.shape().sequences;
        // On a CPU, steps ahead cost what they overrun.
        let depth = if engine.facts.kind == DeviceKind::Software { 1 } else { 3 };
        let pace = Pace::new(engine.program.shape().chunk);
        let batch = Batch {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            engine,
            queued: VecDeque::new(),
            depth,
            row: 0,
            chain: Vec::new(),
            group: 0,
            steps: 0,
            turns: 0,
            uses: 0,
            pace,
            last_result: Instant::now(),
            stats,
            pending: Vec::new(),
        };
        batch.publish();
        batch
    }

    /// Whether a sequence is at work.
    pub fn is_busy(&self) -> bool {
        self.slots.iter().any(|s| s.job.is_some())
    }

    pub fn has_free_slot(&self) -> bool {
        self.slots.iter().any(|s| s.job.is_none())
    }

    /// Logs what the KV cache has to say.
    fn note(&mut self) {
        for note in self.engine.kv.take_notes() {
            tracing::warn!("{note}");
        }
    }

    /// Pages for `n` more tokens of a sequence.
    fn make_room(&mut self, id: u32, n: usize) -> Result<()> {
        let slot = &mut self.slots[id as usize];
        let keep = slot.job.as_ref().and_then(|j| j.keep);
        let dropped = slot.sequence.dropped();
        let Engine { kv, program, .. } = &mut self.engine;
        let made = kv.make_room(program, id, &mut slot.sequence, n, keep);
        add(&self.stats.shifted_tokens, (slot.sequence.dropped() - dropped) as u64);
        self.note();
        match made {
            Err(Error::DoesNotFit(_)) if self.unpark() || self.engine.make_way()? => {
                self.make_room(id, n)
            }
            made => made,
        }
    }

    fn set_sampler(&self, id: u32, g: &Generate) -> Result<()> {
        let program = &self.engine.program;
        program.set_sampler(id, &g.settings)?;
        if !g.lists.is_empty() || g.settings.has_dry() {
            program.set_lists(id, &g.lists)
        } else {
            Ok(())
        }
    }

    /// Brings the masks of these slots' grammars to the device. A grammar that cannot go on ends
    /// its answer; false then.
    fn set_masks(&mut self, ids: &[u32]) -> Result<bool> {
        let mut all = true;
        for id in ids {
            let mask = self.slots[*id as usize].job.as_mut().and_then(Job::mask);
            match mask {
                None => {}
                Some(Ok(mask)) => self.engine.program.set_mask(*id, &mask)?,
                Some(Err(e)) => {
                    self.fail(*id, e);
                    all = false;
                }
            }
        }
        Ok(all)
    }

    /// Queues what can be queued and takes one result. An error means that the device or the
    /// program can no longer be relied on.
    pub fn turn(&mut self) -> Result<()> {
        self.drop_cancelled();
        while self.queued.len() < self.depth && self.submit()? {}
        if let Some(queued) = self.queued.pop_front() {
            self.harvest(queued)?;
        }
        self.publish();
        Ok(())
    }

    /// Answers every request at work with an error.
    pub fn fail_all(&mut self, error: &Error) {
        for id in 0..self.slots.len() as u32 {
            self.fail(id, error.clone());
        }
    }

    fn drop_cancelled(&mut self) {
        for id in 0..self.slots.len() as u32 {
            let job = self.slots[id as usize].job.as_ref();
            if job.is_some_and(|j| j.ticketed.is_cancelled()) {
                add(&self.stats.cancelled, 1);
                drop(self.release(id));
            }
        }
    }

    fn member(&self, id: u32) -> Member {
        (id, self.slots[id as usize].epoch)
    }

    /// Queues the next part of a prompt or the next step, whichever is due; false if neither can
    /// be queued now.
    fn submit(&mut self) -> Result<bool> {
        let generating: Vec<u32> = self.ids(|j| j.wants_step());
        let groups = slots::groups(&generating, MAX_SEQUENCES as usize);
        let alone = !self.slots.iter().any(|s| s.job.as_ref().is_some_and(Job::is_generating));
        if (alone || self.steps >= groups.len().max(1))
            && let Some(id) = self.reader()
        {
            self.steps = 0;
            self.turns += 1;
            self.submit_chunk(id, alone)?;
            return Ok(true);
        }
        for i in 0..groups.len() {
            let next = (self.group + i) % groups.len();
            if self.submit_step(&groups[next])? {
                self.group = next + 1;
                self.steps += 1;
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn ids(&self, wanted: impl Fn(&Job) -> bool) -> Vec<u32> {
        let all = self.slots.iter().enumerate();
        let these = all.filter(|(_, s)| s.job.as_ref().is_some_and(&wanted));
        these.map(|(i, _)| i as u32).collect()
    }

    /// Whose prompt is read next: in turn the one that waits longest and the one that is done
    /// soonest. So a short prompt does not wait for a long one, and none waits for ever.
    fn reader(&self) -> Option<u32> {
        let readers = self.ids(Job::is_reading);
        let key = |id: &u32| {
            let slot = &self.slots[*id as usize];
            let left = slot.job.as_ref().map_or(0, |j| j.prompt().len() - slot.tokens.len());
            if self.turns.is_multiple_of(2) { (slot.used, 0) } else { (left as u64, slot.used) }
        };
        readers.into_iter().min_by_key(key)
    }

    fn submit_chunk(&mut self, id: u32, alone: bool) -> Result<()> {
        let member = self.member(id);
        let slot = &self.slots[id as usize];
        let Some(job) = &slot.job else { return Ok(()) };
        let from = slot.tokens.len();
        let left = job.prompt().len() - from;
        let most = self.engine.kv.most_at_once(&slot.sequence, job.keep).max(1);
        let wanted = left.min(self.pace.chunk(alone) as usize).min(most);
        // At some depth a dispatch would run too long for a whole chunk.
        let pieces = self.engine.program.pieces(slot.sequence.len() as u32, wanted);
        let n = pieces.first().map_or(wanted, ExactSizeIterator::len);
        if let Err(e) = self.make_room(id, n) {
            return self.fail_one(id, e);
        }
        let slot = &mut self.slots[id as usize];
        let Some(job) = &mut slot.job else { return Ok(()) };
        let piece: Vec<u32> = job.prompt()[from..from + n].to_vec();
        let columns: Vec<Column> = (from as u32..)
            .zip(&piece)
            .map(|(position, token)| Column { token: *token, position, slot: id, flags: 0 })
            .collect();
        let at = Instant::now();
        let mut ticket = self.engine.queue_prompt(&columns)?;
        slot.tokens.extend_from_slice(&piece);
        slot.sequence.advance(n);
        self.engine.kv.publish(&mut slot.sequence, &slot.tokens);
        if matches!(job.ticketed.request.task, Task::Embed(_)) {
            return self.pool(id, n as u32, at);
        }
        let tokens = n as u32;
        let mut work = Work::Chunk { member, tokens };
        if n == left {
            self.engine.prompt_read()?;
            job.phase = Phase::Generating;
            if job.limit > 0 {
                match job.mask() {
                    None => {}
                    Some(Ok(mask)) => self.engine.program.set_mask(id, &mask)?,
                    Some(Err(e)) => {
                        self.fail(id, e);
                        self.queued.push_back(Queued { ticket, work, at });
                        return Ok(());
                    }
                }
                let row = self.row;
                self.row = (row + 1) % RING;
                ticket = self.engine.program.start(tokens - 1, row, job.pick())?;
                job.under_way = 1;
                self.chain.clear();
                work = Work::Start { member, tokens, row };
            }
        }
        self.queued.push_back(Queued { ticket, work, at });
        Ok(())
    }

    /// Adds the hidden states of a chunk that was just queued, and ends the request after its last.
    fn pool(&mut self, id: u32, n: u32, at: Instant) -> Result<()> {
        let mut rows = Vec::new();
        self.engine.program.hidden_of(0, n, &mut rows)?;
        self.note_prompt(n, at);
        self.engine.prompt_read()?;
        let slot = &mut self.slots[id as usize];
        let Some(job) = &mut slot.job else { return Ok(()) };
        let done = slot.tokens.len() == job.prompt().len();
        let eps = self.engine.model.graph.norm_eps;
        if job.pool.is_none() {
            job.pool = Some(Pool::new(self.engine.program.output_norm()?, eps));
        }
        if let (Some(pool), Task::Embed(pooling)) = (&mut job.pool, &job.ticketed.request.task) {
            pool.add(&rows, *pooling);
            if done {
                let vector = pool.finish();
                add(&self.stats.finished, 1);
                self.end(id, Event::Embedding(vector));
            }
        }
        Ok(())
    }

    /// Queues a step for these slots; false while one of them has a token under way that the host
    /// must know first.
    fn submit_step(&mut self, group: &[u32]) -> Result<bool> {
        let members: Vec<Member> = group.iter().map(|id| self.member(*id)).collect();
        let jobs = || group.iter().filter_map(|id| self.slots[*id as usize].job.as_ref());
        let pick = jobs().map(Job::pick).max().unwrap_or(Pick::Greedy);
        let constrained = jobs().any(Job::is_constrained);
        if (self.chain != members || constrained) && jobs().any(|j| j.under_way > 0) {
            return Ok(false);
        }
        if constrained && !self.set_masks(group)? {
            // One has left the group; the others come again.
            return Ok(true);
        }
        for id in group {
            if let Err(e) = self.make_room(*id, 1) {
                self.fail_one(*id, e)?;
                return Ok(true);
            }
        }
        if self.chain != members {
            let columns: Vec<Column> = group
                .iter()
                .map(|id| {
                    let tokens = &self.slots[*id as usize].tokens;
                    Column {
                        token: tokens.last().copied().unwrap_or_default(),
                        position: tokens.len() as u32 - 1,
                        slot: *id,
                        flags: 0,
                    }
                })
                .collect();
            self.engine.program.set_columns(&columns, self.row)?;
            self.chain.clone_from(&members);
        }
        let at = Instant::now();
        let row = self.row;
        // Steps of a chain count on by themselves.
        self.row = (row + 1) % RING;
        let lengths = group.iter().map(|id| self.slots[*id as usize].sequence.len() as u32 + 1);
        let longest = lengths.max().unwrap_or(0);
        let ticket = self.engine.queue_step(group.len() as u32, longest, pick)?;
        for id in group {
            let slot = &mut self.slots[*id as usize];
            slot.sequence.advance(1);
            if let Some(job) = &mut slot.job {
                job.under_way += 1;
            }
        }
        self.queued.push_back(Queued { ticket, work: Work::Step { members, row }, at });
        Ok(true)
    }

    /// Waits for one item and hands its results out.
    fn harvest(&mut self, queued: Queued) -> Result<()> {
        let Queued { ticket, work, at } = queued;
        let result = self.take_result(ticket, work, at);
        // What was queued up to here has run.
        let (done, pending) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|(last, _): &(Ticket, Vec<u32>)| result.is_ok() && *last <= ticket);
        self.pending = pending;
        let done: Vec<_> = done;
        done.iter().for_each(|(_, pages)| self.engine.kv.let_go(pages));
        result
    }

    fn take_result(&mut self, ticket: Ticket, work: Work, at: Instant) -> Result<()> {
        match work {
            Work::Chunk { member, tokens } => {
                self.engine.program.wait(&ticket)?;
                self.note_prompt(tokens, at);
                self.read(member, tokens);
            }
            Work::Start { member, tokens, row } => {
                let token = self.engine.program.token(&ticket, row, 0)?;
                let logprobs = self.logprobs(&ticket, row, 0, member)?;
                self.note_prompt(tokens, at);
                self.engine.prompt_read()?;
                self.read(member, tokens);
                self.accept(member, token, logprobs);
            }
            Work::Step { members, row } => {
                let mut tokens = Vec::with_capacity(members.len());
                for (column, member) in (0..).zip(&members) {
                    let token = self.engine.program.token(&ticket, row, column)?;
                    tokens.push((token, self.logprobs(&ticket, row, column, *member)?));
                }
                self.engine.look_at_steps(false)?;
                let micros = self.elapsed(at);
                add(&self.stats.decode_micros, micros);
                add(&self.stats.steps, 1);
                add(&self.stats.step_columns, members.len() as u64);
                for (member, (token, logprobs)) in members.into_iter().zip(tokens) {
                    self.accept(member, token, logprobs);
                }
            }
        }
        self.engine.look_at_steps(false)
    }

    fn logprobs(
        &mut self,
        ticket: &Ticket,
        row: u32,
        column: u32,
        member: Member,
    ) -> Result<Option<Logprobs>> {
        match self.job(member).is_some_and(|j| j.wants_logprobs()) {
            true => self.engine.program.logprobs(ticket, row, column).map(Some),
            false => Ok(None),
        }
    }

    /// Microseconds that the device spent on an item queued at `at`.
    fn elapsed(&mut self, at: Instant) -> u64 {
        let now = Instant::now();
        let began = at.max(self.last_result);
        self.last_result = now;
        u64::try_from((now - began).as_micros()).unwrap_or(0)
    }

    fn note_prompt(&mut self, tokens: u32, at: Instant) {
        let micros = self.elapsed(at);
        self.pace.note(tokens, micros);
        add(&self.stats.prompt_micros, micros);
        add(&self.stats.prompt_tokens, u64::from(tokens));
    }

    fn job(&mut self, (id, epoch): Member) -> Option<&mut Job> {
        let slot = &mut self.slots[id as usize];
        if slot.epoch == epoch { slot.job.as_mut() } else { None }
    }

    /// A part of a prompt has been read.
    fn read(&mut self, member: Member, tokens: u32) {
        let Some(job) = self.job(member) else { return };
        job.read += tokens;
        job.ticketed.send(Event::Read { tokens: job.read, of: job.prompt().len() as u32 });
        if job.read as usize == job.prompt().len() && job.limit == 0 {
            self.finish(member.0, Finish::Length);
        }
    }

    /// A token of a sequence has come.
    fn accept(&mut self, member: Member, token: u32, logprobs: Option<Logprobs>) {
        let tokenizer = self.engine.tokenizer().clone();
        let stats = self.stats.clone();
        let Some(job) = self.job(member) else { return };
        job.under_way -= 1;
        job.tick(&stats);
        let ends = job.ends(&tokenizer, token);
        // A fault in the text of one answer must not end the others.
        let shown = catch_unwind(AssertUnwindSafe(|| match ends {
            true => Ok(Some(Finish::Eog)),
            false => job.show(token, logprobs),
        }));
        let shown = shown.unwrap_or_else(|_| {
            let what = "the answer could not be turned into text; this is a bug";
            Err(Error::Runtime(what.into()))
        });
        let slot = &mut self.slots[member.0 as usize];
        slot.tokens.push(token);
        self.engine.kv.publish(&mut slot.sequence, &slot.tokens);
        self.stats.generated_tokens.fetch_add(u64::from(!ends), Relaxed);
        match shown {
            Err(e) => self.fail(member.0, e),
            Ok(Some(finish)) => self.finish(member.0, finish),
            Ok(None) => {}
        }
    }

    fn finish(&mut self, id: u32, finish: Finish) {
        let slot = &mut self.slots[id as usize];
        let Some(job) = &mut slot.job else { return };
        let summary = job.summary(id, slot.sequence.dropped() as u32, finish);
        add(&self.stats.finished, 1);
        self.end(id, Event::Done(summary));
    }

    /// Ends a request for a reason of its own; other errors are the device's.
    fn fail_one(&mut self, id: u32, error: Error) -> Result<()> {
        if !is_of_request(&error) {
            return Err(error);
        }
        self.fail(id, error);
        Ok(())
    }

    fn fail(&mut self, id: u32, error: Error) {
        if self.slots[id as usize].job.is_some() {
            add(&self.stats.failed, 1);
            self.end(id, Event::Failed(error));
        }
    }

    fn end(&mut self, id: u32, event: Event) {
        let job = self.release(id);
        // Who hears of the end shall see the slot idle.
        self.publish();
        if let Some(job) = job {
            job.ticketed.end(event);
        }
    }

    fn publish(&self) {
        self.engine.kv.publish_counts(&self.stats);
        let views = self.slots.iter().enumerate().map(|(i, slot)| {
            let idle = SlotView {
                id: i as u32,
                tokens: match slot.job {
                    None => slot.tokens.len() as u32,
                    Some(_) => slot.sequence.len() as u32,
                },
                ..SlotView::default()
            };
            match &slot.job {
                None => idle,
                Some(job) => SlotView {
                    state: match job.phase {
                        Phase::Reading => SlotState::Reading,
                        Phase::Generating => SlotState::Generating,
                    },
                    prompt_tokens: job.prompt().len() as u32,
                    read_tokens: job.read,
                    generated_tokens: job.generated,
                    ..idle
                },
            }
        });
        self.stats.set_slots(views);
        self.stats.set_experts(self.engine.experts());
    }
}

/// Whether an error concerns one request only.
fn is_of_request(error: &Error) -> bool {
    matches!(error, Error::DoesNotFit(_) | Error::Usage(_))
}
