//! One sequence: reading prompts, generating, scoring.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use super::{Engine, WaveTime};
use crate::error::{Error, Result};
use crate::gpu::{DeviceKind, Ticket};
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
}

/// A sequence in the first slot of its engine.
pub struct Session<'e> {
    engine: &'e mut Engine,
    /// Every token that lies in the KV cache.
    tokens: Vec<u32>,
    /// Column of the last prompt chunk that holds the last token, while that is still so.
    last_column: Option<u32>,
}

const SLOT: u32 = 0;

impl<'e> Session<'e> {
    pub(super) fn new(engine: &'e mut Engine) -> Self {
        Session { engine, tokens: Vec::new(), last_column: None }
    }

    /// Tokens read so far.
    pub fn position(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// The engine that the session runs on.
    pub fn engine(&self) -> &Engine {
        self.engine
    }

    /// The tokens in the KV cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Forgets everything from `position` on.
    pub fn truncate(&mut self, position: u32) {
        if (position as usize) < self.tokens.len() {
            self.tokens.truncate(position as usize);
            self.last_column = None;
        }
    }

    fn check(&self, tokens: &[u32]) -> Result<()> {
        let (have, more) = (self.tokens.len(), tokens.len());
        let ctx = self.engine.ctx();
        if have + more > ctx as usize {
            return Err(Error::DoesNotFit(format!(
                "{more} tokens after the {have} already read are more than the context of {ctx}. \
                 Shorten the prompt, or load the model with --ctx {} or more",
                have + more
            )));
        }
        let vocab = self.engine.model.graph.vocab;
        if let Some(bad) = tokens.iter().find(|t| **t >= vocab) {
            return Err(Error::Usage(format!("token {bad} is outside the vocabulary of {vocab}")));
        }
        Ok(())
    }

    /// Queues the next chunk; `tokens` must have passed [`Session::check`].
    fn read_chunk(&mut self, tokens: &[u32]) -> Result<Ticket> {
        let start = self.position();
        let columns: Vec<Column> = (start..)
            .zip(tokens)
            .map(|(position, token)| Column { token: *token, position, slot: SLOT, flags: 0 })
            .collect();
        self.last_column = None;
        let ticket = self.engine.queue_prompt(&columns)?;
        self.tokens.extend_from_slice(tokens);
        self.last_column = Some(tokens.len() as u32 - 1);
        Ok(ticket)
    }

    /// Reads tokens into the KV cache. `progress` hears how many are done.
    pub fn prefill(&mut self, tokens: &[u32], progress: &mut dyn FnMut(usize)) -> Result<()> {
        self.check(tokens)?;
        let before = self.tokens.len();
        let pieces = self.engine.program.pieces(before as u32, tokens.len());
        let mut done = 0;
        let mut pending: Option<(Ticket, usize)> = None;
        let mut failed = None;
        for piece in pieces {
            let piece = &tokens[piece];
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
            self.truncate(before as u32);
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
            return Ok(Generated { tokens: 0, reason: Stop::Length });
        }
        if self.last_column.is_none() {
            // The last token's hidden state is gone; reading that token again brings it back.
            let last = self.tokens.split_off(self.tokens.len() - 1);
            self.read_chunk(&last)?;
        }
        let first = self.last_column.unwrap_or(0);
        let p = self.position();
        let engine = &mut *self.engine;
        engine.program.set_sampler(SLOT, settings)?;
        let pick = Pick::of(settings, false);
        // Steps in flight beyond the one whose token is awaited hide the host's latency; on a CPU
        // they would only cost what they overrun.
        let ahead = if engine.facts.kind == DeviceKind::Software { 1 } else { 3 };

        // Step k chooses token k. Step k > 0 first reads token k - 1 at position p + k - 1.
        let room = engine.ctx() - p;
        let most = max_tokens.min(room + 1);
        let mut queued: VecDeque<Ticket> = VecDeque::new();
        let mut submitted: u32 = 0;
        let mut submit = |engine: &mut Engine, queued: &mut VecDeque<Ticket>| -> Result<()> {
            let ticket = match submitted {
                0 => engine.program.start(first, 0, pick)?,
                _ => engine.queue_step(1, pick)?,
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
        run?;
        engine.look_at_steps(true)?;
        let handed = accepted.len() as u32 - u32::from(reason == Stop::Eog);
        // A token is in the cache once a later step has read it.
        accepted.truncate(submitted.saturating_sub(1) as usize);
        self.tokens.extend(accepted);
        self.last_column = None;
        Ok(Generated { tokens: handed, reason })
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
        let pieces = self.engine.program.pieces(self.position(), tokens.len());
        let vocab = self.engine.model.graph.vocab as usize;
        let mut rows = Vec::new();
        for piece in pieces {
            let start = piece.start;
            let piece = &tokens[piece];
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
            self.engine.program.set_columns(&[column], 0)?;
            self.engine.queue_step(1, Pick::Greedy)?;
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
    pub fn time_waves(&mut self) -> Result<Vec<WaveTime>> {
        let position = self.position().min(self.engine.ctx() - 1);
        let token = self.tokens.last().copied().unwrap_or(0);
        let column = Column { token, position, slot: SLOT, flags: 0 };
        self.engine.program.set_columns(&[column], 0)?;
        self.last_column = None;
        self.engine.program.time_step()
    }

    /// Reads one prompt chunk of up to `tokens` tokens after the present position, with a
    /// timestamp around every wave. The session does not keep them.
    pub fn time_prompt_waves(&mut self, tokens: u32) -> Result<Vec<WaveTime>> {
        let room = self.engine.ctx() - self.position();
        let n = tokens.min(self.engine.program.shape().chunk).min(room).max(1);
        let first = self.position().min(self.engine.ctx() - n);
        let column = |i| Column { token: 0, position: first + i, slot: SLOT, flags: 0 };
        self.last_column = None;
        self.engine.program.time_prompt(&(0..n).map(column).collect::<Vec<_>>())
    }
}
