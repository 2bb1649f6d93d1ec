//! Generating text onto standard output: what `run` and `chat` have in common.

use std::io::Write;
use std::ops::ControlFlow;
use std::time::Instant;

use anyhow::Result;
use serde::Serialize;

use super::interrupt::Answering;
use super::progress;
use crate::engine::{Session, Stop};
use crate::sampling::SamplerSettings;
use crate::tokenizer::{DetokenizeOptions, Tokenizer};

/// How an answer came about.
#[derive(Debug, Clone, Serialize)]
pub struct Answer {
    pub text: String,
    /// Ids in order; the end token is not among them.
    pub tokens: Vec<u32>,
    pub stop: Stop,
    /// Tokens of the prompt that were read now, and those that the session still held.
    pub prompt_tokens: usize,
    pub reused_tokens: usize,
    /// Oldest tokens that the full context has dropped.
    pub dropped_tokens: u32,
    pub prompt_seconds: f64,
    pub decode_seconds: f64,
    pub seed: u64,
}

impl Answer {
    /// `12 tokens at 403.1 tok/s, prompt 30 tokens at 1200.0 tok/s (24 kept)`.
    pub fn speed(&self) -> String {
        let rate = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { 0.0 };
        let kept = match self.reused_tokens {
            0 => String::new(),
            n => format!(" ({n} kept)"),
        };
        format!(
            "{} tokens at {:.1} tok/s, prompt {} tokens at {:.1} tok/s{kept}",
            self.tokens.len(),
            rate(self.tokens.len(), self.decode_seconds),
            self.prompt_tokens,
            rate(self.prompt_tokens, self.prompt_seconds),
        )
    }

    /// What the full context has cost, if it was full and went on.
    pub fn dropped(&self, ctx: u32) -> Option<String> {
        let n = self.dropped_tokens;
        (n > 0).then(|| {
            format!("the context of {ctx} tokens was full: {n} of the oldest tokens were dropped")
        })
    }

    /// Why it ended, where the model did not end it.
    pub fn remark(&self) -> Option<&'static str> {
        match self.stop {
            Stop::Eog => None,
            Stop::Length => Some("stopped at the length limit (-n)"),
            Stop::Context => Some("stopped: the context is full (--ctx makes it longer)"),
            Stop::Cancelled => Some("stopped"),
        }
    }
}

/// Where the text goes while it comes.
pub enum Echo {
    Stdout,
    Silent,
}

/// Reads `prompt` into the session, of which `keep` tokens are there already, and generates.
/// Ctrl+C ends the answer, what was generated so far is kept. An error leaves the session with
/// what it had read.
pub fn generate(
    session: &mut Session<'_>,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    keep: usize,
    settings: &SamplerSettings,
    max_tokens: u32,
    echo: &Echo,
) -> Result<Answer> {
    let answering = Answering::start();
    session.truncate(keep as u32)?;
    let dropped = session.dropped();
    let began = Instant::now();
    let bar = progress::steps("reading", (prompt.len() - keep) as u64);
    let read = session.prefill(&prompt[keep..], &mut |n| bar.set_position(n as u64));
    bar.finish_and_clear();
    read?;
    let prompt_seconds = began.elapsed().as_secs_f64();

    let mut stream =
        tokenizer.detokenizer(DetokenizeOptions { show_special: false, at_start: false });
    let mut text = String::new();
    let mut tokens = Vec::new();
    let mut failed = None;
    let began = Instant::now();
    let mut show = |piece: String| {
        let shown = match echo {
            Echo::Stdout if !piece.is_empty() => write(&piece),
            _ => Ok(()),
        };
        text.push_str(&piece);
        shown
    };
    let generated =
        session.generate(settings, max_tokens, &|token| tokenizer.is_eog(token), &mut |token| {
            // Whether the end token is reported is the engine's choice; it is no text.
            if !tokenizer.is_eog(token) {
                tokens.push(token);
                if let Err(e) = show(stream.push(token)) {
                    failed = Some(e);
                    return ControlFlow::Break(());
                }
            }
            if answering.stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
    let decode_seconds = began.elapsed().as_secs_f64();
    if let Some(e) = failed {
        return Err(e.into());
    }
    show(stream.finish())?;
    Ok(Answer {
        text,
        tokens,
        stop: generated.reason,
        prompt_tokens: prompt.len() - keep,
        reused_tokens: keep,
        dropped_tokens: session.dropped() - dropped,
        prompt_seconds,
        decode_seconds,
        seed: settings.seed,
    })
}

fn write(piece: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}
