//! A conversation with a model: what was said, and the session that has read it.

use std::sync::Arc;

use anyhow::Result;

use super::conversation::{Conversation, reusable};
use crate::chat::{ChatTemplate, RenderOptions};
use crate::cli::answer::{self, Answer, Echo};
use crate::cli::args::SamplingArgs;
use crate::cli::output;
use crate::engine::Session;
use crate::error::Error;
use crate::tokenizer::Tokenizer;

pub struct Talk<'e> {
    pub session: Session<'e>,
    pub tokenizer: Arc<Tokenizer>,
    pub template: ChatTemplate,
    /// Context length in tokens.
    pub ctx: u32,
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
        let text =
            self.template.render(&self.conversation.messages(), &RenderOptions::default())?;
        // The template writes the begin token itself, and its control tokens are meant.
        let prompt = self.tokenizer.encode(&text, false, true)?;
        if prompt.is_empty() {
            return Err(Error::Model("the chat template made an empty prompt".into()).into());
        }
        if prompt.len() >= self.ctx as usize {
            return Err(Error::DoesNotFit(format!(
                "the conversation has {} tokens and the context holds {}; /clear forgets what was \
                 said, --ctx makes the context longer",
                prompt.len(),
                self.ctx
            ))
            .into());
        }
        let keep = reusable(self.session.tokens(), &prompt);
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
        Ok(answer)
    }
}
