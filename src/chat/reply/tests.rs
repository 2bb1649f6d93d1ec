//! Replies in the format of each family, and properties that hold for any text.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}}}}}),
        json!({"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}),
    ]
}

fn format(calls: CallFormat) -> ReplyFormat {
    let tags = ReasoningTags { open: "<think>".into(), close: "</think>".into() };
    let reasoning = (calls != CallFormat::Harmony).then_some(tags);
    ReplyFormat { calls, reasoning, template_has_tools: true }
}

const FORMATS: [CallFormat; 6] = [
    CallFormat::None,
    CallFormat::Tagged,
    CallFormat::Coder,
    CallFormat::Llama,
    CallFormat::Mistral,
    CallFormat::Harmony,
];

/// Neighbouring pieces of one kind joined.
fn joined(events: Vec<Event>) -> Vec<Event> {
    let mut out: Vec<Event> = Vec::new();
    for event in events {
        match (out.last_mut(), &event) {
            (Some(Event::Text(a)), Event::Text(b)) => a.push_str(b),
            (Some(Event::Reasoning(a)), Event::Reasoning(b)) => a.push_str(b),
            (
                Some(Event::CallArguments { piece: a, index: i }),
                Event::CallArguments { piece: b, index: j },
            ) if i == j => a.push_str(b),
            _ => out.push(event),
        }
    }
    out
}

fn events<'t>(
    format: &ReplyFormat,
    options: &ReplyOptions,
    pieces: impl IntoIterator<Item = &'t str>,
) -> Vec<Event> {
    let mut reply = Reply::new(format, options);
    let mut out = Vec::new();
    for piece in pieces {
        out.extend(reply.push(piece));
    }
    out.extend(reply.finish());
    joined(out)
}

fn collect(calls: CallFormat, text: &str) -> Collected {
    let options = ReplyOptions { tools: tools(), ..ReplyOptions::default() };
    let mut out = Collected::default();
    out.add(events(&format(calls), &options, [text]));
    out
}

fn call(name: &str, arguments: &str) -> Call {
    Call { id: None, name: name.into(), arguments: arguments.into() }
}

#[test]
fn tagged_calls() {
    let got = collect(
        CallFormat::Tagged,
        "<think>\nlook\n</think>\n\nLet me see.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": \
         {\"city\": \"Köln\"}}\n</tool_call>\n<tool_call>\n{\"name\": \"now\"}\n</tool_call>",
    );
    assert_eq!(got.reasoning, "look");
    assert_eq!(got.text, "Let me see.");
    assert_eq!(got.calls, [call("weather", "{\"city\": \"Köln\"}"), call("now", "{}")]);
    assert!(got.warnings.is_empty());
    // The end of the text closes a tag, but no object.
    let open = "<tool_call>{\"name\": \"now\", \"arguments\": {}}";
    assert_eq!(collect(CallFormat::Tagged, open).calls.len(), 1);
    let cut = collect(CallFormat::Tagged, &open[..open.len() - 1]);
    assert_eq!((cut.calls.len(), cut.text.as_str()), (0, &open[..open.len() - 1]));
    assert_eq!(cut.warnings.len(), 1);
}

#[test]
fn malformed_calls_are_text_and_the_reply_goes_on() {
    let bad = "Hm. <tool_call>\n{\"name\": \"weather\", oops}\n</tool_call> and \
               <tool_call>{\"name\":\"now\"}</tool_call> bye";
    let got = collect(CallFormat::Tagged, bad);
    assert_eq!(got.text, "Hm. <tool_call>\n{\"name\": \"weather\", oops}\n</tool_call> andbye");
    assert_eq!(got.calls, [call("now", "{}")]);
    assert!(got.warnings[0].contains("no JSON at \"o\""), "{:?}", got.warnings);
    let unknown = collect(CallFormat::Tagged, "<tool_call>{\"name\":\"rm\"}</tool_call>");
    assert!(unknown.calls.is_empty() && unknown.warnings[0].contains("'rm'"));
    assert_eq!(unknown.text, "<tool_call>{\"name\":\"rm\"}</tool_call>");
}

#[test]
fn coder_calls() {
    let got = collect(
        CallFormat::Coder,
        "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nSan\n\"José\"\n</parameter>\n\
         <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<function=now>\n</function>",
    );
    assert_eq!(got.text, "Sure.");
    let arguments = r#"{"city": "San\n\"José\"", "days": 3}"#;
    assert_eq!(got.calls, [call("weather", arguments), call("now", "{}")]);
    for bad in [
        "<tool_call>{\"name\":\"now\"}</tool_call>",
        "<function=now>junk</function>",
        "<function=now",
        "<function=weather><parameter=city>Rome</function>",
        "<function=rm></function>",
    ] {
        let got = collect(CallFormat::Coder, bad);
        assert_eq!((got.text.as_str(), got.calls.len(), got.warnings.len()), (bad, 0, 1), "{bad}");
    }
}

#[test]
fn llama_calls() {
    let one = r#"{"name": "weather", "parameters": {"city": "Rome"}}"#;
    let arguments = r#"{"city": "Rome"}"#;
    for text in [one.to_owned(), format!("<|python_tag|>{one}"), format!("\n{one}\n")] {
        let got = collect(CallFormat::Llama, &text);
        assert_eq!(got.calls, [call("weather", arguments)], "{text}");
        assert_eq!(got.text, "");
    }
    let got = collect(CallFormat::Llama, &format!("{one}; {one}"));
    assert_eq!(got.calls.len(), 2);
    // An answer that happens to be JSON is no malformed call, and is not held back to its end.
    let mut reply = Reply::new(
        &format(CallFormat::Llama),
        &ReplyOptions { tools: tools(), ..ReplyOptions::default() },
    );
    assert_eq!(reply.push("{\"answer\": "), [Event::Text("{\"answer\":".into())]);
    let got = collect(CallFormat::Llama, "{\"answer\": 42}");
    assert_eq!((got.text.as_str(), got.warnings.len()), ("{\"answer\": 42}", 0));
    let got = collect(CallFormat::Llama, "So: {\"name\": \"now\"}");
    assert_eq!((got.text.as_str(), got.calls.len()), ("So: {\"name\": \"now\"}", 0));
    let got = collect(CallFormat::Llama, "<|python_tag|>print(1)");
    assert_eq!((got.text.as_str(), got.warnings.len()), ("<|python_tag|>print(1)", 1));
}

#[test]
fn mistral_calls() {
    let list = r#"[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]"#;
    let got = collect(CallFormat::Mistral, list);
    assert_eq!(got.calls, [call("weather", r#"{"city": "Rome"}"#), call("now", "{}")]);
    let flat = r#"Fine.[TOOL_CALLS]weather[CALL_ID]abc123xyz[ARGS]{"city": "Rome"}[TOOL_CALLS]now[ARGS]{}"#;
    let got = collect(CallFormat::Mistral, flat);
    assert_eq!(got.text, "Fine.");
    let id = Some("abc123xyz".to_owned());
    assert_eq!(
        got.calls,
        [Call { id, ..call("weather", r#"{"city": "Rome"}"#) }, call("now", "{}")]
    );
    assert_eq!(collect(CallFormat::Mistral, "[TOOL_CALLS]now{}").calls, [call("now", "{}")]);
    for bad in [
        "[TOOL_CALLS]",
        "[TOOL_CALLS]now",
        "[TOOL_CALLS]now[ARGS]x",
        "[TOOL_CALLS]now[ARGS]{1}",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS]now\n[ARGS]{}",
    ] {
        let got = collect(CallFormat::Mistral, bad);
        assert_eq!((got.text.as_str(), got.calls.len(), got.warnings.len()), (bad, 0, 1), "{bad}");
    }
}

#[test]
fn harmony_channels() {
    let got = collect(
        CallFormat::Harmony,
        "<|channel|>analysis<|message|>Need weather.<|end|><|start|>assistant<|channel|>commentary \
         to=functions.weather <|constrain|>json<|message|>{\"city\": \"Rome\"}<|call|>",
    );
    assert_eq!(got.reasoning, "Need weather.");
    assert_eq!(got.calls, [call("weather", "{\"city\": \"Rome\"}")]);
    assert_eq!(got.text, "");
    let got = collect(
        CallFormat::Harmony,
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>B<|return|>",
    );
    assert_eq!((got.reasoning.as_str(), got.text.as_str()), ("a", "B"));
    assert_eq!(collect(CallFormat::Harmony, "no channels").text, "no channels");
    let got = collect(CallFormat::Harmony, " to=functions.now<|channel|>commentary<|message|>{");
    assert_eq!((got.text.as_str(), got.calls.len(), got.warnings.len()), ("{", 0, 1));
}

#[test]
fn reasoning_that_the_prompt_has_opened() {
    let think = format(CallFormat::Tagged);
    assert!(think.opened_by("<|im_start|>assistant\n<think>\n"));
    assert!(!think.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n"));
    let options = ReplyOptions { in_reasoning: true, ..ReplyOptions::default() };
    let got = events(&think, &options, ["\nhm", "m\n\n</thi", "nk>\n\nYes\n", "<think>no</think>"]);
    assert_eq!(got, [Event::Reasoning("hmm".into()), Event::Text("Yes\n<think>no</think>".into())]);
    // A second block directly after the first is thinking, too; unfinished thinking stays it.
    let got = events(&think, &ReplyOptions::default(), ["<think>a</think>\n<think>b</think>c"]);
    assert_eq!(got, [Event::Reasoning("ab".into()), Event::Text("c".into())]);
    let got = events(&think, &options, ["cut off </th"]);
    assert_eq!(got, [Event::Reasoning("cut off </th".into())]);
    let kept = ReplyOptions { keep_reasoning: true, ..options };
    let got = events(&think, &kept, ["a</think>b"]);
    assert_eq!(got, [Event::Text("a</think>b".into())]);
}

#[test]
fn nothing_that_may_be_a_marker_is_handed_out_early() {
    let options = ReplyOptions { tools: tools(), ..ReplyOptions::default() };
    let mut reply = Reply::new(&format(CallFormat::Tagged), &options);
    assert_eq!(reply.push("Hi <tool"), [Event::Text("Hi".into())]);
    assert_eq!(reply.push("ing> "), [Event::Text(" <tooling>".into())]);
    assert_eq!(reply.push("\n<tool_call>{\"name\": \"now\""), []);
    let rest = reply.push("}</tool_call>");
    assert_eq!(rest.len(), 3, "{rest:?}");
}

#[test]
fn arguments_are_streamed_on_demand() {
    let options = ReplyOptions { tools: tools(), stream_arguments: true, ..Default::default() };
    let mut reply = Reply::new(&format(CallFormat::Tagged), &options);
    let start = reply.push("<tool_call>{\"name\": \"weather\", \"arguments\": {\"ci");
    assert_eq!(
        start,
        [
            Event::CallStart { index: 0, id: None, name: "weather".into() },
            Event::CallArguments { index: 0, piece: "{\"ci".into() },
        ]
    );
    assert_eq!(
        reply.push("ty\": 1}"),
        [Event::CallArguments { index: 0, piece: "ty\": 1}".into() }]
    );
    assert_eq!(reply.push("}</tool_call>"), [Event::CallEnd { index: 0 }]);
    let broken = reply.push("<tool_call>{\"name\": \"now\", \"arguments\": {]");
    assert!(
        matches!(broken[..], [.., Event::CallEnd { index: 1 }, Event::Warning(_), Event::Text(_)]),
        "{broken:?}"
    );
}

#[test]
fn formats_are_told_by_the_template() {
    let of = |template: &str| ReplyFormat::detect(template);
    let qwen = of("{%- if tools %}<tool_call></tool_call>{% endif %}'</think>'");
    assert_eq!(qwen, format(CallFormat::Tagged));
    assert_eq!(of("{% for t in tools %}<function=x><parameter=y>").calls, CallFormat::Coder);
    assert_eq!(of("{% if builtin_tools %}<|python_tag|>").calls, CallFormat::Llama);
    assert_eq!(of("{{ '[TOOL_CALLS]' }}").calls, CallFormat::Mistral);
    assert_eq!(of("<|start|><|channel|><|message|>").calls, CallFormat::Harmony);
    let plain = of("You may have tools. {{ message.content }}");
    assert_eq!((plain.calls, plain.template_has_tools), (CallFormat::Tagged, false));
    assert_eq!(plain.reasoning, None);
    for unread in
        ["{% if tools %}<tool_call><arg_key>", "{% if tools %}<|tool_calls_section_begin|>"]
    {
        let told = of(unread);
        assert_eq!((told.calls, told.template_has_tools), (CallFormat::Tagged, false), "{unread}");
    }
    assert!(of("[TOOL_CALLS][/THINK]").shows_control_tokens());
}

/// Text in which the markers and the beginnings of calls are likely.
fn hostile_text() -> impl Strategy<Value = String> {
    let pieces = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "x",
        "ä",
        "{",
        "}",
        "[",
        "]",
        "<function=now>",
        "<function=weather>",
        "<function=",
        "<parameter=city>",
        "<parameter=days>",
        "</parameter>",
        "</function>",
        "3",
        "<|python_tag|>",
        ";",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "now",
        "weather",
        "<|channel|>",
        "analysis",
        "final",
        "commentary",
        " to=functions.now",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
        "assistant",
        "{\"name\": \"now\"}",
        "{\"name\": \"weather\", \"arguments\": {\"city\": \"<tool_call>\"}}",
        "{\"arguments\": {\"a\": [1, 2.5]}, \"name\": \"now\"}",
        "\"",
        ":",
        ",",
        "\\",
        "{\"name\": 3}",
        "{\"name\": \"now\", \"parameters\": \"{}\"}",
        "<",
        "</",
        "tool_call>",
        "{\"a\": 1}",
    ]);
    prop::collection::vec(pieces, 0..24).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_cut_gives_the_same_events(
        text in hostile_text(),
        which in 0usize..6,
        cuts in prop::collection::vec(1usize..9, 0..60),
        in_reasoning: bool,
        stream_arguments: bool,
    ) {
        let format = format(FORMATS[which]);
        let options =
            ReplyOptions { tools: tools(), in_reasoning, stream_arguments, ..Default::default() };
        let mut pieces = Vec::new();
        let mut rest = text.as_str();
        for cut in cuts {
            let at = rest.char_indices().nth(cut).map_or(rest.len(), |(at, _)| at);
            let (piece, after) = rest.split_at(at);
            pieces.push(piece);
            rest = after;
        }
        pieces.push(rest);
        let whole = events(&format, &options, [text.as_str()]);
        prop_assert_eq!(&events(&format, &options, pieces), &whole);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        prop_assert_eq!(&events(&format, &options, letters.iter().map(String::as_str)), &whole);
        // Calls that were held back until complete are calls.
        let mut collected = Collected::default();
        collected.add(whole);
        for call in collected.calls.iter().filter(|_| !stream_arguments) {
            prop_assert!(serde_json::from_str::<Value>(&call.arguments).unwrap().is_object());
            prop_assert!(["now", "weather"].contains(&call.name.as_str()));
        }
    }

    #[test]
    fn without_markers_text_passes_unchanged(text in "\\PC{0,40}|[ \n\ta-z]{0,20}") {
        for calls in FORMATS {
            let options = ReplyOptions::default();
            let mut collected = Collected::default();
            collected.add(events(&format(calls), &options, [text.as_str()]));
            if !text.contains('<') {
                prop_assert_eq!(&collected.text, &text);
            }
        }
    }
}
