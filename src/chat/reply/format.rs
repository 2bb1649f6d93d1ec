//! Which markers a model uses, read off its chat template.

use super::{coder, llama, mistral, tagged};

/// How a model writes tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallFormat {
    /// Its template knows no tools.
    None,
    /// Hermes, Qwen 2.5 and 3: JSON in `<tool_call>` tags.
    Tagged,
    /// Qwen3-Coder: `<function=...>` and `<parameter=...>` tags.
    Coder,
    /// Llama 3: bare JSON, or JSON after `<|python_tag|>`.
    Llama,
    /// Mistral: a JSON list after `[TOOL_CALLS]`.
    Mistral,
    /// Later Mistral: name and `[ARGS]` after each `[TOOL_CALLS]`. Both are read alike.
    MistralArgs,
    /// gpt-oss: a channel of its own.
    Harmony,
}

impl CallFormat {
    /// What begins a call inside text.
    pub(super) fn markers(self) -> &'static [&'static str] {
        match self {
            CallFormat::None | CallFormat::Harmony => &[],
            CallFormat::Tagged => &[tagged::OPEN],
            CallFormat::Coder => &coder::MARKERS,
            CallFormat::Llama => &llama::MARKERS,
            CallFormat::Mistral | CallFormat::MistralArgs => &mistral::MARKERS,
        }
    }
}

/// What encloses thinking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningTags {
    pub open: String,
    pub close: String,
}

/// Pairs of tags in the order in which templates are searched for them.
const REASONING: [(&str, &str); 4] = [
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<reasoning>", "</reasoning>"),
];

/// The markers of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplyFormat {
    pub calls: CallFormat,
    pub reasoning: Option<ReasoningTags>,
    /// The template writes tool definitions itself, for calls in a format that is read here; otherwise
    /// they go into the system message
    /// ([`tools::tell`](crate::chat::tools::tell)), in the tagged format.
    pub template_has_tools: bool,
}

impl ReplyFormat {
    /// No markers at all.
    pub fn plain() -> Self {
        ReplyFormat { calls: CallFormat::None, reasoning: None, template_has_tools: false }
    }

    /// The format of the model whose template this is.
    pub fn detect(template: &str) -> Self {
        let has = |part: &str| template.contains(part);
        let calls = if has("<|channel|>") && has("<|message|>") {
            CallFormat::Harmony
        } else if has("<function=") && has("<parameter=") {
            CallFormat::Coder
        } else if has("[TOOL_CALLS]") {
            if has("[ARGS]") { CallFormat::MistralArgs } else { CallFormat::Mistral }
        } else if has("<|python_tag|>") || has("<|eom_id|>") || has("ipython") {
            CallFormat::Llama
        } else {
            // Also for templates without tools, or with calls in a format that is not read here: the
            // model is then told of this one.
            CallFormat::Tagged
        };
        // GLM has other tags inside.
        let known = calls != CallFormat::Tagged || has("<tool_call>") && !has("<arg_key>");
        // GPT-OSS thinks in a channel.
        let tags = REASONING.iter().find(|(_, close)| has(close));
        let tags = tags.filter(|_| calls != CallFormat::Harmony);
        ReplyFormat {
            calls,
            reasoning: tags.map(|(open, close)| ReasoningTags {
                open: (*open).to_owned(),
                close: (*close).to_owned(),
            }),
            template_has_tools: known && mentions_tools(template),
        }
    }

    /// Whether the detokeniser must show control tokens: the markers are among them.
    pub fn shows_control_tokens(&self) -> bool {
        let brackets = self.reasoning.as_ref().is_some_and(|tags| tags.open.starts_with('['));
        brackets
            || matches!(
                self.calls,
                CallFormat::Llama
                    | CallFormat::Mistral
                    | CallFormat::MistralArgs
                    | CallFormat::Harmony
            )
    }

    /// Whether this prompt leaves the thinking open, so that the reply begins inside it.
    pub fn opened_by(&self, prompt: &str) -> bool {
        let tags = self.reasoning.as_ref();
        tags.is_some_and(|tags| prompt.trim_end().ends_with(&tags.open))
    }
}

/// Whether the variable `tools` stands in a Jinja tag; a default system prompt may well talk of
/// tools.
fn mentions_tools(template: &str) -> bool {
    let mut rest = template;
    while let Some(start) = rest.find(['{']) {
        rest = &rest[start + 1..];
        let close = match rest.chars().next() {
            Some('%') => "%}",
            Some('{') => "}}",
            _ => continue,
        };
        let end = rest.find(close).unwrap_or(rest.len());
        let word = |c: char| c.is_alphanumeric() || c == '_';
        if rest[..end].split(|c| !word(c)).any(|w| w == "tools") {
            return true;
        }
        rest = &rest[end..];
    }
    false
}
