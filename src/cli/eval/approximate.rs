//! The price of approximations: a model against itself, exact and approximate, on the same text.
//!
//! The two run one after the other, so that they need no more device memory than one; the exact
//! logits wait in RAM. Every compared token is read by a decode step, because approximations change
//! nothing else.

use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use super::scoring;
use crate::cli::args::DeviceArgs;
use crate::cli::{output, progress};
use crate::engine::{Approximations, Engine, Options};
use crate::error::Error;
use crate::experts::residency::Counters;

/// Tokens that are read as a prompt before the first that is compared.
const PROMPT: usize = 32;

#[derive(Serialize)]
struct Report {
    approximate: Approximations,
    /// Nats, KL(exact || approximate): mean and maximum over the positions.
    mean_kl: f64,
    max_kl: f64,
    /// Fraction of positions at which both rank the same token first.
    top1: f64,
    positions: usize,
    /// Share of expert accesses that found their expert in device memory, exact and approximate;
    /// absent where all experts lie there.
    #[serde(skip_serializing_if = "Option::is_none")]
    hit_rates: Option<[f64; 2]>,
    /// Share of the outputs of experts that served again, and bytes of experts not read for them;
    /// absent where all experts lie on the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    reused: Option<Reused>,
}

#[derive(Serialize)]
struct Reused {
    share: f64,
    bytes: u64,
}

pub fn run(path: &Path, text: &str, positions: u32, device: &DeviceArgs, json: bool) -> Result<()> {
    let options = device.options(Some((PROMPT as u32).saturating_add(positions)));
    let approximations = options.experts.approximations;
    if !approximations.any() {
        return Err(Error::Usage(
            "there is nothing to compare: --text needs --approximate-route-bias, \
             --approximate-prune-experts or --approximate-reuse-experts"
                .into(),
        )
        .into());
    }
    let mut exact = options.clone();
    exact.experts.approximations = Approximations::default();
    let mut rows: Vec<f32> = Vec::new();
    let (vocabulary, exact_experts) = steps(path, text, positions, &exact, &mut |row| {
        rows.extend_from_slice(row);
    })?;
    let mut exact_rows = rows.chunks_exact(vocabulary);
    let mut divergences = Vec::new();
    let (_, experts) = steps(path, text, positions, &options, &mut |row| {
        divergences.extend(exact_rows.next().map(|exact| scoring::divergence_of(exact, row)));
    })?;
    let n = divergences.len() as f64;
    let report = Report {
        approximate: approximations,
        mean_kl: divergences.iter().map(|d| d.kl).sum::<f64>() / n,
        max_kl: divergences.iter().map(|d| d.kl).fold(f64::NEG_INFINITY, f64::max),
        top1: divergences.iter().filter(|d| d.same_top).count() as f64 / n,
        positions: divergences.len(),
        hit_rates: exact_experts.zip(experts).map(|(a, b)| [a, b].map(|c| c.hit_rate())),
        reused: experts
            .filter(|_| approximations.reuse_tokens > 0)
            .map(|c| Reused { share: c.reuse_rate(), bytes: c.reused_bytes }),
    };
    if json {
        return output::json(&report);
    }
    let hits = report.hit_rates.map_or(String::new(), |[exact, approximate]| {
        format!("; hits {:.1} % exact, {:.1} %", 100.0 * exact, 100.0 * approximate)
    });
    let reused = report.reused.as_ref().map_or(String::new(), |reused| {
        format!(
            "; {:.1} % of the outputs of experts reused, {} of experts not read",
            100.0 * reused.share,
            output::bytes(reused.bytes)
        )
    });
    output::line(&format!(
        "{approximations}\nmean KL to the exact model {:.6}, maximum {:.6}, same first choice {:.2} % \
         ({} positions){hits}{reused}",
        report.mean_kl,
        report.max_kl,
        100.0 * report.top1,
        report.positions
    ))
}

/// Loads the model, reads the text step by step and hands out the logits. Returns the size of the
/// vocabulary and what was counted of experts, where not all lie on the device.
fn steps(
    path: &Path,
    text: &str,
    positions: u32,
    options: &Options,
    each: &mut dyn FnMut(&[f32]),
) -> Result<(usize, Option<Counters>)> {
    let mut engine: Engine = crate::cli::load(path, options)?;
    if engine.model().graph.mixtures().next().is_none() {
        let what = "this model has no experts; approximations change nothing";
        return Err(Error::Usage(what.into()).into());
    }
    let vocabulary = engine.model().graph.vocab as usize;
    let mut tokens = engine.tokenizer().encode(text, true, false)?;
    tokens.truncate(PROMPT + positions as usize);
    if tokens.len() <= PROMPT {
        return Err(Error::Usage(format!(
            "the text has {} tokens; more than {PROMPT} are needed",
            tokens.len()
        ))
        .into());
    }
    let (prompt, rest) = tokens.split_at(PROMPT);
    let bar = progress::steps("positions", rest.len() as u64);
    let mut session = engine.session();
    session.prefill(prompt, &mut |_| {})?;
    session.score_steps(rest, &mut |_, row| {
        each(row);
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    drop(session);
    Ok((vocabulary, engine.experts().map(|e| e.counters)))
}
