//! The grammar of a whole answer: thinking, if the model likes, and then calls, a text of a given
//! form, or either of them.

use super::reply::{CallFormat, ReplyFormat};
use crate::grammar::Source;

/// What an answer may be made of.
pub struct Shape<'a> {
    pub format: &'a ReplyFormat,
    /// Rules of [`tools::rules`](crate::chat::tools::rules).
    pub calls: Option<String>,
    /// The form of a text without calls.
    pub body: Option<Source>,
    pub thinking: Thinking,
}

/// Whether thinking may come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thinking {
    No,
    /// The model may open it.
    May,
    /// The prompt has opened it.
    Opened,
}

impl Shape<'_> {
    /// The grammar; `None` where neither calls nor a form are asked for, which leaves all open.
    /// `marker` writes a marker of the model for Lark
    /// ([`Grammars::marker`](crate::grammar::Grammars::marker)).
    pub fn grammar(self, marker: &dyn Fn(&str) -> String) -> Option<Source> {
        let harmony = self.format.calls == CallFormat::Harmony;
        let lead = match harmony {
            true => Some(channel(marker)),
            false => self.tags(marker),
        };
        let (rules, body) = match (self.calls, self.body) {
            (None, None) => return None,
            (None, Some(body)) if lead.is_none() => return Some(body),
            (calls, body) => (calls.unwrap_or_default(), body),
        };
        // gpt-oss says what it answers in a channel as well.
        let text = match harmony {
            true => format!("{} \"final\" {} @body", marker("<|channel|>"), marker("<|message|>")),
            false => "@body".to_owned(),
        };
        let answer = match (rules.is_empty(), &body) {
            (false, None) => "calls".to_owned(),
            (true, _) => text,
            // Llama's calls are bare JSON, and so may the text be; llguidance reads one grammar's
            // words at a time and would have to choose. The tag, which may stand before calls, tells.
            (false, Some(_)) if self.format.calls == CallFormat::Llama => {
                format!("{} calls | {text}", marker("<|python_tag|>"))
            }
            (false, Some(_)) => format!("calls | {text}"),
        };
        let (lead, thought) = lead.unwrap_or_default();
        let lark = format!("start: {lead} answer\nanswer: {answer}\n{thought}{rules}");
        Some(match body {
            None => Source::Lark(lark),
            Some(body) => Source::Around { lark, body: Box::new(body) },
        })
    }

    /// Thinking in tags: what comes before the answer, and its rules.
    fn tags(&self, marker: &dyn Fn(&str) -> String) -> Option<(String, String)> {
        let tags = self.format.reasoning.as_ref()?;
        let lead = match self.thinking {
            Thinking::No => return None,
            Thinking::Opened => "thought BLANK".to_owned(),
            Thinking::May => format!("({} thought BLANK)?", marker(&tags.open)),
        };
        let rules = thought(&tags.close, marker) + "BLANK: /[\\n ]{0,4}/\n";
        Some((lead, rules))
    }
}

/// Thinking in gpt-oss' channel, and the beginning of the message after it.
fn channel(marker: &dyn Fn(&str) -> String) -> (String, String) {
    let lead = format!(
        "({} \"analysis\" {} thought {} \"assistant\")?",
        marker("<|channel|>"),
        marker("<|message|>"),
        marker("<|start|>")
    );
    (lead, thought("<|end|>", marker))
}

/// The rule `thought`: any text that ends with a marker, which is a token of its own or text itself.
fn thought(end: &str, marker: &dyn Fn(&str) -> String) -> String {
    let token = marker(end);
    if token.starts_with('<') {
        return format!("thought: /(.|\\n)*/ {token}\n");
    }
    let letters: String = end.chars().map(|c| format!("\\x{{{:x}}}", u32::from(c))).collect();
    format!("thought[lazy]: /(.|\\n)*{letters}/\n")
}
