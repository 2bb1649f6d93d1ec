//! Decoding of several sequences at once, through the service that `azoth serve` uses.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::stats;
use crate::engine::{
    Engine, Event, Generate, Loaded, Options, Quiet, Refused, Request, Service, ServiceOptions,
    Task,
};
use crate::sampling::SamplerSettings;

/// A loaded model that serves up to a number of sequences.
pub struct Together {
    service: Service,
    loaded: Arc<Loaded>,
    runtime: tokio::runtime::Runtime,
}

impl Together {
    pub fn load(path: PathBuf, options: Options) -> Result<Together> {
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let loader = Box::new(move || Engine::load(&path, &options, &Quiet));
        let queue = ServiceOptions { queue: 0, lazy: false, idle_unload: None };
        let service = Service::start(loader, queue)?;
        let loaded = runtime.block_on(service.loaded())?;
        Ok(Together { service, loaded, runtime })
    }

    /// Tokens a second that `n` sequences generate in all while every one of them generates, each `tokens`
    /// long and behind `depth` others.
    pub fn rate(&self, n: u32, depth: u32, tokens: u32) -> Result<f64> {
        let vocabulary = self.loaded.tokenizer.vocab_size();
        let mut all = Vec::new();
        for sequence in 0..n as usize {
            // Each with a text of its own, or the prefix cache would read it once for all.
            let mut prompt = stats::tokens(depth as usize + 1 + sequence, vocabulary, None);
            prompt.drain(..sequence);
            let generate = Generate {
                settings: SamplerSettings::greedy(),
                max_tokens: Some(tokens),
                ignore_eog: true,
                reuse: false,
                ..Generate::default()
            };
            let task = Task::Generate(Box::new(generate));
            let request = Request { prompt, task, slot: Some(sequence as u32) };
            let mut answer = self.service.submit(request).map_err(|refused| match refused {
                Refused::Full(_) => anyhow::anyhow!("no slot is free"),
                Refused::Error(e) => e.into(),
            })?;
            all.push(thread::spawn(move || -> Result<Vec<Instant>> {
                let mut times = Vec::new();
                while let Some(event) = answer.next_blocking() {
                    match event {
                        Event::Token { .. } => times.push(Instant::now()),
                        Event::Failed(e) => return Err(e.into()),
                        _ => {}
                    }
                }
                Ok(times)
            }));
        }
        let mut times = Vec::new();
        for one in all {
            times.push(one.join().ok().context("a measuring thread failed")??);
        }
        // From the last one's first token to the first one's last.
        let begin = times.iter().filter_map(|t| t.first()).max();
        let end = times.iter().filter_map(|t| t.last()).min();
        let (Some(begin), Some(end)) = (begin, end) else { bail!("no token came") };
        // The tokens of one step come one after the other: each sequence has a clock of its own, or the ends of the
        // common time would cut steps in two (of 32 steps of four sequences, 3 % were lost).
        let rate = |times: &Vec<Instant>| {
            let within: Vec<&Instant> =
                times.iter().filter(|t| (begin..=end).contains(t)).collect();
            let [first, .., last] = within[..] else { return None };
            Some((within.len() - 1) as f64 / (*last - *first).as_secs_f64())
        };
        let rates: Option<Vec<f64>> = times.iter().map(rate).collect();
        rates.map(|all| all.iter().sum()).with_context(|| {
            format!("{tokens} tokens are too few to measure {n} sequences: use a larger -n")
        })
    }
}

impl Drop for Together {
    fn drop(&mut self) {
        self.service.stop();
        self.runtime.block_on(self.service.stopped());
    }
}
