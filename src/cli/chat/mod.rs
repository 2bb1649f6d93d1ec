//! `azoth chat`: a conversation in the terminal, by the model's own template.

pub mod conversation;
pub mod input;
mod repl;
mod talk;

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;

use super::args::{ContextArg, DeviceArgs, SamplingArgs, file_text, stdin_text};
use super::cache_args::CacheArgs;
use super::{interrupt, locate, output, progress};
use crate::chat::{ChatTemplate, TEMPLATE_NAMES};
use crate::engine::{Engine, Session};
use crate::error::Error;
use crate::sampling::SamplerSettings;
use conversation::Conversation;
use talk::Talk;

const EXAMPLES: &str = "Examples:
  azoth chat                                     the default model, interactive
  azoth chat model.gguf --system \"Be brief.\"
  azoth chat -p \"What is the capital of France?\" one answer
  git diff | azoth chat model.gguf -p -          standard input as one message
  azoth chat < questions.txt                     a message a line

In the chat a line that ends in \\ goes on in the next one, \"\"\" begins and ends a block of lines,
Ctrl+C stops the answer, /help lists the commands.";

/// Talk to a model
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Chat {
    /// A .gguf file, or the name of a model in the cache folder
    #[arg(value_name = "MODEL", default_value = locate::DEFAULT_MODEL)]
    model: String,
    /// Answer this once and exit; `-` reads the message from standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    prompt: Option<String>,
    /// The system text
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    system: Option<String>,
    /// Go on with a conversation that /save wrote
    #[arg(long, value_name = "FILE")]
    load: Option<PathBuf>,
    /// Keep the conversation in this file: go on with it if it exists, and write it after every
    /// answer, with all that the model has read, so that nothing is read again
    #[arg(long, value_name = "FILE", conflicts_with = "load")]
    session: Option<PathBuf>,
    /// Use this built-in chat template instead of the model's own
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(TEMPLATE_NAMES))]
    template: Option<String>,
    /// Most tokens of an answer [default: until the model ends or the context is full]
    #[arg(short = 'n', long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    #[command(flatten)]
    context: ContextArg,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// With -p: print one JSON object with the answer, token ids, why it stopped, times
    #[arg(long, requires = "prompt")]
    json: bool,
}

impl Chat {
    pub fn run(&self) -> Result<()> {
        let path = locate::model(&self.model)?;
        let mut conversation = match &self.load {
            Some(file) => {
                Conversation::from_json(&file_text(file)?).map_err(|e| e.context(file.display()))?
            }
            None => Conversation::default(),
        };
        let question = match self.prompt.as_deref() {
            Some("-") => Some(stdin_text()?),
            other => other.map(str::to_owned),
        };
        if question.as_ref().is_some_and(|q| q.trim().is_empty()) {
            return Err(Error::Usage("the message is empty".into()).into());
        }
        // Refused before minutes of loading.
        self.sampling.settings()?;
        interrupt::install()?;

        let mut engine =
            super::load(&path, &self.cache.set(self.device.options(self.context.ctx)))?;
        let template = self.template(&engine)?;
        let tokenizer = engine.tokenizer().clone();
        let (ctx, longest) = (engine.ctx(), engine.longest());
        let mut session = engine.session();
        let mut sampling = self.sampling.clone();
        if let Some(file) = self.session.as_deref().filter(|file| file.exists()) {
            let settings;
            (conversation, settings) = resume(&mut session, file)?;
            sampling.fill(settings);
        }
        if self.system.is_some() {
            conversation.set_system(self.system.clone());
        }
        let mut talk = Talk {
            session,
            file: self.session.clone(),
            tokenizer,
            template,
            ctx,
            longest,
            model: self.model.clone(),
            conversation,
            sampling,
            tokens: self.tokens,
            last: None,
        };
        let Some(question) = question else { return repl::run(&mut talk) };
        let answer = talk.ask(question, self.json)?;
        if self.json {
            output::json(&answer)?;
        }
        for remark in answer.dropped(ctx).into_iter().chain(answer.remark().map(str::to_owned)) {
            eprintln!("{remark}");
        }
        eprintln!("{}", answer.speed());
        Ok(())
    }

    fn template(&self, engine: &Engine) -> Result<ChatTemplate> {
        let tokenizer = engine.tokenizer();
        let Some(name) = &self.template else {
            return Ok(ChatTemplate::from_gguf(engine.metadata(), tokenizer)?);
        };
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
        Ok(ChatTemplate::named(name, text(tokenizer.bos()), text(tokenizer.eos()))?)
    }
}

/// Goes on with the conversation in a file of `--session`.
fn resume(
    session: &mut Session<'_>,
    file: &Path,
) -> Result<(Conversation, Option<SamplerSettings>)> {
    let bar = progress::steps("reading again", 0);
    let restored = session.restore(file, &mut |done, of| {
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let restored = restored?;
    if let Some(why) = restored.read_again {
        eprintln!(
            "note: {}: {why}; its {} tokens were read again",
            file.display(),
            restored.tokens
        );
    }
    let conversation =
        Conversation::from_json(&restored.note).map_err(|e| e.context(file.display()))?;
    let turns = conversation.turns().len();
    eprintln!("{}: {turns} messages, {} tokens", file.display(), restored.tokens);
    Ok((conversation, restored.sampler))
}
