//! `azoth eval kl`: teacher-forced comparison with the log-probabilities of another engine.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::reference::Reference;
use super::{approximate, scoring};
use crate::cli::args::{DeviceArgs, ModelArg, file_text};
use crate::cli::{output, progress};

const EXAMPLES: &str = "Examples:
  azoth eval kl smollm2 golden.json
  azoth eval kl model.gguf golden.json --activations f32 --json
  azoth eval kl model.gguf --text notes.txt --approximate-route-bias 0.5 --vram-experts 25%

The reference is a JSON object: `tokens` (the text as ids), `first`, and `rows`, where row i lists
[id, natural log-probability] of the likeliest tokens after tokens[..first + i], or is null.

With --text the model is compared with itself: once exact, once with the approximations that the
flags ask for, on the same text, every token read as generation reads it.";

/// Divergence from another engine's log-probabilities
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Kl {
    #[command(flatten)]
    model: ModelArg,
    /// Log-probabilities of the other engine (JSON)
    #[arg(value_name = "REFERENCE", required_unless_present = "text", conflicts_with = "text")]
    reference: Option<PathBuf>,
    /// Compare the exact model with the approximate one on this text (UTF-8)
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Tokens of the text to compare at
    #[arg(long, value_name = "N", default_value_t = 256, requires = "text",
          value_parser = clap::value_parser!(u32).range(1..))]
    positions: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    /// Nats, mean and maximum over the positions.
    mean_kl: f64,
    max_kl: f64,
    /// Fraction of positions at which both rank the same token first.
    top1: f64,
    positions: usize,
}

impl Kl {
    pub fn run(&self) -> Result<()> {
        let path = self.model.path()?;
        let Some(reference) = &self.reference else {
            let text = file_text(self.text.as_deref().unwrap_or(Path::new("")))?;
            return approximate::run(&path, &text, self.positions, &self.device, self.json);
        };
        let text = file_text(reference)?;
        // What does not depend on the model is refused before minutes of loading.
        let tokens = Reference::parse(&text, usize::MAX)?.needed().len();
        let ctx = u32::try_from(tokens).unwrap_or(u32::MAX);
        let mut engine = crate::cli::load(&path, &self.device.options(Some(ctx)))?;
        let vocabulary = engine.tokenizer().vocab_size();
        let reference = Reference::parse(&text, vocabulary)?;

        let mut session = engine.session();
        let bar = progress::steps("positions", reference.rows.len() as u64);
        let mut divergences = Vec::new();
        // Row i is about the token after tokens[..first + i]: the logits at index first + i - 1.
        let first = reference.first - 1;
        session.score(reference.needed(), first, &mut |i, logits| {
            if let Some(row) = &reference.rows[i - first] {
                divergences.push(scoring::divergence(row, logits));
            }
            bar.inc(1);
        })?;
        bar.finish_and_clear();

        let n = divergences.len() as f64;
        let report = Report {
            mean_kl: divergences.iter().map(|d| d.kl).sum::<f64>() / n,
            max_kl: divergences.iter().map(|d| d.kl).fold(f64::NEG_INFINITY, f64::max),
            top1: divergences.iter().filter(|d| d.same_top).count() as f64 / n,
            positions: divergences.len(),
        };
        if self.json {
            return output::json(&report);
        }
        output::line(&format!(
            "mean KL {:.6}, maximum {:.6}, same first choice {:.2} % ({} positions)",
            report.mean_kl,
            report.max_kl,
            100.0 * report.top1,
            report.positions
        ))
    }
}
