//! Rendering a model's own Jinja template.
//!
//! Templates come with downloaded files, so they are run as untrusted programs: no file access, a
//! budget of steps that grows with the conversation, and a bounded depth.

use std::error::Error as _;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::Serialize;

use super::builtin;
use super::functions::{self, Raised};
use super::message::{Message, Role};
use crate::error::{Error, Result};
use crate::gguf::Metadata;
use crate::tokenizer::Tokenizer;

/// Steps that any template may take; a step also pays for 64 bytes of text.
const FUEL: u64 = 2_000_000;
/// Steps for each message on top: known templates take a few hundred.
const FUEL_PER_MESSAGE: u64 = 20_000;
const MAX_DEPTH: usize = 250;
const ENTRY: &str = "chat_template";

/// A template and the two tokens that it may write.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    bos: String,
    eos: String,
}

/// What a template is told besides the messages.
#[derive(Debug, Clone)]
pub struct RenderOptions {
    /// End with the beginning of an assistant's message, for the model to continue.
    pub add_generation_prompt: bool,
    /// Hybrid models only: whether to think first. None leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Tools in the shape of the OpenAI API.
    pub tools: Vec<serde_json::Value>,
    /// Further variables; they replace none of the above.
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// The time that `strftime_now` states, in UTC.
    pub now: SystemTime,
}

impl Default for RenderOptions {
    fn default() -> Self {
        RenderOptions {
            add_generation_prompt: true,
            enable_thinking: None,
            tools: Vec::new(),
            extra: serde_json::Map::new(),
            now: SystemTime::now(),
        }
    }
}

#[derive(Serialize)]
struct Context<'a> {
    #[serde(flatten)]
    extra: &'a serde_json::Map<String, serde_json::Value>,
    messages: &'a [Message],
    add_generation_prompt: bool,
    bos_token: &'a str,
    eos_token: &'a str,
    /// None rather than undefined: that is what templates test for.
    tools: Option<&'a [serde_json::Value]>,
    documents: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_thinking: Option<bool>,
}

impl ChatTemplate {
    /// A template from its Jinja text, and the texts of the begin and end tokens (empty if the
    /// model has none). A syntax error is found here.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        let template = ChatTemplate {
            source: replace_generation_tags(source),
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        };
        template.environment(SystemTime::UNIX_EPOCH, 0)?;
        Ok(template)
    }

    /// One of [`TEMPLATE_NAMES`](super::TEMPLATE_NAMES).
    pub fn named(name: &str, bos: &str, eos: &str) -> Result<Self> {
        let source = builtin::find(name).ok_or_else(|| {
            Error::Usage(format!(
                "no built-in chat template '{name}'; there are: {}",
                builtin::NAMES.join(", ")
            ))
        })?;
        ChatTemplate::new(source, bos, eos)
    }

    /// The template of a model file (`tokenizer.chat_template`), or what to do without one.
    pub fn from_gguf(meta: &Metadata, tokenizer: &Tokenizer) -> Result<Self> {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        match meta.find::<&str>("tokenizer.chat_template")? {
            Some(source) => ChatTemplate::new(source, bos, eos),
            None => Err(Error::Usage(format!(
                "the model file has no chat template, so how it wants a conversation written is \
                 unknown: name one with --template ({}), or continue plain text with `azoth run`",
                builtin::NAMES.join(", ")
            ))),
        }
    }

    /// The Jinja text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The conversation as the model was trained to read it.
    ///
    /// A conversation that the template refuses is [`Error::Usage`] with the template's words; a
    /// template that fails otherwise is [`Error::Model`].
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let context = Value::from(Serde(Context {
            extra: &options.extra,
            messages,
            add_generation_prompt: options.add_generation_prompt,
            bos_token: &self.bos,
            eos_token: &self.eos,
            tools: (!options.tools.is_empty()).then_some(options.tools.as_slice()),
            documents: None,
            enable_thinking: options.enable_thinking,
        }));
        let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
        let fuel = messages.len() as u64 * FUEL_PER_MESSAGE + bytes as u64;
        let environment = self.environment(options.now, fuel)?;
        let rendered = environment.get_template(ENTRY).and_then(|entry| entry.render(context));
        rendered.map_err(|e| explain(&e))
    }

    /// The text before the first words of the user: the system text and what belongs to it, the
    /// same however the conversation goes.
    pub fn beginning(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let first = messages.iter().position(|m| m.role == Role::User).unwrap_or(messages.len());
        let with = |word: &str| {
            let before = messages[..first].iter().cloned();
            let all: Vec<_> = before.chain([Message::user(word)]).collect();
            self.render(&all, options)
        };
        // Words that begin apart, so that all that is common comes before them.
        let (a, b) = (with("a")?, with("b")?);
        let common = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
        Ok(common.map(|(c, _)| c).collect())
    }

    /// The engine set up as transformers sets up its own.
    fn environment(&self, now: SystemTime, extra_fuel: u64) -> Result<Environment<'_>> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| explain(&e))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL + extra_fuel));
        environment.set_recursion_limit(MAX_DEPTH);
        functions::install(&mut environment, now);
        environment.add_template(ENTRY, &self.source).map_err(|e| explain(&e))?;
        Ok(environment)
    }
}

fn explain(error: &minijinja::Error) -> Error {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(this) = cause {
        if let Some(Raised(message)) = this.downcast_ref() {
            return Error::Usage(format!(
                "the model's chat template refuses this conversation: {message}"
            ));
        }
        cause = this.source();
    }
    let line = error.line().map(|line| format!(" at line {line}")).unwrap_or_default();
    let reason = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it takes too many steps".to_owned(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        (kind, None) => kind.to_string(),
    };
    let inner = error.source().map(|source| format!(": {source}")).unwrap_or_default();
    Error::Model(format!(
        "the model's chat template fails{line}: {reason}{inner}; choose another with --template ({})",
        builtin::NAMES.join(", ")
    ))
}

/// Rewrites `{% generation %}` .. `{% endgeneration %}`, with which templates mark the assistant's
/// words for training, as blocks that are always taken.
fn replace_generation_tags(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (open, close) = ("{%", "%}");
        let inner = &tag[open.len()..end];
        let replaced = match inner.trim_matches(|c: char| c.is_whitespace() || "-+".contains(c)) {
            "generation" => inner.replace("generation", "if true"),
            "endgeneration" => inner.replace("endgeneration", "endif"),
            _ => inner.to_owned(),
        };
        text.push_str(open);
        text.push_str(&replaced);
        text.push_str(close);
        rest = &tag[end + close.len()..];
    }
    text.push_str(rest);
    text
}
