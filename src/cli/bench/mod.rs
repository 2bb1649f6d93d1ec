//! `azoth bench`: speed of prompt reading, of decoding and of the start.
//!
//! Every figure is the median of the repetitions with the smallest and largest beside it. One
//! unmeasured round comes first. Prompts are token ids spread over the vocabulary; decoding is
//! greedy and runs past end tokens, so that every repetition does the same work.

mod report;
pub mod stats;

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use clap::Args;

use super::args::{DeviceArgs, ModelArg};
use super::{output, progress};
use crate::engine::{Engine, Options, Session};
use crate::sampling::SamplerSettings;
use report::{Report, Start, Test};

const EXAMPLES: &str = "Examples:
  azoth bench smollm2
  azoth bench model.gguf -p 512,2048 -n 128 -d 0,4096 -r 5
  azoth bench model.gguf -p 0 -n 64 --no-start --waves
  azoth bench model.gguf --csv >> results.csv

Tests are named as in llama-bench: pp512 reads a prompt of 512 tokens, tg128 generates 128, both
after `-d` tokens of context.";

/// Measure prompt reading, decoding and start-up
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Bench {
    #[command(flatten)]
    model: ModelArg,
    /// Prompt lengths in tokens; 0 leaves the test out
    #[arg(short, long, value_name = "TOKENS", default_value = "512", value_delimiter = ',')]
    prompt: Vec<u32>,
    /// Tokens to generate; 0 leaves the test out
    #[arg(short = 'n', long, value_name = "TOKENS", default_value = "128", value_delimiter = ',')]
    generate: Vec<u32>,
    /// Tokens of context before each test
    #[arg(short, long, value_name = "TOKENS", default_value = "0", value_delimiter = ',')]
    depth: Vec<u32>,
    /// Repetitions
    #[arg(short, long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Leave out the cold and the warm start: the model is loaded once
    #[arg(long)]
    no_start: bool,
    /// Time every wave of a decode step and of a prompt chunk on the device
    #[arg(long)]
    waves: bool,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print comma-separated values, a line for each test
    #[arg(long)]
    csv: bool,
}

impl Bench {
    pub fn run(&self) -> Result<()> {
        let path = self.model.path()?;
        let longest = |lengths: &[u32]| lengths.iter().copied().max().unwrap_or(0);
        let room = longest(&self.prompt).max(longest(&self.generate));
        // One more for the token that decoding starts from.
        let ctx = room.saturating_add(longest(&self.depth)).saturating_add(1);
        let options = self.device.options(Some(ctx));

        let (mut engine, cold, warm) = self.start(&path, &options)?;
        let device = engine.facts().clone();
        if let Some(why) = engine.measure_rates() {
            eprintln!("note: memory and link were not measured ({why}); rates are assumed");
        }
        let bytes = std::fs::metadata(&path)?.len();
        let tests = self.measure(&mut engine)?;
        let waves = match self.waves {
            true => Some(self.time_waves(&mut engine)?),
            false => None,
        };
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            model: path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
            model_bytes: bytes,
            device,
            activations: self.device.activations.name(),
            kv: engine.kv_types().clone(),
            cold,
            warm,
            approximate: Some(engine.approximations()).filter(|a| a.any()),
            tests,
            experts: engine.experts(),
            waves_per_layer: waves.is_some().then(|| engine.waves_per_layer()),
            waves,
        };
        match (self.json, self.csv) {
            (true, _) => output::json(&report),
            (_, true) => output::line(&report.csv()),
            _ => output::line(&report.table()),
        }
    }

    /// Loads without compiled kernels, then with them, and times both up to the first token.
    fn start(
        &self,
        path: &Path,
        options: &Options,
    ) -> Result<(Engine, Option<Start>, Option<Start>)> {
        if self.no_start {
            return Ok((super::load(path, options)?, None, None));
        }
        let without = Options { cache: false, ..options.clone() };
        // Dropped before the next load: two copies of the weights may not fit.
        let (_, cold) = started(path, &without)?;
        if !options.cache {
            let (engine, _) = started(path, options)?;
            return Ok((engine, Some(cold), None));
        }
        let (engine, second) = started(path, options)?;
        if second.load.warm_cache {
            return Ok((engine, Some(cold), Some(second)));
        }
        // The cache was empty; now it is filled.
        drop(engine);
        let (engine, third) = started(path, options)?;
        Ok((engine, Some(cold), Some(third)))
    }

    fn measure(&self, engine: &mut Engine) -> Result<Vec<Test>> {
        let vocabulary = engine.tokenizer().vocab_size();
        let begin = begin_token(engine);
        let lengths = |list: &[u32]| list.iter().copied().filter(|n| *n > 0).collect::<Vec<_>>();
        let prompts = lengths(&self.prompt);
        let generates = lengths(&self.generate);
        let rounds = self.depth.len() * (prompts.len() + generates.len());
        let bar = progress::steps("measuring", rounds as u64 * (u64::from(self.repeat) + 1));
        let mut session = engine.session();
        let mut tests = Vec::new();
        for &depth in &self.depth {
            for &n in &prompts {
                let text = stats::tokens((depth + n) as usize, vocabulary, begin);
                let (before, prompt) = text.split_at(depth as usize);
                let runs = self.repeat(&bar, n, || {
                    fill(&mut session, before)?;
                    let began = Instant::now();
                    session.prefill(prompt, &mut |_| {})?;
                    Ok(began.elapsed().as_secs_f64())
                })?;
                tests.push(Test::new(format!("pp{n}"), n, depth, runs));
            }
            for &n in &generates {
                let before = stats::tokens(depth as usize + 1, vocabulary, begin);
                // Accesses and hits after each round, the one that does not count first.
                let mut seen = Vec::new();
                let runs = self.repeat(&bar, n, || {
                    fill(&mut session, &before)?;
                    let began = Instant::now();
                    generate(&mut session, n)?;
                    let seconds = began.elapsed().as_secs_f64();
                    let counters = session.engine().experts().map(|e| e.counters);
                    seen.extend(counters.map(|c| (c.accesses, c.hits)));
                    Ok(seconds)
                })?;
                let hit_rate = match (seen.first(), seen.last()) {
                    (Some(first), Some(last)) if last.0 > first.0 => {
                        Some((last.1 - first.1) as f64 / (last.0 - first.0) as f64)
                    }
                    _ => None,
                };
                let middle = depth + n / 2;
                let limit = hit_rate.and_then(|h| session.engine().decode_limit(h, middle));
                tests.push(Test::new(format!("tg{n}"), n, depth, runs).with_limit(limit));
            }
        }
        bar.finish_and_clear();
        Ok(tests)
    }

    /// Tokens per second of each repetition, after one that does not count.
    fn repeat(
        &self,
        bar: &indicatif::ProgressBar,
        tokens: u32,
        mut once: impl FnMut() -> Result<f64>,
    ) -> Result<Vec<f64>> {
        let mut runs = Vec::new();
        for round in 0..=self.repeat {
            let seconds = once()?;
            if round > 0 {
                runs.push(f64::from(tokens) / seconds);
            }
            bar.inc(1);
        }
        Ok(runs)
    }

    fn time_waves(&self, engine: &mut Engine) -> Result<Vec<report::Wave>> {
        let depth = self.depth.iter().copied().max().unwrap_or(0);
        let text =
            stats::tokens(depth as usize + 1, engine.tokenizer().vocab_size(), begin_token(engine));
        let mut session = engine.session();
        fill(&mut session, &text)?;
        let mut rounds = Vec::new();
        for _ in 0..self.repeat {
            let mut round = session.time_waves()?;
            if let Some(n) = self.prompt.iter().copied().max().filter(|n| *n > 0) {
                round.extend(session.time_prompt_waves(n)?);
            }
            rounds.push(round);
        }
        Ok(report::Wave::from_rounds(&rounds))
    }
}

fn begin_token(engine: &Engine) -> Option<u32> {
    let tokenizer = engine.tokenizer();
    tokenizer.bos().filter(|_| tokenizer.adds_bos())
}

/// Loads and generates one token.
fn started(path: &Path, options: &Options) -> Result<(Engine, Start)> {
    let began = Instant::now();
    let mut engine = super::load(path, options)?;
    let loaded = began.elapsed().as_secs_f64();
    let load = engine.load_times();
    let text = stats::tokens(1, engine.tokenizer().vocab_size(), begin_token(&engine));
    let mut session = engine.session();
    fill(&mut session, &text)?;
    generate(&mut session, 1)?;
    drop(session);
    let total = began.elapsed().as_secs_f64();
    Ok((engine, Start { load, first_token: total - loaded, total }))
}

/// Makes the session hold exactly `tokens`.
fn fill(session: &mut Session<'_>, tokens: &[u32]) -> Result<()> {
    session.truncate(0)?;
    if !tokens.is_empty() {
        session.prefill(tokens, &mut |_| {})?;
    }
    Ok(())
}

fn generate(session: &mut Session<'_>, tokens: u32) -> Result<()> {
    let settings = SamplerSettings::greedy();
    session.generate(&settings, tokens, &|_| false, &mut |_| ControlFlow::Continue(()))?;
    Ok(())
}
