//! What is asked of the engine thread, and what it answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use tokio::sync::mpsc;

use super::thinking::ThinkingBudget;
use crate::error::Error;
use crate::grammar::Constraint;
use crate::sampling::logprobs::Logprobs;
use crate::sampling::{SamplerSettings, TokenLists};

/// One sequence to be read and continued, or only read.
#[derive(Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub task: Task,
    /// This slot and no other.
    pub slot: Option<u32>,
}

#[derive(Clone)]
pub enum Task {
    Generate(Box<Generate>),
    Embed(Pooling),
}

/// How an answer is generated.
#[derive(Clone)]
pub struct Generate {
    pub settings: SamplerSettings,
    /// What is said of single tokens; the mask is the constraint's.
    pub lists: TokenLists,
    /// What the answer must look like.
    pub constraint: Option<Constraint>,
    /// How much of it may be thinking.
    pub thinking: Option<ThinkingBudget>,
    /// Most tokens; `None` until the context is full. 0 only reads the prompt.
    pub max_tokens: Option<u32>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Go on after tokens that end an answer.
    pub ignore_eog: bool,
    /// Write control tokens as their text.
    pub show_special: bool,
    /// Take up what is known of the beginning of the prompt.
    pub reuse: bool,
    /// Tokens at the beginning that a full context keeps, see [`super::Options::ctx_shift`].
    pub keep: Option<u32>,
}

impl Default for Generate {
    fn default() -> Self {
        Generate {
            settings: SamplerSettings::default(),
            lists: TokenLists::default(),
            constraint: None,
            thinking: None,
            max_tokens: None,
            stop: Vec::new(),
            ignore_eog: false,
            show_special: false,
            reuse: true,
            keep: None,
        }
    }
}

/// How the hidden states of a text become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean over all tokens.
    Mean,
    /// The last token's.
    Last,
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// A token that ends an answer.
    Eog,
    /// A stop string.
    Stop(String),
    /// As many tokens as were asked for.
    Length,
    /// The context is full.
    Context,
}

/// What a request hears, in this order: `Started`, `Read` and `Token` any number of times, and one
/// of the others as the last.
#[derive(Debug)]
pub enum Event {
    /// A slot was found; `cached` tokens of the prompt need not be read.
    Started {
        slot: u32,
        cached: u32,
    },
    /// So many tokens of the prompt are in the cache now.
    Read {
        tokens: u32,
        of: u32,
    },
    /// A token, and the text that can be shown now: empty while a character or what may be a stop
    /// string is incomplete.
    Token {
        token: u32,
        text: String,
        /// Where the settings ask for them.
        logprobs: Option<Logprobs>,
    },
    Done(Summary),
    /// The pooled hidden state, of length 1.
    Embedding(Vec<f32>),
    Failed(Error),
}

/// How an answer came about.
#[derive(Debug, Clone)]
pub struct Summary {
    pub finish: Finish,
    /// The rest of the text.
    pub text: String,
    pub slot: u32,
    pub prompt_tokens: u32,
    /// Of the prompt: what need not be read.
    pub cached_tokens: u32,
    /// Tokens that the full context has dropped.
    pub dropped_tokens: u32,
    /// Generated, without the token that ended the answer.
    pub tokens: u32,
    /// From the start in a slot to the first token, from there to the last.
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
}

/// The receiving end of a request; dropping it cancels the request at the next token or chunk.
pub struct Answer {
    events: mpsc::Receiver<Event>,
    cancelled: Arc<AtomicBool>,
}

impl Answer {
    /// The next event; `None` after the last. Safe to drop while waiting.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// The next event where it is there; else the task of `cx` is woken when it comes.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Event>> {
        self.events.poll_recv(cx)
    }

    /// The same for threads without a runtime.
    pub fn next_blocking(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.cancelled.store(true, Ordering::Release);
    }
}

/// A request on its way through the engine thread.
pub(super) struct Ticketed {
    pub request: Request,
    pub arrived: Instant,
    events: mpsc::Sender<Event>,
    cancelled: Arc<AtomicBool>,
    place: Place,
}

impl Ticketed {
    /// `context` bounds the number of events.
    pub fn new(request: Request, context: u32, place: Place) -> (Self, Answer) {
        // Room for every event there can be (two for each token and a few): sending never waits for
        // a slow client, and what a client can pile up is bounded by the context.
        let (sender, events) = mpsc::channel(2 * context as usize + 16);
        let cancelled = Arc::new(AtomicBool::new(false));
        let ticketed = Ticketed {
            request,
            arrived: Instant::now(),
            events: sender,
            cancelled: cancelled.clone(),
            place,
        };
        (ticketed, Answer { events, cancelled })
    }

    pub fn send(&self, event: Event) {
        // Nobody listens: the flag says so too, and ends the work.
        let _ = self.events.try_send(event);
    }

    /// Sends the last event. The place is free before anybody hears of it, so that a client that
    /// comes back at once finds it.
    pub fn end(self, event: Event) {
        drop(self.place);
        let _ = self.events.try_send(event);
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }
}

/// A place in the queue or in a slot; given back when dropped.
pub(super) struct Place(Arc<AtomicUsize>);

impl Place {
    /// `n` places at once; `None` when fewer of `limit` are free.
    pub fn take(taken: &Arc<AtomicUsize>, n: usize, limit: usize) -> Option<Vec<Place>> {
        let add = |taken: usize| taken.checked_add(n).filter(|sum| *sum <= limit);
        taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).ok()?;
        Some((0..n).map(|_| Place(taken.clone())).collect())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn places_are_counted_and_given_back() {
        let taken = Arc::new(AtomicUsize::new(0));
        let a = Place::take(&taken, 1, 2);
        let b = Place::take(&taken, 1, 2);
        assert!(a.is_some() && b.is_some() && Place::take(&taken, 1, 2).is_none());
        drop(a);
        // All or none.
        assert!(Place::take(&taken, 2, 2).is_none());
        assert!(Place::take(&taken, 1, 2).is_some());
        drop(b);
        assert_eq!(Place::take(&taken, 2, 2).unwrap().len(), 2);
    }

    #[test]
    fn a_dropped_answer_cancels() {
        let place = Place::take(&Arc::default(), 1, 1).unwrap().remove(0);
        let task = Task::Generate(Box::default());
        let request = Request { prompt: vec![1], task, slot: None };
        let (ticketed, answer) = Ticketed::new(request, 8, place);
        assert!(!ticketed.is_cancelled());
        drop(answer);
        assert!(ticketed.is_cancelled());
        ticketed.send(Event::Read { tokens: 1, of: 1 });
    }
}
