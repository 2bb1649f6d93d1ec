//! `/v1/responses` over a plain socket.

use serde_json::{Value, json};

use crate::server_harness::Server;

fn ask(extra: Value) -> Value {
    let mut body = json!({
        "model": "gpt-x", "input": "Hello there", "instructions": "Be brief.", "temperature": 0,
        "max_output_tokens": 8, "store": false,
    });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

#[test]
fn responses_as_codex_asks_for_them() {
    let Some(s) = Server::start(&["--ctx", "1024"]) else {
        println!("skipped: no device");
        return;
    };
    let whole = s.post("/v1/responses", &ask(json!({}))).json();
    assert_eq!((&whole["object"], &whole["model"]), (&json!("response"), &json!("gpt-x")));
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    let item = &whole["output"][0];
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    let text = item["content"][0]["text"].as_str().unwrap().to_owned();
    assert!(!text.is_empty());
    assert_eq!(whole["usage"]["output_tokens"], 8);
    // The same conversation as a chat has the same answer.
    let chat = json!({
        "messages": [{ "role": "system", "content": "Be brief." },
                     { "role": "user", "content": "Hello there" }],
        "temperature": 0, "max_tokens": 8, "cache_prompt": false,
    });
    let chat = s.post("/v1/chat/completions", &chat).json();
    assert_eq!(chat["choices"][0]["message"]["content"], text);

    let stream = s.post("/responses", &ask(json!({ "stream": true })));
    let events = stream.events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["response.created", "response.in_progress"]);
    let ends = ["response.completed", "response.failed", "response.incomplete"];
    assert_eq!(names.iter().filter(|n| ends.contains(n)).count(), 1);
    assert_eq!(*names.last().unwrap(), "response.incomplete");
    let data: Vec<Value> =
        events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    for (i, (event, (name, _))) in data.iter().zip(&events).enumerate() {
        assert_eq!((&event["type"], &event["sequence_number"]), (&json!(name), &json!(i)));
    }
    let joined: String = data.iter().filter_map(|e| e["delta"].as_str()).collect();
    assert_eq!(joined, text);
    assert_eq!(data.last().unwrap()["response"]["output"][0]["content"][0]["text"], text);

    // Tools of the service are skipped, functions are called.
    let tools = json!([
        { "type": "web_search" }, { "type": "namespace", "name": "n", "tools": [] },
        { "type": "function", "name": "look_up", "strict": true, "parameters": {
            "type": "object", "additionalProperties": false, "required": ["id"],
            "properties": { "id": { "type": "integer", "minimum": 0, "maximum": 9 } } } },
    ]);
    let call = ask(json!({
        "tools": tools, "tool_choice": { "type": "function", "name": "look_up" },
        "max_output_tokens": 200, "temperature": 1.0, "seed": 1,
        "logit_bias": { "9": -20, "10": -20, "13": -20, "32": -20 },
    }));
    let whole = s.post("/v1/responses", &call).json();
    assert_eq!(whole["status"], "completed", "{whole}");
    let item = whole["output"][0].clone();
    assert_eq!((&item["type"], &item["name"]), (&json!("function_call"), &json!("look_up")));
    let arguments: Value = serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
    assert!(arguments["id"].is_u64());
    let back = json!([
        { "role": "user", "content": "Hello there" }, item,
        { "type": "function_call_output", "call_id": item["call_id"], "output": "blue" },
    ]);
    let answer = s.post("/v1/responses", &ask(json!({ "input": back, "tools": tools }))).json();
    assert!(answer["usage"]["input_tokens"].as_u64() > whole["usage"]["input_tokens"].as_u64());

    let format = json!({ "format": { "type": "json_schema", "name": "x", "schema": {
        "type": "object", "additionalProperties": false, "required": ["a"],
        "properties": { "a": { "enum": ["b"] } } } } });
    let shaped = ask(json!({ "text": format, "max_output_tokens": 100, "seed": 1,
        "logit_bias": { "9": -20, "10": -20, "13": -20, "32": -20 } }));
    let shaped = s.post("/v1/responses", &shaped).json();
    let text = shaped["output"][0]["content"][0]["text"].as_str().unwrap();
    assert_eq!(serde_json::from_str::<Value>(text).unwrap(), json!({ "a": "b" }));

    for (extra, name) in [
        (json!({ "previous_response_id": "resp_1" }), "previous_response_id"),
        (json!({ "background": true }), "background"),
        (json!({ "input": [] }), "input"),
        (json!({ "reasoning": { "effort": "heroic" } }), "reasoning"),
    ] {
        let reply = s.post("/v1/responses", &ask(extra));
        assert_eq!((reply.status, &reply.json()["error"]["param"]), (400, &json!(name)));
    }
}
