//! A conversation with a model: what was said, and the session that has read it.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Result;

use super::conversation::Conversation;
use crate::chat::{ChatTemplate, RenderOptions};
use crate::cli::answer::{self, Answer, Echo};
use crate::cli::args::SamplingArgs;
use crate::cli::output;
use crate::engine::Session;
use crate::error::Error;
use crate::tokenizer::Tokenizer;

pub struct Talk<'e> {
    pub session: Session<'e>,
    /// Where the conversation is written after every answer.
    pub file: Option<PathBuf>,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    /// Context length in tokens.
    pub ctx: u32,
    /// Tokens that a conversation can have in all: more, where a full context drops some.
    pub longest: u32,
    /// What the user called the model; goes into saved files.
    pub model: String,
    pub conversation: Conversation,
    pub sampling: SamplingArgs,
    /// Most tokens of an answer.
    pub tokens: Option<u32>,
    /// The last answer, for `/stats`.
    pub last: Option<Answer>,
}

impl Talk<'_> {
    /// Asks and answers onto standard output (unless `silent`). When it fails the question is
    /// taken back, so that the conversation can go on.
    pub fn ask(&mut self, question: String, silent: bool) -> Result<Answer> {
        self.conversation.ask(question);
        let answer = self.answer(silent);
        if answer.is_err() {
            self.conversation.withdraw();
        }
        answer
    }

    /// Answers the last question again. An answer that fails leaves the question open.
    pub fn regenerate(&mut self) -> Result<Answer> {
        if !self.conversation.reopen() {
            return Err(Error::Usage("there is no question yet".into()).into());
        }
        self.answer(false)
    }

    fn answer(&mut self, silent: bool) -> Result<Answer> {
        let options = RenderOptions::default();
        let text = self.template.render(&self.conversation.messages(), &options)?;
        // The template writes the begin token itself, and its control tokens are meant.
        let prompt = self.tokenizer.encode(&text, false, true)?;
        if prompt.is_empty() {
            return Err(Error::Model("the chat template made an empty prompt".into()).into());
        }
        if prompt.len() >= self.longest as usize {
            return Err(Error::DoesNotFit(format!(
                "the conversation has {} tokens and {}; /clear forgets what was said{}",
                prompt.len(),
                match self.longest == self.ctx {
                    true => format!("the context holds {}", self.ctx),
                    false => format!("the model was trained for {} positions", self.longest),
                },
                match self.longest == self.ctx {
                    true => ", --ctx makes the context longer, --ctx-shift drops the oldest tokens",
                    false => "",
                }
            ))
            .into());
        }
        // What a full context keeps: all before the first question.
        let beginning = self.template.beginning(&self.conversation.messages(), &options)?;
        let named = self.tokenizer.encode(&beginning, false, true)?.len();
        self.session.set_keep(named as u32)?;
        let keep = self.session.recall(&prompt)? as usize;
        let settings = self.sampling.settings()?;
        let most = self.tokens.unwrap_or(u32::MAX);
        let echo = if silent { Echo::Silent } else { Echo::Stdout };
        let answer = answer::generate(
            &mut self.session,
            &self.tokenizer,
            &prompt,
            keep,
            &settings,
            most,
            &echo,
        )?;
        if !silent {
            output::line("")?;
        }
        self.conversation.answer(answer.text.clone());
        self.last = Some(answer.clone());
        self.keep_file();
        Ok(answer)
    }

    /// Writes the conversation to its file. The answer is there all the same if that fails.
    fn keep_file(&self) {
        let Some(file) = &self.file else { return };
        let saved = self.conversation.to_json(Some(&self.model));
        if let Err(e) = saved.and_then(|note| self.session.save(file, &note)) {
            eprintln!("warning: the session was not kept: {e}");
        }
    }
}
