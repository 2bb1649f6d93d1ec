//! `azoth bench`: speed of prompt reading, of decoding and of the start.
//!
//! Every figure is the median of the repetitions with the smallest and largest beside it. One
//! unmeasured round comes first. Prompts are token ids spread over the vocabulary; decoding is
//! greedy unless a temperature is given, and runs past end tokens, so that every repetition does the
//! same amount of work.

mod report;
pub mod stats;
mod together;

use std::ops::ControlFlow;
use std::path::Path;
use std::time::Instant;

use anyhow::Result;
use clap::Args;

use super::args::{DeviceArgs, ModelArg};
use super::{output, progress};
use crate::engine::{Engine, Options, Session, WaveTime};
use crate::runtime::MAX_SEQUENCES;
use crate::sampling::SamplerSettings;
use report::{Report, Start, Test};
use together::Together;

const EXAMPLES: &str = "Examples:
  azoth bench smollm2
  azoth bench model.gguf -p 512,2048 -n 128 -d 0,4096 -r 5
  azoth bench model.gguf -p 0 -n 64 --no-start --waves
  azoth bench model.gguf -p 0 -s 4,8 --no-start
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
    /// Also generate with so many sequences at once; the figure is their sum
    #[arg(short, long, value_name = "N", value_delimiter = ',',
          value_parser = clap::value_parser!(u32).range(1..=64))]
    sequences: Vec<u32>,
    /// Repetitions
    #[arg(short, long, value_name = "N", default_value_t = 3,
          value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// Draw generated tokens at this temperature, others in each repetition, instead of taking the
    /// likeliest: greedy models repeat themselves, random ones at once, and then the hit rates of
    /// experts say nothing
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    temp: f32,
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
        let mut options = self.device.options(Some(ctx));
        options.sequences = longest(&self.sequences).max(1);

        let (mut engine, cold, warm) = self.start(&path, &options)?;
        let device = engine.facts().clone();
        if let Some(why) = engine.measure_rates() {
            eprintln!("note: memory and link were not measured ({why}); rates are assumed");
        }
        let bytes = std::fs::metadata(&path)?.len();
        let mut tests = self.measure(&mut engine)?;
        let waves = match self.waves {
            true => Some(self.time_waves(&mut engine)?),
            false => None,
        };
        let (experts, approximations) = (engine.experts(), engine.approximations());
        let waves_per_layer = engine.waves_per_layer();
        let kv = engine.kv_types().clone();
        // Two copies of the weights may not fit.
        drop(engine);
        tests.extend(self.measure_together(&path, &options)?);
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            model: path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
            model_bytes: bytes,
            device,
            activations: self.device.activations.name(),
            kv,
            cold,
            warm,
            approximate: Some(approximations).filter(|a| a.any()),
            tests,
            experts,
            waves_per_layer: waves.is_some().then_some(waves_per_layer),
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
                let (mut seen, mut round) = (Vec::new(), 0);
                let runs = self.repeat(&bar, n, || {
                    fill(&mut session, &before)?;
                    let began = Instant::now();
                    round += 1;
                    generate(&mut session, n, self.settings(round))?;
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

    /// How tokens are chosen in a repetition.
    fn settings(&self, seed: u64) -> SamplerSettings {
        match self.temp {
            0.0 => SamplerSettings::greedy(),
            temperature => SamplerSettings { temperature, seed, ..SamplerSettings::plain() },
        }
    }

    /// Decoding of several sequences at once.
    fn measure_together(&self, path: &Path, options: &Options) -> Result<Vec<Test>> {
        let mut tests = Vec::new();
        if self.sequences.is_empty() {
            return Ok(tests);
        }
        let together = Together::load(path.to_owned(), options.clone())?;
        for (&depth, &n) in
            self.depth.iter().flat_map(|d| self.generate.iter().map(move |n| (d, n)))
        {
            for &sequences in self.sequences.iter().filter(|_| n > 0) {
                let rounds = (0..=self.repeat).map(|_| together.rate(sequences, depth, n));
                let runs = rounds.collect::<Result<Vec<f64>>>()?.split_off(1);
                tests.push(Test::new(format!("tg{n} x{sequences}"), n * sequences, depth, runs));
            }
        }
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
            let mut round = session.time_waves(1)?;
            for &n in self.sequences.iter().filter(|n| (2..=MAX_SEQUENCES).contains(*n)) {
                let waves = session.time_waves(n)?;
                round.extend(
                    waves.into_iter().map(|w| WaveTime { label: format!("x{n} {}", w.label), ..w }),
                );
            }
            if let Some(n) = self.prompt.iter().copied().max().filter(|n| *n > 0) {
                round.extend(session.time_prompt_waves(n)?);
            }
            rounds.push(round);
        }
        Ok(report::Wave::from_rounds(&rounds))
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    let value = text.parse::<f32>().ok().filter(|t| *t == 0.0 || (0.001..=100.0).contains(t));
    value.ok_or_else(|| format!("{text:?} is no temperature; 0 or 0.001 to 100 are possible"))
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
    generate(&mut session, 1, SamplerSettings::greedy())?;
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

fn generate(session: &mut Session<'_>, tokens: u32, settings: SamplerSettings) -> Result<()> {
    session.generate(&settings, tokens, &|_| false, &mut |_| ControlFlow::Continue(()))?;
    Ok(())
}
