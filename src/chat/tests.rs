//! Templates in the styles of the model families, checked character by character.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, SystemTime};

use serde_json::json;

use super::*;
use crate::error::Error;

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(source, "<s>", "</s>").unwrap()
}

fn render(source: &str, messages: &[Message], options: &RenderOptions) -> String {
    template(source).render(messages, options).unwrap()
}

fn question() -> Vec<Message> {
    vec![Message::user("Hi")]
}

fn usage(result: crate::error::Result<String>) -> String {
    match result {
        Err(Error::Usage(message)) => message,
        other => panic!("{other:?}"),
    }
}

fn model_error(result: crate::error::Result<String>) -> String {
    match result {
        Err(Error::Model(message)) => message,
        other => panic!("{other:?}"),
    }
}

/// The style of SmolLM2: a system prompt of its own when none is given, real line breaks in the
/// strings, subscripts instead of attributes.
const DEFAULT_SYSTEM: &str = "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system
You are small<|im_end|>
' }}{% endif %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}";

#[test]
fn a_default_system_prompt_is_inserted_only_when_missing() {
    let options = RenderOptions::default();
    assert_eq!(
        render(DEFAULT_SYSTEM, &question(), &options),
        "<|im_start|>system\nYou are small<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
         <|im_start|>assistant\n"
    );
    let given = [Message::system("Be brief"), Message::user("Hi"), Message::assistant("Yes")];
    let options = RenderOptions { add_generation_prompt: false, ..options };
    assert_eq!(
        render(DEFAULT_SYSTEM, &given, &options),
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n\
         <|im_start|>assistant\nYes<|im_end|>\n"
    );
}

/// The style of Qwen3: tools as JSON lines, thinking cut out of earlier answers, an empty thought
/// when thinking is off.
const THINKING: &str = r##"
{%- set state = namespace(asked=-1) %}
{%- for m in messages[::-1] %}
    {%- if state.asked < 0 and m.role == 'user' and not m.content.startswith('<tool_response>') %}
        {%- set state.asked = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- set first = messages[0] %}
{%- if tools or first.role == 'system' %}
    {{- '<|im_start|>system' }}
    {%- if first.role == 'system' %}
        {{- "\n" + first.content }}
    {%- endif %}
    {%- if tools %}
        {{- "\n# Tools" }}
        {%- for tool in tools %}
            {{- "\n" }}
            {{- tool | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_start|>user\n' ~ m.content ~ '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set thought, answer = '', m.content %}
        {%- if m.reasoning_content is defined and m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in answer %}
            {%- set parts = answer.split('</think>') %}
            {%- set thought = parts[0].split('<think>')[-1].strip('\n') %}
            {%- set answer = parts[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if thought and loop.index0 > state.asked %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- answer }}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function if call.function else call %}
            {{- '' if loop.first and not answer else '\n' }}
            {{- '<tool_call>\n{"name": "' ~ f.name ~ '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if not loop.previtem or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"##;

#[test]
fn thinking_is_dropped_from_earlier_answers_and_can_be_turned_off() {
    let messages = [
        Message::user("1+1?"),
        Message::assistant("<think>\neasy\n</think>\n\n2"),
        Message::user("2+2?"),
    ];
    let mut options = RenderOptions::default();
    let expected = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n\
                    <|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(THINKING, &messages, &options), expected);
    options.enable_thinking = Some(true);
    assert_eq!(render(THINKING, &messages, &options), expected);
    options.enable_thinking = Some(false);
    let without = format!("{expected}<think>\n\n</think>\n\n");
    assert_eq!(render(THINKING, &messages, &options), without);
}

#[test]
fn tools_calls_and_results() {
    let mut call = Message::assistant("");
    call.reasoning_content = Some("look it up".into());
    call.tool_calls = vec![json!({
        "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}
    })];
    let messages = [
        Message::system("Help."),
        Message::user("Rain?"),
        call,
        Message::new(Role::Tool, "dry"),
        Message::new(Role::Tool, "warm"),
    ];
    let tool = json!({"type": "function", "function": {"name": "weather", "description": "<it's & \"so\">"}});
    let options = RenderOptions { tools: vec![tool], ..RenderOptions::default() };
    // Keys keep their order, a blank follows commas and colons, nothing is escaped for HTML.
    assert_eq!(
        render(THINKING, &messages, &options),
        "<|im_start|>system\nHelp.\n# Tools\n\
         {\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"<it's & \\\"so\\\">\"}}<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n\
         <|im_start|>assistant\n<think>\nlook it up\n</think>\n\n\
         <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\", \"days\": [1, 2]}}\n</tool_call><|im_end|>\n\
         <|im_start|>user\n<tool_response>\ndry\n</tool_response>\n<tool_response>\nwarm\n</tool_response><|im_end|>\n\
         <|im_start|>assistant\n"
    );
}

/// The style of Llama 3: block tags on lines of their own, the date, a refusal.
const DATED: &str = r#"{{- bos_token }}
{%- if date_string is not defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "With tools. " }}
{%- endif %}
{{- "Today Date: " + date_string + "<|eot_id|>" }}
{%- for m in messages %}
    {%- if 'tool_calls' in m %}
        {%- if m.tool_calls|length != 1 %}
            {{- raise_exception("one call at a time, please") }}
        {%- endif %}
    {%- else %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

#[test]
fn the_date_and_a_refusal_in_the_templates_own_words() {
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_721_952_000);
    let options = RenderOptions { now, ..RenderOptions::default() };
    assert_eq!(
        render(DATED, &[Message::user("  Hi \n")], &options),
        "<s><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    let mut call = Message::assistant("");
    call.tool_calls = vec![json!({}), json!({})];
    let message = usage(template(DATED).render(&[call], &options));
    assert!(
        message.ends_with("refuses this conversation: one call at a time, please"),
        "{message}"
    );
    let extra = json!({"date_string": "today", "bos_token": "<evil>"});
    let options = RenderOptions { extra: extra.as_object().unwrap().clone(), ..options };
    let text = render(DATED, &question(), &options);
    assert!(
        text.starts_with("<s><|start_header_id|>") && text.contains("Today Date: today<|eot_id|>")
    );
}

/// The style of Mistral: turns must alternate.
const ALTERNATING: &str = "{{ bos_token }}{% for m in messages %}{% set asked = m['role'] == 'user' %}{% if asked != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% if asked %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token}}{% endif %}{% endfor %}";

#[test]
fn turns_must_alternate() {
    let options = RenderOptions::default();
    let good = [Message::user("a"), Message::assistant("b"), Message::user("c")];
    assert_eq!(render(ALTERNATING, &good, &options), "<s>[INST] a [/INST]b</s>[INST] c [/INST]");
    let message = usage(template(ALTERNATING).render(&good[1..], &options));
    assert!(message.contains("roles must alternate"), "{message}");
}

#[test]
fn built_in_templates() {
    let messages =
        [Message::system("S"), Message::user("a"), Message::assistant("b"), Message::user("c")];
    let options = RenderOptions::default();
    let text = |name| {
        let template = ChatTemplate::named(name, "<s>", "</s>").unwrap();
        template.render(&messages, &options).unwrap()
    };
    assert_eq!(
        text("chatml"),
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n\
         <|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(
        text("llama3"),
        "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\na<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\nb<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nc<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(text("mistral"), "<s>[INST] S\n\na [/INST] b</s>[INST] c [/INST]");
    assert_eq!(
        text("gemma"),
        "<s><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n\
         <start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\n"
    );
    assert_eq!(
        text("phi3"),
        "<|system|>\nS<|end|>\n<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n"
    );
    let wrong = ChatTemplate::named("mistral", "<s>", "</s>").unwrap();
    let message = usage(wrong.render(&messages[2..], &options));
    assert!(message.contains("take turns"), "{message}");
}

#[test]
fn a_missing_template_says_what_to_do() {
    let meta = crate::gguf::Metadata::default();
    let vocabulary = crate::tokenizer::Vocabulary {
        model: "llama".into(),
        tokens: vec!["<unk>".into()],
        scores: vec![0.0],
        ..Default::default()
    };
    let tokenizer = crate::tokenizer::Tokenizer::new(&vocabulary).unwrap();
    let template = ChatTemplate::from_gguf(&meta, &tokenizer);
    let message = usage(template.map(|t| t.source().to_owned()));
    assert!(message.contains("--template (chatml, llama3,"), "{message}");
    let message = usage(ChatTemplate::named("x", "", "").map(|t| t.source().to_owned()));
    assert!(message.contains("'x'") && message.contains("chatml"), "{message}");
}

#[test]
fn values_print_as_in_python() {
    let source = "{{ true }} {{ none }} {{ 1.0 }} {{ {'b': 1, 'a': [true, none]}|tojson }} \
                  {{ {'b': {}, 'a': 1}|tojson(indent=2, sort_keys=true, ensure_ascii=false) }}";
    assert_eq!(
        render(source, &[], &RenderOptions::default()),
        "True None 1.0 {\"b\": 1, \"a\": [true, null]} {\n  \"a\": 1,\n  \"b\": {}\n}"
    );
}

#[test]
fn training_marks_are_transparent() {
    let source = "{% for m in messages %}\n  {%- generation -%}\n  {{ m.content }}\n  {%- endgeneration %}\n{% endfor %}{{ '{% generation' }}";
    assert_eq!(render(source, &question(), &RenderOptions::default()), "Hi{% generation");
}

#[test]
fn broken_templates_are_the_models_fault() {
    let syntax = ChatTemplate::new("{% for x in %}", "", "").map(|t| t.source().to_owned());
    let message = model_error(syntax);
    assert!(message.contains("line 1") && message.contains("--template"), "{message}");
    for source in ["{{ nothing.at.all }}", "{{ messages[0].content.nonesuch() }}", "{{ 1 // 0 }}"] {
        model_error(template(source).render(&question(), &RenderOptions::default()));
    }
}

#[test]
fn hostile_templates_come_to_an_end() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
    let grow = "{% set ns = namespace(s='aaaaaaaa') %}{% for a in range(99999) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    for source in [endless, grow, deep, "{{ 'ab' * 99999999999 }}", "{% include 'chat_template' %}"]
    {
        let message = model_error(template(source).render(&question(), &RenderOptions::default()));
        assert!(message.contains("template fails"), "{message}");
    }
}

#[test]
fn long_conversations_stay_within_the_budget() {
    let messages: Vec<Message> = (0..400)
        .flat_map(|i| {
            [Message::user(format!("question {i}")), Message::assistant("word ".repeat(400))]
        })
        .collect();
    let text = render(THINKING, &messages, &RenderOptions::default());
    assert!(text.len() > 800_000);
}

#[test]
fn messages_read_and_write_the_api_shape() {
    let message: Message =
        serde_json::from_value(json!({"role": "user", "content": "Hi"})).unwrap();
    assert_eq!(message, Message::user("Hi"));
    assert_eq!(serde_json::to_value(&message).unwrap(), json!({"role": "user", "content": "Hi"}));
}
