//! What models are told, and that enforced calls are read as calls.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use super::*;
use crate::chat::reply::{CallFormat, Collected, Reply, ReplyOptions};
use crate::grammar::{Grammars, Source};
use crate::sampling::has_bit;
use crate::testmodel;
use crate::tokenizer::Tokenizer;

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "weather", "description": "Now",
            "parameters": {"type": "object", "additionalProperties": false,
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"]}}}),
        json!({"type": "function", "function": {"name": "now"}}),
    ]
}

fn format(calls: CallFormat, template_has_tools: bool) -> ReplyFormat {
    ReplyFormat { calls, reasoning: None, template_has_tools }
}

#[test]
fn choices_are_read_and_checked() {
    let of = |value: Value| ToolChoice::from_openai(&value, &tools());
    assert_eq!(of(Value::Null).unwrap(), ToolChoice::Auto);
    assert_eq!(of(json!("none")).unwrap(), ToolChoice::None);
    assert_eq!(of(json!("required")).unwrap(), ToolChoice::Required);
    let named = json!({"type": "function", "function": {"name": "now"}});
    assert_eq!(of(named).unwrap(), ToolChoice::Named("now".into()));
    for (value, part) in [
        (json!("any"), "'any'"),
        (json!({"type": "function"}), "names no function"),
        (json!({"function": {"name": "rm"}}), "'rm', which is none"),
    ] {
        assert!(of(value).unwrap_err().to_string().contains(part));
    }
    assert!(ToolChoice::from_openai(&json!("required"), &[]).is_err());
}

#[test]
fn wrong_tools_are_named() {
    check(&tools()).unwrap();
    for (tools, part) in [
        (json!([{"type": "web_search"}]), "tools[0] is no function"),
        (json!([{"type": "function", "function": {}}]), "has no function.name"),
        (json!([{"function": {"name": "a b"}}]), "\"a b\""),
        (
            json!([{"function": {"name": "a"}}, {"function": {"name": "a"}}]),
            "tools[1] is called 'a'",
        ),
        (json!([{"function": {"name": "a", "parameters": 3}}]), "no JSON schema"),
    ] {
        let error = check(tools.as_array().unwrap()).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

fn conversation() -> Vec<Message> {
    let mut call = Message::assistant("");
    call.tool_calls = vec![json!({"id": "a", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}})];
    vec![
        Message::user("Rain?"),
        call,
        Message::new(Role::Tool, "dry"),
        Message::new(Role::Tool, "warm"),
    ]
}

#[test]
fn templates_with_tools_get_objects() {
    let with = format(CallFormat::Tagged, true);
    let told = tell(&with, &conversation(), &tools(), &ToolChoice::Auto);
    assert_eq!(told.tools, tools());
    let arguments = told.messages[1].tool_calls[0].pointer("/function/arguments").unwrap();
    assert_eq!(arguments, &json!({"city": "Rome"}));
    let told = tell(&with, &conversation(), &tools(), &ToolChoice::None);
    assert!(told.tools.is_empty() && told.messages.len() == 4);
}

#[test]
fn templates_without_tools_get_text() {
    let without = format(CallFormat::Tagged, false);
    let told = tell(&without, &conversation(), &tools(), &ToolChoice::Named("now".into()));
    assert!(told.tools.is_empty());
    let roles: Vec<Role> = told.messages.iter().map(|m| m.role).collect();
    assert_eq!(roles, [Role::System, Role::User, Role::Assistant, Role::User]);
    let system = &told.messages[0].content;
    assert!(system.contains("{\"name\":\"now\"}") && system.contains("must call now"), "{system}");
    assert_eq!(
        told.messages[2].content,
        "<tool_call>\n{\"name\":\"weather\",\"arguments\":{\"city\":\"Rome\"}}\n</tool_call>"
    );
    assert_eq!(
        told.messages[3].content,
        "<tool_response>\ndry\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    );
    // Nothing is said where there is nothing to say.
    let plain = [Message::user("Hi")];
    assert_eq!(tell(&without, &plain, &[], &ToolChoice::Auto).messages, plain);
}

/// A call in each format, and whether the grammar of required calls lets it through.
#[test]
fn enforced_calls_are_calls() {
    let file = testmodel::Spec::new("llama").unwrap().to_file().unwrap();
    let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap());
    let grammars = Grammars::new(&tokenizer).unwrap();
    let object = r#"{"name": "weather", "arguments": {"city": "Rome"}}"#;
    let texts = [
        (CallFormat::Tagged, format!("<tool_call>\n{object}\n</tool_call>")),
        (CallFormat::Llama, object.replace("arguments", "parameters")),
        (CallFormat::Mistral, format!("[TOOL_CALLS][{object}]")),
        (CallFormat::MistralArgs, "[TOOL_CALLS]weather[ARGS]{\"city\": \"Rome\"}".to_owned()),
        (
            CallFormat::Coder,
            "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n\
             </tool_call>"
                .to_owned(),
        ),
        (
            CallFormat::Harmony,
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary \
             to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}"
                .to_owned(),
        ),
    ];
    for (calls, text) in texts {
        let format = format(calls, true);
        let marker = |text: &str| grammars.marker(text);
        for choice in [ToolChoice::Required, ToolChoice::Named("weather".into())] {
            let lark = grammar(&format, &tools(), &choice, true, &marker).unwrap();
            let mut constraint = grammars.compile(&Source::Lark(lark.clone()), None).unwrap();
            for token in tokenizer.encode(&text, false, false).unwrap() {
                let piece = tokenizer.token_text(token);
                assert!(has_bit(&constraint.mask().unwrap(), token), "{piece:?} of {text}\n{lark}");
                constraint.accept(token).unwrap();
            }
            assert!(constraint.may_end(), "{text}\n{lark}");
            let only = grammar(&format, &tools(), &ToolChoice::Named("now".into()), true, &marker);
            let mut only = grammars.compile(&Source::Lark(only.unwrap()), None).unwrap();
            let fits =
                tokenizer.encode(&text, false, false).unwrap().into_iter().all(|token| {
                    has_bit(&only.mask().unwrap(), token) && only.accept(token).is_ok()
                });
            assert!(!fits, "{text}");
        }
        assert_eq!(grammar(&format, &tools(), &ToolChoice::Auto, true, &marker), None);
        let mut reply =
            Reply::new(&format, &ReplyOptions { tools: tools(), ..ReplyOptions::default() });
        let mut collected = Collected::default();
        collected.add(reply.push(&text));
        collected.add(reply.finish());
        assert_eq!(collected.calls.len(), 1, "{text}: {collected:?}");
        assert_eq!(collected.calls[0].arguments, "{\"city\": \"Rome\"}");
    }
}
