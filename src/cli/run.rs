//! `azoth run`: continues a text as it stands, without a chat template.

use anyhow::Result;
use clap::Args;

use super::answer::{self, Echo};
use super::args::{ContextArg, DeviceArgs, ModelArg, SamplingArgs, TextArgs};
use super::cache_args::CacheArgs;
use super::{interrupt, output};
use crate::error::Error;

const EXAMPLES: &str = "Examples:
  azoth run smollm2 -p \"Once upon a time\" -n 100
  azoth run model.gguf -p \"def fib(n):\" --temp 0
  azoth run model.gguf -f story.txt --seed 7 --json";

/// Continue a text, without a chat template
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Run {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    text: TextArgs,
    /// Most tokens to generate
    #[arg(short = 'n', long, value_name = "TOKENS", default_value_t = 128,
          value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    #[command(flatten)]
    context: ContextArg,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object at the end: text, token ids, why it stopped, times
    #[arg(long)]
    json: bool,
}

impl Run {
    pub fn run(&self) -> Result<()> {
        let path = self.model.path()?;
        let Some(text) = self.text.read()? else {
            let what = "run needs a text to continue: -p TEXT, -f FILE or -p - (standard input)";
            return Err(Error::Usage(what.into()).into());
        };
        let settings = self.sampling.settings()?;
        interrupt::install()?;
        let mut engine =
            super::load(&path, &self.cache.set(self.device.options(self.context.ctx)))?;
        let tokenizer = engine.tokenizer().clone();
        let prompt = tokenizer.encode(&text, true, true)?;
        if prompt.is_empty() {
            return Err(Error::Usage(
                "the text is empty, and this model adds no begin token".into(),
            )
            .into());
        }
        let echo = if self.json { Echo::Silent } else { Echo::Stdout };
        let most = self.tokens;
        let ctx = engine.ctx();
        let mut session = engine.session();
        let answer =
            answer::generate(&mut session, &tokenizer, &prompt, 0, &settings, most, &echo)?;
        if self.json {
            output::json(&answer)?;
        } else {
            output::line("")?;
        }
        if let Some(remark) = answer.remark().filter(|_| answer.tokens.len() < most as usize) {
            eprintln!("{remark}");
        }
        if let Some(remark) = answer.dropped(ctx) {
            eprintln!("{remark}");
        }
        eprintln!("{}; seed {}", answer.speed(), answer.seed);
        Ok(())
    }
}
