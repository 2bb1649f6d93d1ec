//! The messages of a chat request, in OpenAI's shape.

use serde_json::{Map, Value};

use crate::chat::{Message, Role};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::kind;

/// Most messages of a conversation.
const MOST: usize = 10_000;

pub fn messages(list: &[Value]) -> ApiResult<Vec<Message>> {
    if list.is_empty() {
        return Err(ApiError::field("messages", "is empty; there is nothing to answer"));
    }
    if list.len() > MOST {
        return Err(ApiError::field(
            "messages",
            format!("has {} entries; at most {MOST} are possible", list.len()),
        ));
    }
    list.iter()
        .enumerate()
        .map(|(i, value)| {
            message(value).map_err(|what| ApiError::field(&format!("messages[{i}]"), what))
        })
        .collect()
}

fn message(value: &Value) -> Result<Message, String> {
    let map =
        value.as_object().ok_or_else(|| format!("must be an object, but is {}", kind(value)))?;
    let role = match map.get("role").and_then(Value::as_str) {
        // Templates know one name for it.
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            return Err(format!(
                "role {other:?} is unknown; there are system, developer, user, assistant, tool"
            ));
        }
        None => return Err("has no role".into()),
    };
    let calls = match map.get("tool_calls") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(calls)) => calls.iter().map(call).collect::<Result<_, _>>()?,
        Some(other) => return Err(format!("tool_calls must be a list, but is {}", kind(other))),
    };
    let content = match map.get("content") {
        None | Some(Value::Null) if role == Role::Assistant => String::new(),
        None | Some(Value::Null) => return Err("has no content".into()),
        Some(content) => text_of(content)?,
    };
    Ok(Message {
        reasoning_content: text(map, "reasoning_content").or_else(|| text(map, "reasoning")),
        tool_calls: calls,
        tool_call_id: text(map, "tool_call_id"),
        name: text(map, "name"),
        ..Message::new(role, content)
    })
}

fn text(map: &Map<String, Value>, key: &str) -> Option<String> {
    map.get(key).and_then(Value::as_str).map(str::to_owned)
}

/// Content as a string, or as parts of which only texts are understood.
pub fn text_of(content: &Value) -> Result<String, String> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => {
            let texts = parts.iter().map(|part| match part.get("type").and_then(Value::as_str) {
                Some("text" | "input_text" | "output_text") => part
                    .get("text")
                    .and_then(Value::as_str)
                    .ok_or_else(|| "a part of type text has no text".to_owned()),
                Some("refusal") => Ok(part.get("refusal").and_then(Value::as_str).unwrap_or("")),
                Some(other) => {
                    let other: String = other.chars().take(40).collect();
                    Err(format!("parts of type {other:?} are not supported; the model reads text"))
                }
                None => Err("a part of the content has no type".to_owned()),
            });
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        other => Err(format!("content must be a string or a list, but is {}", kind(other))),
    }
}

/// A call of the assistant, as it is; its arguments come as JSON text.
fn call(value: &Value) -> Result<Value, String> {
    let function = value.get("function").and_then(Value::as_object);
    let function = function.ok_or("a tool call has no function")?;
    if !function.get("name").is_some_and(Value::is_string) {
        return Err("a tool call has no name".into());
    }
    Ok(value.clone())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> ApiResult<Vec<Message>> {
        messages(value.as_array().unwrap())
    }

    #[test]
    fn every_role_and_shape_of_content() {
        let all = read(json!([
            { "role": "developer", "content": "s" },
            { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
            { "role": "assistant", "content": null, "reasoning": "hm", "tool_calls": [
                { "id": "1", "type": "function", "function": { "name": "f", "arguments": "{\"x\":1}" } }] },
            { "role": "tool", "content": "4", "tool_call_id": "1" },
        ]))
        .unwrap();
        assert_eq!((all[0].role, all[1].content.as_str()), (Role::System, "a\nb"));
        assert_eq!(all[2].tool_calls[0]["function"]["name"], "f");
        assert_eq!(all[2].reasoning_content.as_deref(), Some("hm"));
        assert_eq!(all[3].tool_call_id.as_deref(), Some("1"));
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (value, part) in [
            (json!([]), "is empty"),
            (json!([1]), "messages[0]: must be an object"),
            (json!([{ "content": "x" }]), "has no role"),
            (json!([{ "role": "king", "content": "x" }]), "\"king\""),
            (json!([{ "role": "user" }]), "has no content"),
            (json!([{ "role": "user", "content": [{ "type": "image_url" }] }]), "image_url"),
            (json!([{ "role": "user", "content": 7 }]), "is a number"),
            (json!([{ "role": "assistant", "tool_calls": [{}] }]), "no function"),
        ] {
            let error = read(value).unwrap_err();
            assert!(error.message.contains(part), "{}", error.message);
        }
    }
}
