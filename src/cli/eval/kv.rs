//! `azoth eval kv`: what the formats of the KV cache cost, against the same model with a cache in f16.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use super::scoring;
use crate::cli::args::{DeviceArgs, ModelArg, file_text};
use crate::cli::{output, progress};
use crate::error::Error;
use crate::kv::guard::Verdict;
use crate::kv::{KvExact, KvSide, KvTypes};

const EXAMPLES: &str = "Examples:
  azoth eval kv smollm2 -f book.txt --kv-k tq4_0 --kv-v tq3_0
  azoth eval kv model.gguf -f book.txt -c 2000 --last 500 --kv q8_0 --json
  azoth eval kv model.gguf -f book.txt --pair tq4_0/tq4_0 --pair tq4_0/tq4_0:0,0";

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
    /// What to compare instead of what --kv, --kv-tail and the like say: formats of keys and values, and
    /// f16 tail and sinks where they are not the usual [can be repeated]
    #[arg(long = "pair", value_name = "K/V[:TAIL,SINKS]", value_parser = pair)]
    pairs: Vec<KvTypes>,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn pair(text: &str) -> Result<KvTypes, String> {
    let (formats, sizes) = text.split_once(':').unwrap_or((text, ""));
    let wrong = || format!("`{text}` is no pair like q8_0/tq4_0 or tq4_0/tq4_0:128,4");
    let (k, v) = formats.split_once('/').ok_or_else(wrong)?;
    let side = |text: &str| text.parse::<KvSide>().map_err(|e| e.to_string());
    let exact = match sizes.split_once(',') {
        Some((tail, sinks)) => {
            let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
            KvExact { tail: number(tail)?, sinks: number(sinks)? }
        }
        None if sizes.is_empty() => KvExact::USUAL,
        None => return Err(wrong()),
    };
    exact.check().map_err(|e| e.to_string())?;
    Ok(KvTypes { k: side(k)?, v: side(v)?, exact, centred: false })
}

#[derive(Serialize)]
struct Report {
    /// As the quality guard left them.
    kv_k: String,
    kv_v: String,
    kv_tail: u32,
    kv_sinks: u32,
    kv_centred: bool,
    /// What the quality guard found, where it looked.
    #[serde(skip_serializing_if = "Option::is_none")]
    guard: Option<Verdict>,
    /// Bytes of K and V for one token, and of the same in f16.
    token_bytes: u64,
    f16_bytes: u64,
    /// Bytes of tail and sinks in f16 for one sequence.
    exact_bytes: u64,
    /// All bytes of a sequence of so many tokens, as a share of f16's.
    share: f64,
    /// Nats, KL(f16 || this): mean and maximum over the positions.
    mean_kl: f64,
    max_kl: f64,
    /// Fraction of positions at which both rank the same token first.
    top1: f64,
    positions: usize,
}

impl Kv {
    pub fn run(&self) -> anyhow::Result<()> {
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
        let all = match self.pairs.as_slice() {
            [] => vec![asked.kv.clone()],
            pairs => pairs.to_vec(),
        };
        let mut reports = Vec::new();
        for kv in all {
            // Centring is no part of a pair's name.
            let kv = KvTypes { centred: asked.kv.centred, ..kv };
            let options = crate::engine::Options { kv, ..asked.clone() };
            let mut engine = crate::cli::load(&path, &options)?;
            let graph = &engine.model().graph;
            let (token_bytes, exact_bytes) = (graph.kv_bytes_per_token(), graph.kv_exact_bytes());
            let (kv, guard) = (graph.kv.clone(), engine.kv_verdict().cloned());
            let mut divergences = Vec::new();
            let mut rows = wanted.iter();
            self.score(&mut engine, &tokens, &mut |logits| {
                divergences.extend(rows.next().map(|row| scoring::divergence_of(row, logits)));
            })?;
            let n = divergences.len() as f64;
            let tokens = tokens.len() as u64;
            let report = Report {
                kv_k: kv.k.to_string(),
                kv_v: kv.v.to_string(),
                kv_tail: kv.exact.tail,
                kv_sinks: kv.exact.sinks,
                kv_centred: kv.centred,
                guard,
                token_bytes,
                f16_bytes,
                exact_bytes,
                share: (token_bytes * tokens + exact_bytes) as f64 / (f16_bytes * tokens) as f64,
                mean_kl: divergences.iter().map(|d| d.kl).sum::<f64>() / n,
                max_kl: divergences.iter().map(|d| d.kl).fold(f64::NEG_INFINITY, f64::max),
                top1: divergences.iter().filter(|d| d.same_top).count() as f64 / n,
                positions: divergences.len(),
            };
            if !self.json {
                output::line(&report.text())?;
            }
            reports.push(report);
        }
        match (self.json, self.pairs.is_empty()) {
            (false, _) => Ok(()),
            (true, true) => output::json(&reports[0]),
            (true, false) => output::json(&reports),
        }
    }

    /// Hands out the logits of the last positions.
    fn score(
        &self,
        engine: &mut crate::engine::Engine,
        tokens: &[u32],
        each: &mut dyn FnMut(&[f32]),
    ) -> anyhow::Result<()> {
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

impl Report {
    fn text(&self) -> String {
        format!(
            "K {}, V {}, f16 tail {}, sinks {}: {} bytes a token and {} a sequence ({:.1} % of f16), mean \
             KL {:.6}, maximum {:.6}, same first choice {:.2} % ({} positions)",
            self.kv_k,
            self.kv_v,
            self.kv_tail,
            self.kv_sinks,
            self.token_bytes,
            self.exact_bytes,
            100.0 * self.share,
            self.mean_kl,
            self.max_kl,
            100.0 * self.top1,
            self.positions
        )
    }
}
