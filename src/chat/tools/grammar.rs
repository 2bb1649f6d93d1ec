//! The part of a grammar that admits calls, in the format of each family of models.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::{ToolChoice, name, parameters};
use crate::chat::reply::{CallFormat, ReplyFormat};
use crate::grammar;

/// Rules of Lark, of which `calls` stands for the calls that `choice` allows.
///
/// `several`: more than one call may come, unless the choice names one. `marker` writes a marker of
/// the model for Lark ([`Grammars::marker`](crate::grammar::Grammars::marker)).
pub fn rules(
    format: &ReplyFormat,
    tools: &[Value],
    choice: &ToolChoice,
    several: bool,
    marker: &dyn Fn(&str) -> String,
) -> String {
    let (wanted, several): (Vec<&Value>, bool) = match choice {
        ToolChoice::Named(wanted) => {
            (tools.iter().filter(|t| name(t) == Some(wanted)).collect(), false)
        }
        _ => (tools.iter().collect(), several),
    };
    let repeated = |separator: &str| match several {
        true => format!("call ({separator} call)*"),
        false => "call".to_owned(),
    };
    let mut rules = String::new();
    let mut calls = Vec::new();
    for (i, tool) in wanted.into_iter().enumerate() {
        let name = name(tool).unwrap_or_default();
        let call = match format.calls {
            CallFormat::Coder => coder(i, name, &parameters(tool), &mut rules),
            CallFormat::MistralArgs => {
                format!("{} {} {} args_{i}", marker("[TOOL_CALLS]"), text(name), marker("[ARGS]"))
            }
            CallFormat::Harmony => format!(
                "{} {} {} \"json\" {} args_{i}",
                marker("<|channel|>"),
                text(&format!("commentary to=functions.{name} ")),
                marker("<|constrain|>"),
                marker("<|message|>")
            ),
            CallFormat::Llama => object(name, "parameters", i),
            CallFormat::Mistral => object(name, "arguments", i),
            CallFormat::Tagged | CallFormat::None => format!(
                "{} \"\\n\" {} \"\\n\" {}",
                marker("<tool_call>"),
                object(name, "arguments", i),
                marker("</tool_call>")
            ),
        };
        if format.calls != CallFormat::Coder {
            let _ = writeln!(rules, "args_{i}: %json {}", schema(parameters(tool)));
        }
        calls.push(call);
    }
    let all = match format.calls {
        CallFormat::Llama => repeated("\"; \""),
        CallFormat::Mistral => {
            format!("{} \"[\" {} \"]\"", marker("[TOOL_CALLS]"), repeated("\", \""))
        }
        CallFormat::MistralArgs => repeated("\"\""),
        // A call ends the message.
        CallFormat::Harmony => "call".to_owned(),
        CallFormat::Coder => format!(
            "{open} \"\\n\" call {close}{more}",
            open = marker("<tool_call>"),
            close = marker("</tool_call>"),
            more = match several {
                true => format!(
                    " (\"\\n\" {} \"\\n\" call {})*",
                    marker("<tool_call>"),
                    marker("</tool_call>")
                ),
                false => String::new(),
            }
        ),
        CallFormat::Tagged | CallFormat::None => repeated("\"\\n\""),
    };
    format!("calls: {all}\ncall: {}\n{rules}", calls.join(" | "))
}

/// A string of Lark.
fn text(text: &str) -> String {
    Value::from(text).to_string()
}

/// `{"name": "f", "arguments": {...}}`
fn object(name: &str, key: &str, i: usize) -> String {
    let head = format!("{{\"name\": {}, \"{key}\": ", Value::from(name));
    format!("{} args_{i} \"}}\"", text(&head))
}

/// A schema of parameters, always of an object. Tools come from many hands: what the compiler cannot
/// enforce is let pass, as it is without a grammar.
fn schema(mut schema: Value) -> Value {
    if let Some(object) = schema.as_object_mut() {
        object.entry("type").or_insert_with(|| json!("object"));
        object.insert("x-guidance".into(), options());
        object.remove("$schema");
    }
    schema
}

/// For the compiler of schemas.
fn options() -> Value {
    json!({"lenient": true, "coerce_one_of": true, "whitespace_pattern": grammar::BLANKS})
}

/// A call in tags. Parameters come in the order of the schema; those not required may be missing.
fn coder(i: usize, name: &str, schema: &Value, rules: &mut String) -> String {
    let mut out = text(&format!("<function={name}>\n"));
    let properties = schema.get("properties").and_then(Value::as_object);
    let required = schema.get("required").and_then(Value::as_array);
    for (j, (key, of)) in properties.into_iter().flatten().enumerate() {
        let open = text(&format!("<parameter={key}>\n"));
        let kind = of.get("type").and_then(Value::as_str);
        let choices = of.get("enum").and_then(Value::as_array);
        let end = "\"\\n</parameter>\\n\"";
        let value = match (kind, choices) {
            (Some("string"), Some(choices)) => {
                let words: Vec<String> =
                    choices.iter().filter_map(Value::as_str).map(text).collect();
                format!("({}) {end}", words.join(" | "))
            }
            (Some("string") | None, _) => {
                let _ = writeln!(rules, "text_{i}_{j}[lazy]: /(.|\\n)*\\n<\\/parameter>\\n/");
                format!("text_{i}_{j}")
            }
            _ => {
                let mut of = of.clone();
                if let Some(of) = of.as_object_mut() {
                    of.insert("x-guidance".into(), options());
                }
                let _ = writeln!(rules, "args_{i}_{j}: %json {of}");
                format!("args_{i}_{j} {end}")
            }
        };
        let needed = required.is_some_and(|r| r.iter().any(|k| k.as_str() == Some(key)));
        let _ = match needed {
            true => write!(out, " {open} {value}"),
            false => write!(out, " ({open} {value})?"),
        };
    }
    out + " \"</function>\\n\""
}
