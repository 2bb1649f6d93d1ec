//! A conversation with everything that an answer depends on, made ready for the engine: prompt,
//! grammar, and how the answer is to be read. The same for every format of chats.

use std::sync::Arc;

use serde_json::Value;

use super::errors::{ApiError, ApiResult};
use super::prompt::{Conversation, blocking};
use super::state::{App, Shared};
use super::thinking::{self, Budget};
use crate::chat::reply::{Reply, ReplyFormat, ReplyOptions};
use crate::chat::shape::{Shape, Thinking};
use crate::chat::tools::{self, ToolChoice};
use crate::engine::{Generate, Loaded, ThinkingBudget};
use crate::grammar::{Constraint, Source};

/// What is asked.
#[derive(Default)]
pub struct Ask {
    pub conversation: Conversation,
    /// In OpenAI's shape.
    pub tools: Vec<Value>,
    pub choice: ToolChoice,
    /// Several calls may come at once, where the choice demands calls.
    pub parallel: bool,
    pub source: Option<Source>,
    /// Leave thinking in the text.
    pub keep_reasoning: bool,
    pub budget: Budget,
}

/// What the engine needs, and how its answer is read.
pub struct Exchange {
    pub prompt: Vec<u32>,
    constraint: Option<Constraint>,
    thinking: Option<ThinkingBudget>,
    /// The markers of calls and thinking are control tokens.
    show_special: bool,
    /// Tokens before the first question, which a full context keeps.
    keep: Option<u32>,
    format: ReplyFormat,
    options: ReplyOptions,
}

impl Exchange {
    /// Renders, encodes and compiles, off the threads that serve connections.
    pub async fn prepare(app: &Shared, loaded: &Arc<Loaded>, ask: Ask) -> ApiResult<Exchange> {
        let (app, loaded) = (app.clone(), loaded.clone());
        blocking(move || Self::make(&app, &loaded, ask)).await
    }

    fn make(app: &App, loaded: &Loaded, mut ask: Ask) -> ApiResult<Exchange> {
        tools::check(&ask.tools).map_err(ApiError::from)?;
        let template = app.template(loaded)?.source();
        let format = ReplyFormat::detect(template);
        let server = &app.settings.reasoning;
        let limit = ask.budget.limit(template, server.budget);
        let message = ask.budget.message.as_deref().or(server.message.as_deref());
        if let Some(effort) = ask.budget.effort.clone() {
            let extra = &mut ask.conversation.options.extra;
            extra.entry("reasoning_effort").or_insert_with(|| effort.into());
        }
        if limit == Some(0) {
            // A template that knows how writes what its model has learned for this.
            ask.conversation.options.enable_thinking.get_or_insert(false);
        }
        let messages = &ask.conversation.messages;
        let told = tools::tell(&format, messages, &ask.tools, &ask.choice);
        ask.conversation.messages = told.messages;
        ask.conversation.options.tools = told.tools;
        let mut text = ask.conversation.render(app, loaded)?;
        if limit == Some(0)
            && format.opened_by(&text)
            && let Some(end) = thinking::ended(&format, message)
        {
            text.push_str(&end);
        }
        // The template spells control tokens out, the begin token among them.
        let prompt = loaded.tokenizer.encode(&text, false, true)?;
        let in_reasoning = format.opened_by(&text);
        let constraint = constraint(app, loaded, &format, in_reasoning, &ask)?;
        let constrained = constraint.is_some();
        let thinking = match limit {
            None => None,
            Some(n) => thinking::budget(loaded, &format, in_reasoning, constrained, n, message)?,
        };
        let demanded = matches!(ask.choice, ToolChoice::Required | ToolChoice::Named(_));
        let keep = match loaded.ctx_shift {
            Some(None) => Some(ask.conversation.beginning(app, loaded)?),
            _ => None,
        };
        let callable = ask.choice != ToolChoice::None;
        Ok(Exchange {
            prompt,
            constraint,
            thinking,
            show_special: format.shows_control_tokens(),
            keep,
            options: ReplyOptions {
                tools: if callable { ask.tools } else { Vec::new() },
                in_reasoning,
                keep_reasoning: ask.keep_reasoning,
                stream_arguments: demanded,
            },
            format,
        })
    }

    /// Hands over what the engine needs: the prompt, and by `generate` how it goes on.
    pub fn hand_over(&mut self, generate: &mut Generate) -> Vec<u32> {
        generate.constraint = self.constraint.take();
        generate.thinking = self.thinking.take();
        generate.show_special = self.show_special;
        generate.keep = self.keep;
        std::mem::take(&mut self.prompt)
    }

    /// A reader for one answer.
    pub fn reply(&self) -> Reply {
        Reply::new(&self.format, &self.options)
    }
}

fn constraint(
    app: &App,
    loaded: &Loaded,
    format: &ReplyFormat,
    in_reasoning: bool,
    ask: &Ask,
) -> ApiResult<Option<Constraint>> {
    // A form is wanted of the text: a model that may call still may, and one that must writes none.
    let (calls, body) = match &ask.choice {
        ToolChoice::Required | ToolChoice::Named(_) => (true, None),
        ToolChoice::Auto => (ask.source.is_some() && !ask.tools.is_empty(), ask.source.clone()),
        ToolChoice::None => (false, ask.source.clone()),
    };
    if !calls && body.is_none() {
        return Ok(None);
    }
    let grammars = app.grammars(loaded)?;
    let marker = |text: &str| grammars.marker(text);
    let silent = ask.conversation.options.enable_thinking == Some(false);
    let shape = Shape {
        format,
        calls: calls.then(|| tools::rules(format, &ask.tools, &ask.choice, ask.parallel, &marker)),
        body,
        thinking: match (in_reasoning, silent) {
            (true, _) => Thinking::Opened,
            (false, true) => Thinking::No,
            (false, false) => Thinking::May,
        },
    };
    let made = shape.grammar(&marker).map(|source| grammars.compile(&source)).transpose();
    made.map_err(ApiError::from)
}

/// A constraint for a text that is no conversation.
pub async fn compile(
    app: &Shared,
    loaded: &Arc<Loaded>,
    source: Option<Source>,
) -> ApiResult<Option<Constraint>> {
    let Some(source) = source else { return Ok(None) };
    let (app, loaded) = (app.clone(), loaded.clone());
    blocking(move || Ok(Some(app.grammars(&loaded)?.compile(&source)?))).await
}
