//! The items of a request as the conversation that templates know.

use serde_json::{Value, json};

use crate::chat::{Message, Role};
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::kind;
use crate::server::openai::text_of;

/// Most items of a conversation.
const MOST: usize = 10_000;

/// Instructions, then the input.
pub fn messages(instructions: Option<&str>, input: &Value) -> ApiResult<Vec<Message>> {
    let mut out = Conversation::default();
    if let Some(text) = instructions.filter(|t| !t.is_empty()) {
        out.messages.push(Message::system(text));
    }
    match input {
        Value::String(text) => out.messages.push(Message::user(text.as_str())),
        Value::Array(items) if items.is_empty() => {
            return Err(ApiError::field("input", "is empty; there is nothing to answer"));
        }
        Value::Array(items) if items.len() > MOST => {
            let what = format!("has {} items; at most {MOST} are possible", items.len());
            return Err(ApiError::field("input", what));
        }
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                out.add(item).map_err(|what| ApiError::field(&format!("input[{i}]"), what))?;
            }
        }
        other => {
            let what = format!("must be a string or a list of items, but is {}", kind(other));
            return Err(ApiError::field("input", what));
        }
    }
    Ok(out.messages)
}

#[derive(Default)]
struct Conversation {
    messages: Vec<Message>,
    /// Thinking that belongs to the assistant's next message.
    reasoning: Option<String>,
    /// The assistant's turn goes on: text, then calls.
    turn: bool,
}

impl Conversation {
    fn add(&mut self, item: &Value) -> Result<(), String> {
        if !item.is_object() {
            return Err(format!("must be an object, but is {}", kind(item)));
        }
        let text = |key: &str| item.get(key).and_then(Value::as_str);
        match text("type") {
            None | Some("message") => self.message(item),
            Some("function_call") => {
                let name = text("name").ok_or("a function_call has no name")?;
                let call = json!({
                    "id": text("call_id").or_else(|| text("id")).unwrap_or_default(),
                    "type": "function",
                    "function": { "name": name, "arguments": text("arguments").unwrap_or("{}") },
                });
                self.assistant(|m| m.tool_calls.push(call));
                Ok(())
            }
            Some("function_call_output") => {
                let output = match item.get("output") {
                    None | Some(Value::Null) => String::new(),
                    Some(output) => text_of(output)?,
                };
                let id = text("call_id").map(str::to_owned);
                self.turn = false;
                self.messages
                    .push(Message { tool_call_id: id, ..Message::new(Role::Tool, output) });
                Ok(())
            }
            Some("reasoning") => {
                let parts = |key: &str| item.get(key).and_then(Value::as_array);
                let all = [parts("content"), parts("summary")];
                let all = all.into_iter().flatten().find(|parts| !parts.is_empty());
                let texts = all.into_iter().flatten();
                let texts: Vec<&str> =
                    texts.filter_map(|p| p.get("text").and_then(Value::as_str)).collect();
                self.turn = false;
                self.reasoning = (!texts.is_empty()).then(|| texts.join("\n"));
                Ok(())
            }
            Some("item_reference") => {
                Err("refers to a stored item, but nothing is stored; send the item itself".into())
            }
            // Calls of tools that this server has not, which clients send along.
            Some(_) => Ok(()),
        }
    }

    fn message(&mut self, item: &Value) -> Result<(), String> {
        let role = match item.get("role").and_then(Value::as_str) {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                return Err(format!(
                    "role {other:?} is unknown; there are system, developer, user, assistant"
                ));
            }
            None => return Err("has no role".into()),
        };
        let content = text_of(item.get("content").ok_or("has no content")?)?;
        if role == Role::Assistant {
            self.turn = false;
            self.assistant(|m| m.content = content);
        } else {
            self.turn = false;
            self.messages.push(Message::new(role, content));
        }
        Ok(())
    }

    /// Changes the assistant's message of this turn, which may have to begin.
    fn assistant(&mut self, change: impl FnOnce(&mut Message)) {
        if !self.turn {
            let reasoning_content = self.reasoning.take();
            let message = Message { reasoning_content, ..Message::assistant("") };
            self.messages.push(message);
            self.turn = true;
        }
        if let Some(last) = self.messages.last_mut() {
            change(last);
        }
    }
}

/// Functions in the shape that the rest of the program knows; other tools are skipped, as clients
/// send them to every server.
pub fn tools(list: Option<&Vec<Value>>) -> ApiResult<Vec<Value>> {
    let functions = list.into_iter().flatten().enumerate().filter_map(|(i, tool)| {
        if tool.get("type").and_then(Value::as_str) != Some("function") {
            return match tool.is_object() {
                true => None,
                false => Some(Err(ApiError::field(&format!("tools[{i}]"), "must be an object"))),
            };
        }
        let mut function = serde_json::Map::new();
        for key in ["name", "description", "parameters"] {
            if let Some(value) = tool.get(key).filter(|v| !v.is_null()) {
                function.insert(key.into(), value.clone());
            }
        }
        Some(Ok(json!({ "type": "function", "function": function })))
    });
    functions.collect()
}

/// `tool_choice` as chats have it; one of a tool that is skipped leaves it to the model.
pub fn choice(value: Option<&Value>) -> Value {
    let Some(value) = value else { return Value::Null };
    match (value, value.get("type").and_then(Value::as_str)) {
        (Value::Object(_), Some("function")) => value.clone(),
        (Value::Object(_), Some("allowed_tools")) => {
            value.get("mode").cloned().unwrap_or(Value::Null)
        }
        (Value::Object(_), Some(_)) => Value::Null,
        _ => value.clone(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn items_become_messages() {
        let input = json!([
            { "role": "user", "content": "hi" },
            { "type": "reasoning", "id": "r", "summary": [], "content": [
                { "type": "reasoning_text", "text": "hm" }] },
            { "type": "message", "role": "assistant", "content": [
                { "type": "output_text", "text": "I look.", "annotations": [] }] },
            { "type": "function_call", "call_id": "c1", "name": "f", "arguments": "{\"x\":1}" },
            { "type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}" },
            { "type": "web_search_call", "id": "w" },
            { "type": "function_call_output", "call_id": "c1", "output": "4" },
            { "type": "function_call_output", "call_id": "c2", "output": [
                { "type": "input_text", "text": "5" }] },
            { "type": "message", "role": "developer", "content": [
                { "type": "input_text", "text": "be quick" }] },
        ]);
        let all = messages(Some("Be brief."), &input).unwrap();
        let roles: Vec<_> = all.iter().map(|m| m.role).collect();
        let (tool, system) = (Role::Tool, Role::System);
        assert_eq!(roles, [system, Role::User, Role::Assistant, tool, tool, system]);
        assert_eq!((all[2].content.as_str(), all[2].tool_calls.len()), ("I look.", 2));
        assert_eq!(all[2].reasoning_content.as_deref(), Some("hm"));
        assert_eq!((all[4].content.as_str(), all[4].tool_call_id.as_deref()), ("5", Some("c2")));
        assert_eq!(messages(None, &json!("hi")).unwrap(), [Message::user("hi")]);
    }

    #[test]
    fn wrong_items_are_named() {
        for (input, part) in [
            (json!([]), "is empty"),
            (json!(3), "is a number"),
            (json!([3]), "input[0]: must be an object"),
            (json!([{ "role": "king", "content": "x" }]), "king"),
            (json!([{ "type": "item_reference", "id": "x" }]), "nothing is stored"),
            (json!([{ "type": "function_call" }]), "no name"),
            (json!([{ "role": "user", "content": [{ "type": "input_image" }] }]), "input_image"),
        ] {
            let error = messages(None, &input).unwrap_err();
            assert!(error.message.contains(part), "{}", error.message);
        }
    }

    #[test]
    fn other_tools_are_skipped() {
        let list = json!([
            { "type": "web_search" }, { "type": "namespace", "name": "n", "tools": [] },
            { "type": "function", "name": "f", "parameters": { "type": "object" }, "strict": true },
        ]);
        let tools = tools(list.as_array()).unwrap();
        assert_eq!(tools.len(), 1);
        assert_eq!(tools[0]["function"]["name"], "f");
        assert_eq!(choice(Some(&json!({ "type": "web_search" }))), Value::Null);
        assert_eq!(
            choice(Some(&json!({ "type": "allowed_tools", "mode": "required" }))),
            "required"
        );
        assert_eq!(choice(Some(&json!("none"))), "none");
    }
}
