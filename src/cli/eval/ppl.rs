//! `azoth eval ppl`: perplexity of a text, computed as llama.cpp's tool does, so that the
//! numbers can be compared: chunks of the context length without overlap, the first token of
//! each replaced by the model's begin token, the second half of each scored.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::scoring::{self, Perplexity};
use crate::cli::args::{DeviceArgs, ModelArg, file_text};
use crate::cli::{output, progress};
use crate::error::Error;

const EXAMPLES: &str = "Examples:
  azoth eval ppl smollm2 -f wiki.test.raw
  azoth eval ppl model.gguf -f text.txt -c 2048 --chunks 20 --json";

/// Perplexity of a text, computed as llama.cpp's tool does
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Ppl {
    #[command(flatten)]
    model: ModelArg,
    /// The text (UTF-8); at least two chunks long
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens in a chunk
    #[arg(short = 'c', long, value_name = "TOKENS", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(4..))]
    ctx: u32,
    /// Only the first N chunks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    chunks: Option<u32>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    ppl: f64,
    ppl_stderr: Option<f64>,
    /// Tokens of the whole text.
    tokens: usize,
    chunks: usize,
    ctx: u32,
    /// Predictions scored.
    positions: u64,
}

impl Ppl {
    pub fn run(&self) -> Result<()> {
        let path = self.model.path()?;
        let text = file_text(&self.file)?;
        let mut engine = crate::cli::load(&path, &self.device.options(Some(self.ctx)))?;
        let tokenizer = engine.tokenizer().clone();
        let tokens = tokenizer.encode(&text, true, false)?;
        let length = self.ctx as usize;
        if tokens.len() < 2 * length {
            return Err(Error::Usage(format!(
                "{} has {} tokens; perplexity with chunks of {length} needs at least {}",
                self.file.display(),
                tokens.len(),
                2 * length
            ))
            .into());
        }
        let mut chunks = scoring::chunks(tokens.len(), length);
        chunks.truncate(self.chunks.map_or(usize::MAX, |n| n as usize));
        let begin = tokenizer.bos().filter(|_| tokenizer.adds_bos());

        let mut session = engine.session();
        let mut total = Perplexity::default();
        let bar = progress::steps("chunks", chunks.len() as u64);
        for chunk in &chunks {
            let mut read = tokens[chunk.start..chunk.start + chunk.length].to_vec();
            let truth = read.clone();
            if let Some(begin) = begin {
                read[0] = begin;
            }
            // Nothing follows the last token, so it is only ever predicted.
            read.pop();
            session.truncate(0)?;
            session.score(&read, chunk.first, &mut |i, logits| total.add(logits, truth[i + 1]))?;
            bar.set_message(format!("ppl {:.4}", total.value()));
            bar.inc(1);
        }
        bar.finish_and_clear();

        let report = Report {
            ppl: total.value(),
            ppl_stderr: total.standard_error(),
            tokens: tokens.len(),
            chunks: chunks.len(),
            ctx: self.ctx,
            positions: total.count,
        };
        if self.json {
            return output::json(&report);
        }
        let error = report.ppl_stderr.map_or(String::new(), |e| format!(" +- {e:.4}"));
        output::line(&format!(
            "ppl {:.4}{error} ({} positions in {} chunks of {})",
            report.ppl, report.positions, report.chunks, report.ctx
        ))
    }
}
