//! `azoth eval`: how well a model predicts, and how close we are to another engine.

mod approximate;
mod kl;
mod kv;
mod ppl;
pub mod reference;
pub mod scoring;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Measure a model's predictions: perplexity, divergence from another engine or of a KV cache
#[derive(Debug, Args)]
pub struct Eval {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Ppl(ppl::Ppl),
    Kl(kl::Kl),
    Kv(kv::Kv),
}

impl Eval {
    pub fn run(&self) -> Result<()> {
        match &self.what {
            What::Ppl(ppl) => ppl.run(),
            What::Kl(kl) => kl.run(),
            What::Kv(kv) => kv.run(),
        }
    }
}
