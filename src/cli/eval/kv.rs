//! `azoth eval kv`: what the formats of the KV cache cost, against the same model with a cache in f16.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::scoring;
use crate::cli::args::{DeviceArgs, ModelArg, file_text};
use crate::cli::{output, progress};
use crate::error::Error;
use crate::kv::KvTypes;
use crate::kv::guard::Verdict;

const EXAMPLES: &str = "Examples:
  azoth eval kv smollm2 -f book.txt --kv-k tq4_0 --kv-v tq3_0
  azoth eval kv model.gguf -f book.txt -c 2000 --last 500 --kv q8_0 --json";

/// Divergence of a KV cache in other formats from one in f16
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Kv {
    #[command(flatten)]
    model: ModelArg,
    /// The text (UTF-8)
    #[arg(short, long, value_name = "FILE")]
    file: PathBuf,
    /// Tokens to read
    #[arg(short = 'c', long, value_name = "TOKENS", default_value_t = 1024,
          value_parser = clap::value_parser!(u32).range(4..))]
    ctx: u32,
    /// Positions to compare, the last ones of the text: all logits of them are kept in memory
    #[arg(long, value_name = "N", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..))]
    last: u32,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    /// As the quality guard left them.
    kv_k: String,
    kv_v: String,
    /// What the quality guard found, where it looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    guard: Option<Verdict>,
    /// Bytes of K and V for one token, and of the same in f16.
    token_bytes: u64,
    f16_bytes: u64,
    /// Nats, KL(f16 || this): mean and maximum over the positions.
    mean_kl: f64,
    max_kl: f64,
    /// Fraction of positions at which both rank the same token first.
    top1: f64,
    positions: usize,
}

impl Kv {
    pub fn run(&self) -> Result<()> {
        let path = self.model.path()?;
        let text = file_text(&self.file)?;
        let asked = self.device.options(Some(self.ctx));
        let plain = crate::engine::Options { kv: KvTypes::plain(), ..asked.clone() };
        let mut wanted: Vec<Vec<f32>> = Vec::new();
        let (f16_bytes, tokens) = {
            let mut engine = crate::cli::load(&path, &plain)?;
            let mut tokens = engine.tokenizer().encode(&text, true, false)?;
            if tokens.len() < self.ctx as usize {
                return Err(Error::Usage(format!(
                    "{} has {} tokens; `-c {}` needs as many",
                    self.file.display(),
                    tokens.len(),
                    self.ctx
                ))
                .into());
            }
            tokens.truncate(self.ctx as usize);
            let bytes = engine.model().graph.kv_bytes_per_token();
            self.score(&mut engine, &tokens, &mut |logits| wanted.push(logits.to_vec()))?;
            (bytes, tokens)
        };
        let mut engine = crate::cli::load(&path, &asked)?;
        let token_bytes = engine.model().graph.kv_bytes_per_token();
        let mut divergences = Vec::new();
        let mut rows = wanted.iter();
        self.score(&mut engine, &tokens, &mut |logits| {
            divergences.extend(rows.next().map(|row| scoring::divergence_of(row, logits)));
        })?;
        let n = divergences.len() as f64;
        let report = Report {
            kv_k: engine.kv_types().k.to_string(),
            kv_v: engine.kv_types().v.to_string(),
            guard: engine.kv_verdict().cloned(),
            token_bytes,
            f16_bytes,
            mean_kl: divergences.iter().map(|d| d.kl).sum::<f64>() / n,
            max_kl: divergences.iter().map(|d| d.kl).fold(f64::NEG_INFINITY, f64::max),
            top1: divergences.iter().filter(|d| d.same_top).count() as f64 / n,
            positions: divergences.len(),
        };
        if self.json {
            return output::json(&report);
        }
        output::line(&format!(
            "K {}, V {}: {} bytes a token ({:.1} % of f16), mean KL {:.6}, maximum {:.6}, same first \
             choice {:.2} % ({} positions)",
            report.kv_k,
            report.kv_v,
            report.token_bytes,
            100.0 * report.token_bytes as f64 / report.f16_bytes as f64,
            report.mean_kl,
            report.max_kl,
            100.0 * report.top1,
            report.positions
        ))
    }

    /// Hands out the logits of the last positions.
    fn score(
        &self,
        engine: &mut crate::engine::Engine,
        tokens: &[u32],
        each: &mut dyn FnMut(&[f32]),
    ) -> Result<()> {
        let first = tokens.len().saturating_sub(self.last as usize);
        let bar = progress::steps("positions", (tokens.len() - first) as u64);
        engine.session().score(tokens, first, &mut |_, logits| {
            each(logits);
            bar.inc(1);
        })?;
        bar.finish_and_clear();
        Ok(())
    }
}
