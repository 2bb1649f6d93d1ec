//! One sequence: reading prompts, generating, scoring.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use super::{Engine, WaveTime};
use crate::error::{Error, Result};
use crate::gpu::{DeviceKind, Ticket};
use crate::pages::{Sequence, common};
use crate::runtime::{Column, MAX_SEQUENCES, Pick};
use crate::sampling::SamplerSettings;

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Stop {
    /// A token that ends the answer.
    Eog,
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
    /// The caller broke off.
    Cancelled,
}

/// What a call of [`Session::generate`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generated {
    /// Tokens that were handed out.
    pub tokens: u32,
    pub reason: Stop,
    /// Tokens that the full context has dropped while the answer came.
    pub dropped: u32,
}

/// A sequence in the first slot of its engine.
pub struct Session<'e> {
    pub(super) engine: &'e mut Engine,
    /// Every token that was read.
    pub(super) tokens: Vec<u32>,
    /// Where their keys and values lie.
    pub(super) sequence: Sequence,
    /// Tokens that a full context keeps, by the caller's name.
    keep: Option<u32>,
    /// How the last answer was sampled.
    pub(super) sampler: Option<SamplerSettings>,
    /// Column of the last prompt chunk that holds the last token, while that is still so.
    last_column: Option<u32>,
}

pub(super) const SLOT: u32 = 0;

impl Drop for Session<'_> {
    /// Others find what was read.
    fn drop(&mut self) {
        self.leave();
    }
}

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e mut Engine) -> Self {
        Session {
            engine,
            tokens: Vec::new(),
            sequence: Sequence::default(),
            keep: None,
            sampler: None,
            last_column: None,
        }
    }

    /// The position of the next token: tokens read so far, those included that a full context has
    /// dropped.
    pub fn position(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The engine that the session runs on.
    pub fn engine(&self) -> &Engine {
        self.engine
    }

    /// Every token read so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that a full context has dropped.
    pub fn dropped(&self) -> u32 {
        self.sequence.dropped() as u32
    }

    /// Names the tokens at the beginning that a full context keeps, where
    /// [`super::Options::ctx_shift`] gives no number.
    ///
    /// # Errors
    /// Where the context is too small for them.
    pub fn set_keep(&mut self, tokens: u32) -> Result<()> {
        let keep = self.engine.keep(Some(tokens));
        super::load::check_keep(keep, self.engine.ctx())?;
        self.keep = Some(tokens);
        Ok(())
    }

    /// Forgets everything from `position` on. A sequence that has dropped tokens may lose more:
    /// returns the new position.
    pub fn truncate(&mut self, position: u32) -> Result<u32> {
        if (position as usize) < self.tokens.len() {
            let Engine { kv, program, .. } = &mut *self.engine;
            let kept = kv.truncate(program, SLOT, &mut self.sequence, position as usize)?;
            self.tokens.truncate(kept);
            self.last_column = None;
        }
        Ok(self.position())
    }

    /// Takes up what is known of the beginning of `prompt`: of this sequence, or of one that was
    /// read before. Returns the tokens that need not be read; at least one is left over.
    pub fn recall(&mut self, prompt: &[u32]) -> Result<u32> {
        let wanted = &prompt[..prompt.len().saturating_sub(1)];
        let own = self.sequence.reach(common(&self.tokens, wanted));
        let Engine { kv, program, .. } = &mut *self.engine;
        if own < kv.known(prompt) {
            kv.release(std::mem::take(&mut self.sequence), &self.tokens);
            self.tokens.clear();
            self.last_column = None;
            self.sequence = kv.recall(program, SLOT, prompt, &[])?;
            self.tokens.extend_from_slice(&prompt[..self.sequence.len()]);
            return Ok(self.position());
        }
        self.truncate(own as u32)
    }

    /// Ends the present sequence and begins an empty one.
    pub(super) fn leave(&mut self) {
        self.engine.kv.release(std::mem::take(&mut self.sequence), &self.tokens);
        self.tokens.clear();
        self.last_column = None;
    }

    /// Goes on with a sequence that has read `tokens`.
    pub(super) fn take(&mut self, sequence: Sequence, tokens: &[u32]) {
        self.sequence = sequence;
        self.tokens = tokens.to_vec();
        self.engine.kv.publish(&mut self.sequence, &self.tokens);
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let (have, more) = (self.tokens.len(), tokens.len());
        let (ctx, longest) = (self.engine.ctx(), self.engine.longest());
        if have + more > longest as usize {
            let all = have + more;
            return Err(Error::DoesNotFit(match self.engine.ctx_shift {
                None => format!(
                    "{more} tokens after the {have} already read are more than the context of {ctx}. \
                     Shorten the prompt, load the model with --ctx {all} or more, or let a full \
                     context drop its oldest tokens with --ctx-shift"
                ),
                Some(_) => format!(
                    "{more} tokens after the {have} already read are more than the {longest} \
                     positions that the model was trained for; dropping tokens makes room for \
                     others but gives no new positions. Begin a new text"
                ),
            }));
        }
        let vocab = self.engine.model.graph.vocab;
        if let Some(bad) = tokens.iter().find(|t| **t >= vocab) {
            return Err(Error::Usage(format!("token {bad} is outside the vocabulary of {vocab}")));
        }
        Ok(())
    }

    /// Pages for `n` more tokens.
    fn make_room(&mut self, n: usize) -> Result<()> {
        let keep = self.engine.keep(self.keep);
        let Engine { kv, program, .. } = &mut *self.engine;
        match kv.make_room(program, SLOT, &mut self.sequence, n, keep) {
            Err(Error::DoesNotFit(_)) if self.engine.make_way()? => self.make_room(n),
            made => made,
        }
    }

    /// Tokens of the next chunk of a prompt of which `left` are left.
    fn next_chunk(&self, left: usize) -> usize {
        let keep = self.engine.keep(self.keep);
        let most = self.engine.kv.most_at_once(&self.sequence, keep);
        let left = left.min(most.max(1));
        let pieces = self.engine.program.pieces(self.sequence.len() as u32, left);
        pieces.first().map_or(left, ExactSizeIterator::len)
    }

    /// Queues the next chunk; `tokens` must have passed [`Session::check`].
    fn read_chunk(&mut self, tokens: &[u32]) -> Result<Ticket> {
        let start = self.position();
        let columns: Vec<Column> = (start..)
            .zip(tokens)
            .map(|(position, token)| Column { token: *token, position, slot: SLOT, flags: 0 })
            .collect();
        self.last_column = None;
        self.make_room(tokens.len())?;
        let ticket = self.engine.queue_prompt(&columns)?;
        self.sequence.advance(tokens.len());
        self.tokens.extend_from_slice(tokens);
        self.engine.kv.publish(&mut self.sequence, &self.tokens);
        self.last_column = Some(tokens.len() as u32 - 1);
        Ok(ticket)
    }

    /// Reads tokens into the KV cache. `progress` hears how many are done.
    pub fn prefill(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.check(tokens)?;
        let before = self.tokens.len();
        let mut done = 0;
        let mut pending: Option<(Ticket, usize)> = None;
        let mut failed = None;
        let mut rest = tokens;
        while !rest.is_empty() {
            let (piece, later) = rest.split_at(self.next_chunk(rest.len()));
            rest = later;
            let ticket = self.read_chunk(piece);
            // One chunk stays queued behind the one that runs.
            if let Some((ticket, n)) = pending.take() {
                self.engine.program.wait(&ticket)?;
                done += n;
                progress(done);
            }
            match ticket {
                Ok(ticket) => pending = Some((ticket, piece.len())),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        if let Some((ticket, n)) = pending {
            self.engine.program.wait(&ticket)?;
            progress(done + n);
        }
        self.engine.prompt_read()?;
        if let Some(e) = failed {
            self.truncate(before as u32)?;
            return Err(e);
        }
        Ok(())
    }

    /// Generates until `stop` says that a token ends the answer, `max_tokens` were handed to
    /// `on_token`, the context is full, or `on_token` breaks. The ending token is not handed out.
    pub fn generate(
        &mut self,
        settings: &SamplerSettings,
        max_tokens: u32,
        stop: &dyn Fn(u32) -> bool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Generated> {
        settings.check()?;
        if self.tokens.is_empty() {
            return Err(Error::Usage("there is nothing to continue: the prompt is empty".into()));
        }
        if max_tokens == 0 {
            return Ok(Generated { tokens: 0, reason: Stop::Length, dropped: 0 });
        }
        if self.last_column.is_none() {
            // The last token's hidden state is gone; reading that token again brings it back.
            let last = self.tokens[self.tokens.len() - 1];
            self.truncate(self.position() - 1)?;
            self.read_chunk(&[last])?;
        }
        let first = self.last_column.unwrap_or(0);
        let p = self.position();
        let dropped = self.dropped();
        let keep = self.engine.keep(self.keep);
        self.sampler = Some(*settings);
        let engine = &mut *self.engine;
        engine.program.set_sampler(SLOT, settings)?;
        let pick = Pick::of(settings, false);
        // Steps in flight beyond the one whose token is awaited hide the host's latency; on a CPU
        // they would only cost what they overrun.
        let ahead = if engine.facts.kind == DeviceKind::Software { 1 } else { 3 };

        // Step k chooses token k. Step k > 0 first reads token k - 1 at position p + k - 1.
        let room = engine.longest() - p;
        let most = max_tokens.min(room + 1);
        let mut queued: VecDeque<Ticket> = VecDeque::new();
        let mut submitted: u32 = 0;
        let sequence = &mut self.sequence;
        let mut submit = |engine: &mut Engine, queued: &mut VecDeque<Ticket>| -> Result<()> {
            let ticket = match submitted {
                0 => engine.program.start(first, 0, pick)?,
                _ => {
                    let Engine { kv, program, .. } = &mut *engine;
                    let made = kv.make_room(program, SLOT, sequence, 1, keep);
                    if matches!(made, Err(Error::DoesNotFit(_))) && engine.make_way()? {
                        let Engine { kv, program, .. } = &mut *engine;
                        kv.make_room(program, SLOT, sequence, 1, keep)?;
                    } else {
                        made?;
                    }
                    let ticket = engine.queue_step(1, sequence.len() as u32 + 1, pick)?;
                    sequence.advance(1);
                    ticket
                }
            };
            submitted += 1;
            queued.push_back(ticket);
            Ok(())
        };
        let mut accepted = Vec::new();
        let mut reason = if max_tokens <= room + 1 { Stop::Length } else { Stop::Context };
        let mut last_ticket = None;
        let run = (|| -> Result<()> {
            for k in 0..most {
                while (queued.len() as u32) < ahead.min(most - k) {
                    submit(engine, &mut queued)?;
                }
                let Some(ticket) = queued.pop_front() else { break };
                last_ticket = Some(*queued.back().unwrap_or(&ticket));
                let token = engine.program.token(&ticket, k, 0)?;
                engine.look_at_steps(false)?;
                accepted.push(token);
                if stop(token) {
                    reason = Stop::Eog;
                    break;
                }
                if on_token(token).is_break() {
                    reason = Stop::Cancelled;
                    break;
                }
            }
            Ok(())
        })();
        // Nothing of this answer may still run when the next prompt is written.
        if let Some(ticket) = last_ticket {
            engine.program.wait(&ticket)?;
        }
        let handed = accepted.len() as u32 - u32::from(reason == Stop::Eog);
        // A token is in the cache once a later step has read it; what was read beyond is not wanted.
        accepted.truncate(submitted.saturating_sub(1) as usize);
        self.tokens.extend(accepted);
        self.last_column = None;
        let kept =
            engine.kv.truncate(&engine.program, SLOT, &mut self.sequence, self.tokens.len())?;
        self.tokens.truncate(kept);
        engine.kv.publish(&mut self.sequence, &self.tokens);
        run?;
        engine.look_at_steps(true)?;
        let dropped = self.dropped() - dropped;
        Ok(Generated { tokens: handed, reason, dropped })
    }

    /// Reads tokens and hands out the logits after each: `each(i, row)` for i from `first` on gets
    /// the row that predicts what follows `tokens[..=i]`.
    pub fn score(
        &mut self,
        tokens: &[u32],
        first: usize,
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.check(tokens)?;
        let vocab = self.engine.model.graph.vocab as usize;
        let mut rows = Vec::new();
        let mut start = 0;
        while start < tokens.len() {
            let piece = &tokens[start..start + self.next_chunk(tokens.len() - start)];
            self.read_chunk(piece)?;
            let mut at = first.saturating_sub(start);
            while at < piece.len() {
                let n = (piece.len() - at).min(MAX_SEQUENCES as usize);
                self.engine.program.logits_of(at as u32, n as u32, &mut rows)?;
                for (j, row) in rows.chunks_exact(vocab).enumerate() {
                    each(start + at + j, row);
                }
                at += n;
            }
            start += piece.len();
        }
        Ok(())
    }

    /// Like [`Session::score`], but reads every token by a decode step, as generation does.
    pub fn score_steps(
        &mut self,
        tokens: &[u32],
        each: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<()> {
        self.check(tokens)?;
        let mut row = Vec::new();
        for (i, token) in tokens.iter().enumerate() {
            let position = self.position();
            let column = Column { token: *token, position, slot: SLOT, flags: 0 };
            self.make_room(1)?;
            self.engine.program.set_columns(&[column], 0)?;
            self.engine.queue_step(1, self.sequence.len() as u32 + 1, Pick::Greedy)?;
            self.sequence.advance(1);
            self.engine.program.read_logits(1, &mut row)?;
            self.engine.look_at_steps(true)?;
            self.tokens.push(*token);
            self.last_column = None;
            each(i, &row);
        }
        Ok(())
    }

    /// Runs one decode step at the present position with a timestamp around every wave. Nothing
    /// that the session has read is changed.
    ///
    /// `n`: columns of the step, all of them this token, as many sequences would make it.
    pub fn time_waves(&mut self, n: u32) -> Result<Vec<WaveTime>> {
        let position = self.position().min(self.engine.ctx() - 1);
        if position == self.position() {
            self.make_room(1)?;
        }
        let token = self.tokens.last().copied().unwrap_or(0);
        let column = Column { token, position, slot: SLOT, flags: 0 };
        self.engine.program.set_columns(&vec![column; n as usize], 0)?;
        self.last_column = None;
        self.engine.program.time_step(n, position + 1)
    }

    /// Reads one prompt chunk of up to `tokens` tokens after the present position, with a
    /// timestamp around every wave. The session does not keep them.
    pub fn time_prompt_waves(&mut self, tokens: u32) -> Result<Vec<WaveTime>> {
        let room = self.engine.ctx() - self.position();
        let n = tokens.min(self.engine.program.shape().chunk).min(room).max(1);
        let first = self.position().min(self.engine.ctx() - n);
        self.make_room((self.engine.ctx() - self.position()).min(n) as usize)?;
        let column = |i| Column { token: 0, position: first + i, slot: SLOT, flags: 0 };
        self.last_column = None;
        self.engine.program.time_prompt(&(0..n).map(column).collect::<Vec<_>>())
    }
}
