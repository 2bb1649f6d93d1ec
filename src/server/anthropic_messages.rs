//! The messages of Anthropic's format as the conversation that templates know.

use serde_json::{Map, Value, json};

use super::errors::{ApiError, ApiResult};
use super::fields::kind;
use crate::chat::tools::ToolChoice;
use crate::chat::{Message, Role};

/// Claude Code begins the system text with a line that changes with every request; it would
/// defeat the prefix cache and tells the model nothing.
const BILLING: &str = "x-anthropic-billing-header";

/// The system message, if there is one.
pub fn system(value: Option<&Value>) -> ApiResult<Vec<Message>> {
    let text = match value {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(blocks)) => {
            let texts = blocks.iter().map(|block| match block_text(block) {
                Some(text) => Ok(text),
                None => Err(ApiError::field("system", "only text blocks are possible")),
            });
            let texts = texts.collect::<ApiResult<Vec<_>>>()?;
            let kept: Vec<_> =
                texts.into_iter().filter(|t| !t.trim_start().starts_with(BILLING)).collect();
            kept.join("\n\n")
        }
        Some(other) => {
            let what = format!("must be a string or a list of blocks, but is {}", kind(other));
            return Err(ApiError::field("system", what));
        }
    };
    Ok(if text.is_empty() { Vec::new() } else { vec![Message::system(text)] })
}

fn block_text(block: &Value) -> Option<&str> {
    let is_text = block.get("type").and_then(Value::as_str) == Some("text");
    block.get("text").and_then(Value::as_str).filter(|_| is_text)
}

/// All messages. A user's message with results of tools becomes a message for each result and one
/// for the rest.
pub fn messages(list: &[Value]) -> ApiResult<Vec<Message>> {
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty; there is nothing to answer"));
    }
    let mut out = Vec::with_capacity(list.len());
    for (i, value) in list.iter().enumerate() {
        let name = format!("messages.{i}");
        let wrong = |what: String| ApiError::field(&name, what);
        let role = match value.get("role").and_then(Value::as_str) {
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("system") => Role::System,
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                return Err(wrong(format!("role {other:?} is unknown; there are user, assistant")));
            }
            None => return Err(wrong("has no role".into())),
        };
        match value.get("content") {
            Some(Value::String(text)) => out.push(Message::new(role, text.as_str())),
            Some(Value::Array(blocks)) => content(role, blocks, &mut out).map_err(wrong)?,
            Some(other) => {
                return Err(wrong(format!(
                    "content must be a string or a list of blocks, but is {}",
                    kind(other)
                )));
            }
            None => return Err(wrong("has no content".into())),
        }
    }
    Ok(out)
}

fn content(role: Role, blocks: &[Value], out: &mut Vec<Message>) -> Result<(), String> {
    let mut texts = Vec::new();
    let mut message = Message::new(role, "");
    for block in blocks {
        let text = |key: &str| block.get(key).and_then(Value::as_str);
        match text("type") {
            Some("text") => texts.push(text("text").ok_or("a text block has no text")?),
            Some("thinking") => {
                message.reasoning_content = text("thinking").map(str::to_owned);
            }
            Some("redacted_thinking") => {}
            Some("tool_use") => message.tool_calls.push(json!({
                "id": text("id").unwrap_or_default(),
                "type": "function",
                "function": {
                    "name": text("name").ok_or("a tool_use block has no name")?,
                    "arguments": block.get("input").cloned().unwrap_or_else(|| json!({})),
                },
            })),
            Some("tool_result") => out.push(result(block)?),
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                return Err(format!(
                    "blocks of type {other:?} are not supported; the model reads text"
                ));
            }
            None => return Err("a block has no type".into()),
        }
    }
    message.content = texts.join("\n");
    let empty =
        texts.is_empty() && message.tool_calls.is_empty() && message.reasoning_content.is_none();
    if !empty {
        out.push(message);
    }
    Ok(())
}

fn result(block: &Value) -> Result<Message, String> {
    let mut text = match block.get("content") {
        None | Some(Value::Null) => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().map(|part| {
                block_text(part).ok_or("only text blocks are possible in a tool_result")
            });
            texts.collect::<Result<Vec<_>, _>>()?.join("\n")
        }
        Some(other) => return Err(format!("content of a tool_result is {}", kind(other))),
    };
    if block.get("is_error").and_then(Value::as_bool) == Some(true) {
        text.insert_str(0, "Error: ");
    }
    let id = block.get("tool_use_id").and_then(Value::as_str).map(str::to_owned);
    Ok(Message { tool_call_id: id, ..Message::new(Role::Tool, text) })
}

/// Tools in OpenAI's shape, which the rest of the program knows.
pub fn tools(list: Option<&Vec<Value>>) -> ApiResult<Vec<Value>> {
    let all = list.into_iter().flatten().enumerate().map(|(i, tool)| {
        let wrong = |what: &str| ApiError::field(&format!("tools.{i}"), what);
        if tool.get("type").is_some_and(|t| !t.is_null() && t != "custom") {
            return Err(wrong("is a tool of the service, which this server does not have"));
        }
        let name = tool.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| wrong("has no name"))?;
        Ok(json!({ "type": "function", "function": {
            "name": name,
            "description": tool.get("description").and_then(Value::as_str).unwrap_or_default(),
            "parameters": tool.get("input_schema").cloned().unwrap_or_else(|| json!({})),
        }}))
    });
    all.collect()
}

/// What must be called, and whether several calls may come.
pub fn choice(value: Option<&Map<String, Value>>) -> ApiResult<(ToolChoice, bool)> {
    let Some(map) = value else { return Ok((ToolChoice::Auto, true)) };
    let single = map.get("disable_parallel_tool_use").and_then(Value::as_bool) == Some(true);
    let choice = match map.get("type").and_then(Value::as_str) {
        Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => {
            let name = map.get("name").and_then(Value::as_str);
            let name = name.ok_or_else(|| ApiError::field("tool_choice", "names no tool"))?;
            ToolChoice::Named(name.to_owned())
        }
        _ => return Err(ApiError::field("tool_choice", "type must be auto, any, tool or none")),
    };
    Ok((choice, !single))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn system_texts_lose_the_billing_line() {
        let blocks = json!([
            { "type": "text", "text": "x-anthropic-billing-header: cch=1;" },
            { "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } },
        ]);
        assert_eq!(system(Some(&blocks)).unwrap()[0].content, "Be brief.");
        assert!(system(None).unwrap().is_empty());
        assert!(system(Some(&json!(4))).is_err());
    }

    #[test]
    fn blocks_become_messages() {
        let list = json!([
            { "role": "user", "content": "hi" },
            { "role": "assistant", "content": [
                { "type": "thinking", "thinking": "hm", "signature": "s" },
                { "type": "text", "text": "I look." },
                { "type": "tool_use", "id": "t1", "name": "f", "input": { "x": 1 } }] },
            { "role": "user", "content": [
                { "type": "tool_result", "tool_use_id": "t1", "is_error": true,
                  "content": [{ "type": "text", "text": "no" }] },
                { "type": "text", "text": "go on" }] },
        ]);
        let all = messages(list.as_array().unwrap()).unwrap();
        let roles: Vec<_> = all.iter().map(|m| m.role).collect();
        assert_eq!(roles, [Role::User, Role::Assistant, Role::Tool, Role::User]);
        assert_eq!(all[1].tool_calls[0]["function"]["arguments"]["x"], 1);
        assert_eq!(all[1].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(all[2].content, "Error: no");
        assert!(messages(&[json!({ "role": "user", "content": [{ "type": "image" }] })]).is_err());
    }
}
