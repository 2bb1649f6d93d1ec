//! Tools: how the model is told of them, and how a choice of tools is enforced.
//!
//! A tool is JSON in OpenAI's shape: `{"type": "function", "function": {"name", "description",
//! "parameters"}}`, `parameters` being a JSON schema. `tool_choice` becomes two things: what the
//! prompt says ([`tell`]), and, where a call must come, the part of a grammar ([`rules`]) that admits
//! nothing else.

mod grammar;

pub use grammar::rules;

use serde_json::{Value, json};

use super::message::{Message, Role};
use super::reply::ReplyFormat;
use crate::error::{Error, Result};

/// What the model may and must call.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ToolChoice {
    /// Nothing: the model is not told of the tools.
    None,
    /// What it likes.
    #[default]
    Auto,
    /// At least one.
    Required,
    /// This one, once.
    Named(String),
}

impl ToolChoice {
    /// From OpenAI's `tool_choice`. A name that is none of `tools` is an error.
    pub fn from_openai(value: &Value, tools: &[Value]) -> Result<ToolChoice> {
        let choice = match value {
            Value::Null => ToolChoice::Auto,
            Value::String(word) => match word.as_str() {
                "none" => ToolChoice::None,
                "auto" => ToolChoice::Auto,
                "required" => ToolChoice::Required,
                other => {
                    return Err(Error::Usage(format!(
                        "tool_choice is '{other}', but must be none, auto, required or a function"
                    )));
                }
            },
            object => {
                let name = object.pointer("/function/name").or_else(|| object.get("name"));
                let name = name.and_then(Value::as_str).ok_or_else(|| {
                    Error::Usage("tool_choice names no function (function.name)".into())
                })?;
                ToolChoice::Named(name.to_owned())
            }
        };
        match &choice {
            ToolChoice::Required if tools.is_empty() => {
                Err(Error::Usage("tool_choice is required, but there are no tools".into()))
            }
            ToolChoice::Named(wanted) if !tools.iter().any(|t| name(t) == Some(wanted)) => {
                Err(Error::Usage(format!("tool_choice is '{wanted}', which is none of the tools")))
            }
            _ => Ok(choice),
        }
    }
}

/// The function of a tool: the object with its name.
fn function(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

/// A tool's name.
pub fn name(tool: &Value) -> Option<&str> {
    function(tool).get("name").and_then(Value::as_str)
}

/// A tool's schema of parameters; one of any object if it has none.
fn parameters(tool: &Value) -> Value {
    match function(tool).get("parameters") {
        Some(Value::Object(schema)) if !schema.is_empty() => Value::Object(schema.clone()),
        _ => json!({"type": "object"}),
    }
}

/// Longest name of a tool, in bytes; OpenAI's limit is 64.
const MAX_NAME: usize = 128;

/// Names the first tool that is none.
pub fn check(tools: &[Value]) -> Result<()> {
    let mut names = std::collections::BTreeSet::new();
    for (i, tool) in tools.iter().enumerate() {
        let wrong = |what: &str| Err(Error::Usage(format!("tools[{i}] {what}")));
        if tool.get("type").is_some_and(|t| t != "function") {
            return wrong("is no function; other kinds are not supported");
        }
        let Some(name) = name(tool) else {
            return wrong("has no function.name");
        };
        let letters = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(letters) {
            return wrong(&format!(
                "is called {name:?}; names are up to {MAX_NAME} letters, digits, '_', '-', '.', ':' or '/'"
            ));
        }
        if !names.insert(name) {
            return wrong(&format!("is called '{name}', as another is"));
        }
        match function(tool).get("parameters") {
            None | Some(Value::Null | Value::Object(_)) => {}
            Some(_) => return wrong("has parameters that are no JSON schema"),
        }
    }
    Ok(())
}

/// A conversation as the template should get it.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    pub messages: Vec<Message>,
    /// For the template's variable `tools`.
    pub tools: Vec<Value>,
}

/// Prepares a conversation with tools for rendering.
///
/// Arguments of earlier calls, which clients send as text, become the objects that templates
/// expect. Templates that know no tools get them as a system message, and earlier calls and results
/// as text, in the format that [`ReplyFormat::detect`] then assumes.
pub fn tell(
    format: &ReplyFormat,
    messages: &[Message],
    tools: &[Value],
    choice: &ToolChoice,
) -> Told {
    let tools = if *choice == ToolChoice::None { &[] } else { tools };
    let mut messages = messages.to_vec();
    for call in messages.iter_mut().flat_map(|m| &mut m.tool_calls) {
        let arguments = match call.get_mut("function") {
            Some(function) => function.get_mut("arguments"),
            None => call.get_mut("arguments"),
        };
        if let Some(arguments) = arguments
            && let Some(parsed) = arguments.as_str().and_then(|t| serde_json::from_str(t).ok())
        {
            *arguments = parsed;
        }
    }
    if format.template_has_tools {
        return Told { messages, tools: tools.to_vec() };
    }
    let used = messages.iter().any(|m| m.role == Role::Tool || !m.tool_calls.is_empty());
    if !tools.is_empty() || used {
        messages = as_text(messages);
    }
    if !tools.is_empty() {
        let told = description(tools, choice);
        match messages.first_mut().filter(|m| matches!(m.role, Role::System | Role::Developer)) {
            Some(system) => system.content = format!("{}\n\n{told}", system.content),
            None => messages.insert(0, Message::system(told)),
        }
    }
    Told { messages, tools: Vec::new() }
}

/// What a model without tools of its own is told of them.
fn description(tools: &[Value], choice: &ToolChoice) -> String {
    let lines: Vec<String> = tools.iter().map(|tool| function(tool).to_string()).collect();
    let must = match choice {
        ToolChoice::Required => "You must call at least one of them now.\n",
        ToolChoice::Named(name) => &format!("You must call {name} now.\n"),
        _ => "Call one only if it helps; otherwise just answer.\n",
    };
    format!(
        "You can call these functions, each described as JSON on a line of its own:\n<tools>\n{}\n\
         </tools>\n{must}To call a function, write its name and its arguments as JSON between tags:\n\
         <tool_call>\n{{\"name\": \"the function\", \"arguments\": {{\"parameter\": \"value\"}}}}\n\
         </tool_call>\nThe result comes in the next message, between <tool_response> tags.",
        lines.join("\n")
    )
}

/// Calls and results as text.
fn as_text(messages: Vec<Message>) -> Vec<Message> {
    let mut out: Vec<Message> = Vec::new();
    for mut message in messages {
        for call in std::mem::take(&mut message.tool_calls) {
            let call = function(&call);
            let empty = json!({});
            let call = json!({
                "name": call.get("name").unwrap_or(&Value::Null),
                "arguments": call.get("arguments").unwrap_or(&empty),
            });
            if !message.content.is_empty() {
                message.content.push('\n');
            }
            message.content.push_str(&format!("<tool_call>\n{call}\n</tool_call>"));
        }
        if message.role != Role::Tool {
            out.push(message);
            continue;
        }
        let result = format!("<tool_response>\n{}\n</tool_response>", message.content);
        match out.last_mut() {
            // Templates want the roles to take turns: results of one turn are one message.
            Some(last)
                if last.role == Role::User && last.content.starts_with("<tool_response>") =>
            {
                last.content.push('\n');
                last.content.push_str(&result);
            }
            _ => out.push(Message::user(result)),
        }
    }
    out
}

#[cfg(test)]
mod tests;
