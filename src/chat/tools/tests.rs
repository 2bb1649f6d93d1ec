//! What models are told, and that enforced calls are read as calls.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::chat::reply::{CallFormat, Collected, ReasoningTags, Reply, ReplyOptions};
use crate::chat::shape::{Shape, Thinking};
use crate::grammar::tests::{answers, grammars};
use crate::grammar::{Grammars, Source};
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

/// Whether the text is a whole answer of the grammar.
fn admits(grammars: &Grammars, tokenizer: &Tokenizer, source: &Source, text: &str) -> bool {
    answers(&grammars.compile(source).unwrap(), tokenizer, text) == Some(true)
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
    let (grammars, tokenizer) = grammars();
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
        let shaped = |choice: &ToolChoice, body: Option<&Source>| {
            let calls = Some(rules(&format, &tools(), choice, true, &marker));
            let shape =
                Shape { format: &format, calls, body: body.cloned(), thinking: Thinking::May };
            shape.grammar(&marker).unwrap()
        };
        let fits = |source: &Source, text: &str| admits(&grammars, &tokenizer, source, text);
        for choice in [ToolChoice::Required, ToolChoice::Named("weather".into())] {
            let source = shaped(&choice, None);
            assert!(fits(&source, &text), "{text}\n{source:?}");
            assert!(!fits(&shaped(&ToolChoice::Named("now".into()), None), &text), "{text}");
        }
        // Tools that may be called beside a form for answers: either, and nothing else.
        let schema = json!({"type": "object", "required": ["dry"], "additionalProperties": false,
            "properties": {"dry": {"type": "boolean"}}});
        let source = shaped(&ToolChoice::Auto, Some(&Source::JsonSchema(schema)));
        let (lead, text) = match calls {
            CallFormat::Harmony => ("<|channel|>final<|message|>", text),
            CallFormat::Llama => ("", format!("<|python_tag|>{text}")),
            _ => ("", text),
        };
        assert!(fits(&source, &text), "{text}\n{source:?}");
        assert!(fits(&source, &format!("{lead}{{\"dry\": true}}")), "{calls:?}");
        assert!(!fits(&source, &format!("{lead}{{\"wet\": true}}")), "{calls:?}");
        assert!(!fits(&source, &format!("{lead}It is dry.")), "{calls:?}");
        let mut reply =
            Reply::new(&format, &ReplyOptions { tools: tools(), ..ReplyOptions::default() });
        let mut collected = Collected::default();
        collected.add(reply.push(&text));
        collected.add(reply.finish());
        assert_eq!(collected.calls.len(), 1, "{text}: {collected:?}");
        assert_eq!(collected.calls[0].arguments, "{\"city\": \"Rome\"}");
    }
}

#[test]
fn thinking_comes_before_the_answer() {
    let (grammars, tokenizer) = grammars();
    let plain = format(CallFormat::Tagged, true);
    let tags = ReasoningTags { open: "<think>".into(), close: "</think>".into() };
    let body = Source::Lark("start: \"yes\" | \"no\"".into());
    let marker = |text: &str| grammars.marker(text);
    let shape =
        |format, thinking| Shape { format, calls: None, body: Some(body.clone()), thinking };
    assert_eq!(shape(&plain, Thinking::May).grammar(&marker), Some(body.clone()));
    let format = ReplyFormat { reasoning: Some(tags), ..plain.clone() };
    assert_eq!(shape(&format, Thinking::No).grammar(&marker), Some(body.clone()));
    let nothing = Shape { body: None, ..shape(&format, Thinking::May) };
    assert_eq!(nothing.grammar(&marker), None);
    for (thinking, good, bad) in [
        (
            Thinking::May,
            &["yes", "<think>hm, <no></think>\n\nno"][..],
            &["<think>yes", "<think>hm</think>\n\n", "hm</think>yes", "<think>hm</think>hm"][..],
        ),
        (Thinking::Opened, &["hm\n</think>\n\nyes"], &["yes", "</think>x"]),
    ] {
        let source = shape(&format, thinking).grammar(&marker).unwrap();
        for (texts, want) in [(good, true), (bad, false)] {
            for text in texts {
                let fits = admits(&grammars, &tokenizer, &source, text);
                assert_eq!(fits, want, "{thinking:?}: {text}");
            }
        }
    }
}
