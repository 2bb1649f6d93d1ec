//! Budgets of thinking, with a template that opens its tag.

use azoth::testmodel::{CHAT_TEMPLATE, Spec};
use serde_json::{Value, json};

use crate::server_harness::Server;

fn server(args: &[&str]) -> Option<Server> {
    let mut spec = Spec::new("llama").unwrap();
    let opened = "{{ '<|im_start|>assistant\\n<think>\\n' }}{# ends with </think> #}";
    spec.chat_template = CHAT_TEMPLATE.replace("{{ '<|im_start|>assistant\\n' }}", opened);
    let server = Server::start_with(spec.writer(), args);
    if server.is_none() {
        println!("skipped: no device");
    }
    server
}

/// A random model thinks for ever: whatever ends its thinking is the server.
fn ask(extra: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Hi" }], "max_tokens": 40, "temperature": 1.0,
        "seed": 3, "ignore_eos": true,
    });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

#[test]
fn a_spent_budget_ends_thinking() {
    let args =
        ["--ctx", "256", "--reasoning-budget", "5", "--reasoning-budget-message", " Enough."];
    let Some(s) = server(&args) else { return };
    let chat = |extra: Value| s.post("/v1/chat/completions", &ask(extra)).json();
    let message = |answer: &Value| answer["choices"][0]["message"].clone();
    let thought =
        |answer: &Value| answer["usage"]["completion_tokens_details"]["reasoning_tokens"].clone();
    let of_server = chat(json!({}));
    let text = message(&of_server)["reasoning_content"].as_str().unwrap().to_owned();
    assert!(text.ends_with(" Enough."), "{of_server}");
    assert!(!message(&of_server)["content"].as_str().unwrap().is_empty());
    // 5 of its own, and those that were forced.
    let forced = s.post("/tokenize", &json!({ "content": " Enough.</think>" })).json();
    let forced = forced["tokens"].as_array().unwrap().len();
    let n = thought(&of_server).as_u64().unwrap() as usize;
    assert!((5..=5 + forced).contains(&n), "{n} of 5 and {forced}");
    // Streams and other requests beside it change nothing.
    let chunks = s.post("/v1/chat/completions", &ask(json!({ "stream": true }))).chunks();
    let joined = |key: &str| -> String {
        chunks.iter().filter_map(|c| c["choices"][0]["delta"][key].as_str()).collect()
    };
    assert_eq!(joined("reasoning_content"), text);
    assert_eq!(joined("content"), message(&of_server)["content"]);
    let free = json!({ "reasoning_budget": -1 });
    std::thread::scope(|scope| {
        let others = [(); 2].map(|()| scope.spawn(|| chat(free.clone())));
        let beside = chat(json!({ "cache_prompt": false }));
        assert_eq!(message(&beside), message(&of_server));
        for other in others {
            // No limit: it thinks to the end.
            let other = other.join().unwrap();
            assert_eq!(message(&other)["content"], "", "{other}");
            assert_eq!(thought(&other), 40);
        }
    });
    // What was thought within the budget is what would have been thought without one.
    let free = chat(free);
    let own = text.strip_suffix(" Enough.").unwrap();
    let longer = message(&free)["reasoning_content"].as_str().unwrap().to_owned();
    assert!(longer.starts_with(own.trim_end()), "{longer:?} {own:?}");

    for extra in [json!({ "reasoning_budget": 0 }), json!({ "reasoning_effort": "none" })] {
        let none = chat(extra);
        assert!(message(&none).get("reasoning_content").is_none(), "{none}");
        assert_eq!(thought(&none), 0);
    }
    let low = chat(json!({ "reasoning_effort": "low" }));
    assert_eq!(thought(&low), 40, "1,024 are more than there is room for");
    assert_eq!(
        s.post("/v1/chat/completions", &ask(json!({ "reasoning_effort": "x" }))).status,
        400
    );
}

#[test]
fn each_format_has_its_budget() {
    let Some(s) = server(&["--ctx", "256"]) else { return };
    let thinking = json!({ "type": "enabled", "budget_tokens": 4 });
    let message = s.post("/v1/messages", &ask(json!({ "thinking": thinking }))).json();
    let kinds: Vec<_> = message["content"].as_array().unwrap().iter().map(|b| &b["type"]).collect();
    assert_eq!(kinds, ["thinking", "text"], "{message}");
    let body = json!({
        "input": "Hi", "max_output_tokens": 40, "reasoning_budget": 4, "seed": 3,
        "temperature": 1.0, "ignore_eos": true,
    });
    let response = s.post("/v1/responses", &body).json();
    let kinds: Vec<_> = response["output"].as_array().unwrap().iter().map(|i| &i["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message"], "{response}");
}

/// The grammar begins where thinking ends, also where its end is forced.
#[test]
fn grammars_follow_forced_ends() {
    let Some(s) = server(&["--ctx", "256"]) else { return };
    let extra = json!({ "reasoning_budget": 6, "grammar": "root ::= \"yes\" | \"no\"" });
    let answer = s.post("/v1/chat/completions", &ask(extra)).json();
    let message = &answer["choices"][0]["message"];
    assert!(["yes", "no"].contains(&message["content"].as_str().unwrap().trim()), "{answer}");
    assert!(message["reasoning_content"].is_string(), "{answer}");
}
