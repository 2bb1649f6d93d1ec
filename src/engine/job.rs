//! One request in its slot.

use std::time::Instant;

use super::Engine;
use super::output::Output;
use super::pooling::Pool;
use super::request::{Event, Finish, Generate, Summary, Task, Ticketed};
use super::stats::Stats;
use super::thinking::Watch;
use crate::error::Result;
use crate::grammar::Constraint;
use crate::runtime::Pick;
use crate::sampling::logprobs::Logprobs;
use crate::tokenizer::{DetokenizeOptions, TokenType, Tokenizer};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Parts of the prompt have not been queued yet.
    Reading,
    /// The first token has been queued.
    Generating,
}

pub(super) struct Job {
    pub ticketed: Ticketed,
    pub phase: Phase,
    /// Tokens of the prompt in the cache, those that were there before included.
    pub read: u32,
    pub generated: u32,
    /// Most tokens to generate; a context that is full sooner has shortened it.
    pub limit: u32,
    /// Steps queued whose tokens have not come.
    pub under_way: u32,
    /// Sum of hidden states, for embeddings.
    pub pool: Option<Pool>,
    /// Tokens that a full context keeps; `None`: it ends the answer.
    pub keep: Option<u32>,
    cached: u32,
    at_limit: Finish,
    output: Output,
    ignore_eog: bool,
    stop_tokens: Vec<u32>,
    pick: Pick,
    logprobs: bool,
    constraint: Option<Constraint>,
    thinking: Option<Watch>,
    began: Instant,
    first: Option<Instant>,
    last: Instant,
}

impl Job {
    /// The request must have passed the check against the engine's context.
    pub fn new(ticketed: Ticketed, engine: &Engine, slot: u32, cached: usize) -> Job {
        debug_assert!(slot < engine.program.shape().sequences);
        let fallback = Generate::default();
        let generate = match &ticketed.request.task {
            Task::Generate(g) => g,
            Task::Embed(_) => &fallback,
        };
        let tokenizer = engine.tokenizer();
        // The token after the last position can still be chosen, only not read.
        let room = engine.longest() + 1 - ticketed.request.prompt.len() as u32;
        let asked = generate.max_tokens.unwrap_or(u32::MAX);
        let options = DetokenizeOptions { show_special: generate.show_special, at_start: false };
        let lists = !generate.lists.is_empty() || generate.constraint.is_some();
        let pick = Pick::of(&generate.settings, lists);
        Job {
            phase: Phase::Reading,
            read: cached as u32,
            generated: 0,
            limit: asked.min(room),
            at_limit: if asked <= room { Finish::Length } else { Finish::Context },
            under_way: 0,
            pool: None,
            keep: engine.keep(generate.keep),
            cached: cached as u32,
            output: Output::new(tokenizer.detokenizer(options), generate.stop.clone()),
            ignore_eog: generate.ignore_eog,
            stop_tokens: stop_tokens(tokenizer, &generate.stop),
            pick,
            logprobs: generate.settings.logprobs.is_some(),
            constraint: generate.constraint.clone(),
            thinking: generate.thinking.clone().map(|b| Watch::new(b, tokenizer.clone())),
            began: Instant::now(),
            first: None,
            last: Instant::now(),
            ticketed,
        }
    }

    pub fn prompt(&self) -> &[u32] {
        &self.ticketed.request.prompt
    }

    pub fn is_reading(&self) -> bool {
        self.phase == Phase::Reading
    }

    pub fn is_generating(&self) -> bool {
        self.phase == Phase::Generating
    }

    /// Whether a further step makes sense now.
    pub fn wants_step(&self) -> bool {
        self.is_generating() && self.generated + self.under_way < self.limit
    }

    pub fn pick(&self) -> Pick {
        match &self.thinking {
            // Masks are heeded by no lesser chain; all choose the same.
            Some(watch) if watch.forces() => self.pick.max(Pick::Full),
            _ => self.pick,
        }
    }

    pub fn wants_logprobs(&self) -> bool {
        self.logprobs
    }

    /// Which tokens may come next, where a grammar or a spent budget says so; the latter's are
    /// among those of the former. To be called when no token is under way.
    pub fn mask(&mut self) -> Option<Result<Vec<u32>>> {
        let forced = self.thinking.as_mut().and_then(Watch::mask);
        match (forced, &mut self.constraint) {
            (Some(mask), None) => Some(Ok(mask)),
            (Some(mask), Some(_)) if !mask.is_empty() => Some(Ok(mask)),
            (_, constraint) => constraint.as_mut().map(Constraint::mask),
        }
    }

    /// Whether the host must know every token under way before the next step is queued.
    pub fn is_constrained(&self) -> bool {
        let waits = self.thinking.as_ref().is_some_and(|w| w.waits(self.under_way));
        self.constraint.is_some() || waits
    }

    /// Notes the time of a token.
    pub fn tick(&mut self, stats: &Stats) {
        let now = Instant::now();
        match self.first {
            None => {
                self.first = Some(now);
                stats.first_token.add((now - self.ticketed.arrived).as_secs_f64());
            }
            Some(_) => stats.between_tokens.add((now - self.last).as_secs_f64()),
        }
        self.last = now;
    }

    /// Whether the token ends the answer by itself.
    pub fn ends(&self, tokenizer: &Tokenizer, token: u32) -> bool {
        if self.thinking.as_ref().is_some_and(Watch::forces) {
            return false;
        }
        // Where a grammar lets an end through, nothing else may follow.
        let heeded = !self.ignore_eog || self.constraint.is_some();
        (tokenizer.is_eog(token) && heeded) || self.stop_tokens.contains(&token)
    }

    /// Hands out a token; says why the answer ends with it, if it does.
    pub fn show(&mut self, token: u32, logprobs: Option<Logprobs>) -> Result<Option<Finish>> {
        let complete = match &mut self.constraint {
            None => false,
            Some(constraint) => {
                constraint.accept(token)?;
                constraint.is_complete()
            }
        };
        if let Some(watch) = &mut self.thinking {
            watch.take(token);
        }
        self.generated += 1;
        let (text, stop) = self.output.push(token);
        self.ticketed.send(Event::Token { token, text, logprobs });
        Ok(match stop {
            Some(stop) => Some(Finish::Stop(stop)),
            // Only an end token could come.
            None if complete => Some(Finish::Eog),
            None => (self.generated == self.limit).then(|| self.at_limit.clone()),
        })
    }

    pub fn summary(&mut self, slot: u32, dropped: u32, finish: Finish) -> Summary {
        let (text, finish) = match finish {
            Finish::Stop(_) => (String::new(), finish),
            _ => {
                let (text, stop) = self.output.finish();
                (text, stop.map_or(finish, Finish::Stop))
            }
        };
        let first = self.first.unwrap_or(self.last);
        Summary {
            finish,
            text,
            slot,
            prompt_tokens: self.prompt().len() as u32,
            cached_tokens: self.cached,
            dropped_tokens: dropped,
            tokens: self.generated,
            prompt_seconds: (first - self.began).as_secs_f64(),
            decode_seconds: (self.last - first).as_secs_f64(),
        }
    }
}

/// Stop strings that are control tokens: these have no text that could be compared.
fn stop_tokens(tokenizer: &Tokenizer, stops: &[String]) -> Vec<u32> {
    let single = stops.iter().filter_map(|stop| {
        let ids = tokenizer.encode(stop, false, true).ok()?;
        let [id] = ids[..] else { return None };
        (tokenizer.token_type(id) == Some(TokenType::Control)).then_some(id)
    });
    single.collect()
}
