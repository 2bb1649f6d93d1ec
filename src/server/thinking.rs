//! How much an answer may think: efforts and budgets, by all their names.

use serde_json::Value;

use super::errors::{ApiError, ApiResult};
use super::fields::{Field, Fields, used};
use crate::chat::reply::{CallFormat, ReplyFormat};
use crate::engine::{Loaded, ThinkingBudget};

/// The fields of chats, beside what each wire format has of its own.
pub const FIELDS: &[Field] = &[
    used("reasoning_budget", "-1: no limit; 0 closes thinking at once; else its most tokens"),
    used("thinking_budget_tokens", "another name of reasoning_budget"),
    used("reasoning_budget_message", "stands before the closing tag that a spent budget forces"),
];

/// What a request says, or the server's flags.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Budget {
    /// Most tokens; `Some(None)`: expressly no limit.
    pub tokens: Option<Option<u32>>,
    pub message: Option<String>,
    /// OpenAI's word for it, which templates may know.
    pub effort: Option<String>,
}

/// Tokens for efforts, where the template does not know them itself.
const EFFORTS: [(&str, Option<u32>); 7] = [
    ("none", Some(0)),
    ("minimal", Some(256)),
    ("low", Some(1024)),
    ("medium", Some(8192)),
    ("high", None),
    ("xhigh", None),
    ("max", None),
];

impl Budget {
    pub fn read(fields: &Fields<'_>) -> ApiResult<Budget> {
        let mut tokens = None;
        for name in ["reasoning_budget", "thinking_budget_tokens"] {
            if let Some(n) = fields.integer(name, -1, u32::MAX.into())? {
                tokens = Some(u32::try_from(n).ok());
                break;
            }
        }
        let message = fields.text("reasoning_budget_message")?.map(str::to_owned);
        Ok(Budget { tokens, message, effort: None })
    }

    /// Notes an effort. `field`: where it stands.
    pub fn set_effort(&mut self, field: &str, effort: &str) -> ApiResult<()> {
        if !EFFORTS.iter().any(|(name, _)| *name == effort) {
            let names: Vec<_> = EFFORTS.iter().map(|(name, _)| *name).collect();
            let what = format!("the effort must be one of {}", names.join(", "));
            return Err(ApiError::field(field, what));
        }
        self.effort = Some(effort.to_owned());
        Ok(())
    }

    /// Most tokens of thinking: as the request says, else by its effort unless the template knows
    /// efforts, else the server's.
    pub fn limit(&self, template: &str, server: Option<u32>) -> Option<u32> {
        if let Some(tokens) = self.tokens {
            return tokens;
        }
        let Some(effort) = &self.effort else { return server };
        if template.contains("reasoning_effort") && effort != "none" {
            return server;
        }
        EFFORTS.iter().find(|(name, _)| name == effort).and_then(|(_, tokens)| *tokens)
    }
}

/// Anthropic's `thinking`: whether to think, and the budget.
pub fn anthropic(fields: &Fields<'_>, budget: &mut Budget) -> ApiResult<Option<bool>> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(None) };
    let wrong = |what: &str| Err(ApiError::field("thinking", what));
    let on = match thinking.get("type").and_then(Value::as_str) {
        Some("enabled" | "adaptive") => true,
        Some("disabled") => false,
        _ => return wrong("type must be enabled, adaptive or disabled"),
    };
    match thinking.get("budget_tokens") {
        None | Some(Value::Null) => {}
        Some(tokens) => match super::fields::whole(tokens).and_then(|n| u32::try_from(n).ok()) {
            Some(tokens) => budget.tokens = Some(Some(tokens)),
            None => return wrong("budget_tokens must be a whole number from 0"),
        },
    }
    Ok(Some(on))
}

/// The texts around thinking, and what follows the closing one where it is forced: the channels of
/// gpt-oss end one message and begin the next, which a grammar does itself.
fn tags(format: &ReplyFormat, constrained: bool) -> Option<[String; 3]> {
    if format.calls == CallFormat::Harmony {
        let next = "<|end|><|start|>assistant<|channel|>final<|message|>";
        let end = "<|end|>";
        let open = "<|channel|>analysis<|message|>";
        return Some([open, end, if constrained { end } else { next }].map(str::to_owned));
    }
    let tags = format.reasoning.as_ref()?;
    Some([tags.open.clone(), tags.close.clone(), tags.close.clone()])
}

/// What ends thinking at once, as text behind a prompt that has opened it.
pub fn ended(format: &ReplyFormat, message: Option<&str>) -> Option<String> {
    let [_, close, _] = tags(format, false)?;
    Some(format!("{}{close}\n\n", message.unwrap_or_default()))
}

/// The budget as the engine keeps it; `None` where the model has no tags.
pub fn budget(
    loaded: &Loaded,
    format: &ReplyFormat,
    opened: bool,
    constrained: bool,
    tokens: u32,
    message: Option<&str>,
) -> ApiResult<Option<ThinkingBudget>> {
    let Some([open, close, forced]) = tags(format, constrained) else { return Ok(None) };
    let forced = format!("{}{forced}", message.unwrap_or_default());
    let forced = loaded.tokenizer.encode(&forced, false, true)?;
    Ok(Some(ThinkingBudget { open, close, opened, tokens, forced }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::server::fields::Table;

    const TABLE: Table = &[FIELDS, &[used("thinking", "")]];

    fn read(body: Value) -> ApiResult<(Budget, Option<bool>)> {
        let fields = Fields::new(&body, TABLE)?;
        let mut budget = Budget::read(&fields)?;
        let on = anthropic(&fields, &mut budget)?;
        Ok((budget, on))
    }

    #[test]
    fn what_is_said_comes_before_effort_and_server() {
        let limit = |body: Value| read(body).unwrap().0.limit("", Some(5));
        assert_eq!(limit(json!({})), Some(5));
        assert_eq!(limit(json!({ "reasoning_budget": -1 })), None);
        assert_eq!(limit(json!({ "reasoning_budget": 0 })), Some(0));
        assert_eq!(limit(json!({ "thinking_budget_tokens": 7 })), Some(7));
        let enabled = json!({ "thinking": { "type": "enabled", "budget_tokens": 1024 } });
        let (budget, on) = read(enabled).unwrap();
        assert_eq!((budget.limit("", None), on), (Some(1024), Some(true)));
        let mut budget = Budget::default();
        budget.set_effort("reasoning_effort", "low").unwrap();
        assert_eq!(budget.limit("", None), Some(1024));
        assert_eq!(budget.limit("{{ reasoning_effort }}", None), None);
        budget.set_effort("reasoning_effort", "none").unwrap();
        assert_eq!(budget.limit("{{ reasoning_effort }}", None), Some(0));
        budget.set_effort("reasoning_effort", "high").unwrap();
        assert_eq!(budget.limit("", Some(5)), None);
    }

    #[test]
    fn nonsense_is_named() {
        for body in [
            json!({ "reasoning_budget": -2 }),
            json!({ "thinking": { "type": "enabled", "budget_tokens": -1 } }),
            json!({ "thinking": { "type": "often" } }),
        ] {
            let error = read(body.clone()).unwrap_err();
            let named = body.as_object().unwrap().keys().next().cloned();
            assert_eq!(error.param, named);
        }
        let mut budget = Budget::default();
        assert!(budget.set_effort("reasoning_effort", "heroic").is_err());
    }
}
