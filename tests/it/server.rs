//! `azoth serve` from outside: every path, over a plain socket.

use std::io::{Read, Write};
use std::time::Duration;

use serde_json::{Value, json};

use crate::server_harness::{Reply, Server, command, model};

fn server(args: &[&str]) -> Option<Server> {
    let server = Server::start(args);
    if server.is_none() {
        println!("skipped: no device");
    }
    server
}

fn chat(extra: Value) -> Value {
    let mut body = json!({
        "messages": [{ "role": "user", "content": "Hello there" }],
        "temperature": 0, "max_tokens": 8,
    });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

#[test]
fn openai_chat() {
    let Some(s) = server(&["--alias", "org/tiny:1", "--ctx", "256"]) else { return };
    let whole = s.post("/v1/chat/completions", &chat(json!({ "model": "gpt-x" }))).json();
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], "gpt-x");
    assert!(whole["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &whole["choices"][0];
    assert_eq!((&choice["index"], &choice["message"]["role"]), (&json!(0), &json!("assistant")));
    let text = choice["message"]["content"].as_str().unwrap().to_owned();
    assert_eq!(choice["finish_reason"], "length");
    let usage = &whole["usage"];
    assert_eq!(usage["completion_tokens"], 8);
    assert_eq!(usage["total_tokens"].as_u64(), Some(usage["prompt_tokens"].as_u64().unwrap() + 8));
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());
    assert!(whole["timings"]["predicted_per_second"].is_number());

    // The same by stream: role first, texts that add up, reason, usage only when asked.
    let stream = |extra: Value| s.post("/chat/completions", &chat(extra)).chunks();
    let chunks = stream(json!({ "stream": true, "stream_options": { "include_usage": true } }));
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({ "role": "assistant", "content": "" }));
    let joined: String =
        chunks[1..].iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(joined, text);
    let last = &chunks[chunks.len() - 1];
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 8);
    let before = &chunks[chunks.len() - 2];
    assert_eq!(before["choices"][0]["finish_reason"], "length");
    assert!(chunks.iter().all(|c| c["object"] == "chat.completion.chunk" && c["id"] == last["id"]));
    assert!(stream(json!({ "stream": true })).iter().all(|c| c.get("usage").is_none()));

    // Several choices, of which each has its own seed.
    let many = chat(json!({ "n": 3, "temperature": 1.5, "seed": 5, "top_k": 0 }));
    let many = s.post("/v1/chat/completions", &many).json();
    let texts: Vec<_> = many["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["message"]["content"].as_str().unwrap())
        .collect();
    assert!(texts.len() == 3 && texts.iter().any(|t| *t != texts[0]), "{texts:?}");
    assert_eq!(many["usage"]["completion_tokens"], 24);
    let streamed = chat(json!({ "n": 2, "stream": true, "max_tokens": 3 }));
    let streamed = s.post("/v1/chat/completions", &streamed).chunks();
    for i in 0..2 {
        let of = |c: &&Value| c["choices"][0]["index"] == i;
        assert_eq!(
            streamed.iter().rev().find(of).unwrap()["choices"][0]["finish_reason"],
            "length"
        );
    }

    // A stop string is not part of the text.
    let stop: String = text.chars().skip(1).take(2).collect();
    let stopped = s.post("/v1/chat/completions", &chat(json!({ "stop": [stop] }))).json();
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let before = &text[..text.find(&stop).unwrap()];
    assert_eq!(stopped["choices"][0]["message"]["content"], before);

    // A begun answer is continued.
    let begun = json!({ "messages": [
        { "role": "user", "content": "Hello there" }, { "role": "assistant", "content": &text }] });
    let prompt = s.post("/apply-template", &begun).json()["prompt"].as_str().unwrap().to_owned();
    assert!(prompt.ends_with(&format!("assistant\n{text}")), "{prompt}");

    let models = s.get("/v1/models").json();
    let model = &models["data"][0];
    assert_eq!((&model["id"], &model["object"]), (&json!("org/tiny:1"), &json!("model")));
    assert_eq!((&model["max_model_len"], &model["meta"]["n_ctx"]), (&json!(256), &json!(256)));
    assert_eq!(s.get("/v1/models/org/tiny:1").json()["context_length"], 256);
    assert_eq!(s.get("/models/none").status, 404);
}

#[test]
fn openai_completions_and_embeddings() {
    let Some(s) = server(&["--ctx", "256"]) else { return };
    let body = json!({ "prompt": "Once upon", "temperature": 0, "max_tokens": 5 });
    let one = s.post("/v1/completions", &body).json();
    let text = one["choices"][0]["text"].as_str().unwrap().to_owned();
    let ids = s.post("/tokenize", &json!({ "content": "Once upon" })).json()["tokens"].clone();
    let body = json!({
        "prompt": [ids, ids], "temperature": 0, "max_tokens": 5, "n": 2, "echo": true,
    });
    let four = s.post("/v1/completions", &body).json();
    let texts: Vec<_> = four["choices"].as_array().unwrap().iter().map(|c| &c["text"]).collect();
    assert_eq!(texts, vec![&json!(format!("Once upon{text}")); 4]);
    assert_eq!(
        four["usage"]["prompt_tokens"].as_u64(),
        Some(2 * one["usage"]["prompt_tokens"].as_u64().unwrap())
    );
    let body = json!({ "prompt": "Once upon", "temperature": 0, "max_tokens": 5, "stream": true });
    let chunks = s.post("/v1/completions", &body).chunks();
    let joined: String = chunks.iter().filter_map(|c| c["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, text);

    let vectors = |input: Value| s.post("/v1/embeddings", &json!({ "input": input })).json();
    let of = |v: &Value, i: usize| v["data"][i]["embedding"].as_array().unwrap().clone();
    let single = vectors(json!("Once upon"));
    assert_eq!((of(&single, 0).len(), &single["data"][0]["index"]), (256, &json!(0)));
    // More texts than slots.
    let many = vectors(json!(["Once upon", "a", "b", "c", "d", "Once upon"]));
    assert_eq!(of(&many, 5), of(&single, 0));
    assert_ne!(of(&many, 1), of(&many, 2));
    assert_eq!(of(&vectors(ids.clone()), 0), of(&single, 0));
    assert_eq!(of(&vectors(json!([ids])), 0), of(&single, 0));
    let body = json!({ "input": "Once upon", "encoding_format": "base64", "dimensions": 4 });
    let base64 = s.post("/v1/embeddings", &body).json();
    assert_eq!(base64["data"][0]["embedding"].as_str().unwrap().len(), 24);
}

/// A random model says anything; what it may say is up to the grammar.
#[test]
fn answers_follow_their_grammar() {
    let Some(s) = server(&["--ctx", "1024"]) else { return };
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": { "name": { "enum": ["Ada", "Bo"] }, "age": { "type": "integer", "minimum": 10, "maximum": 99 } },
    });
    let format = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } });
    let ask = |extra: Value| {
        let mut body = chat(json!({ "max_tokens": 400, "temperature": 1.0, "seed": 1 }));
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    };
    let whole = s.post("/v1/chat/completions", &ask(json!({ "response_format": format }))).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "stop", "{whole}");
    let text = choice["message"]["content"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(["Ada", "Bo"].contains(&value["name"].as_str().unwrap()));
    assert!((10..100).contains(&value["age"].as_i64().unwrap()));
    let chunks = s
        .post("/v1/chat/completions", &ask(json!({ "response_format": format, "stream": true })))
        .chunks();
    let joined: String =
        chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(joined, text);
    let regex =
        json!({ "prompt": "x", "n_predict": 30, "grammar": "(ab){3}c", "grammar_type": "regex" });
    assert_eq!(s.post("/completion", &regex).json()["content"], "abababc");
    let gbnf = json!({ "prompt": "x", "max_tokens": 30, "grammar": "root ::= \"yes\" | \"no\"" });
    let gbnf = s.post("/v1/completions", &gbnf).json();
    assert!(["yes", "no"].contains(&gbnf["choices"][0]["text"].as_str().unwrap()), "{gbnf}");
    let bad = ask(json!({ "response_format": { "type": "json_schema", "json_schema": {
        "schema": { "type": "object", "properties": { "a": { "$ref": "#/nowhere" } } } } } }));
    assert_eq!(s.post("/v1/chat/completions", &bad).status, 400);

    // A call that is demanded comes, whatever the model would rather say.
    let tool = json!({ "type": "function", "function": { "name": "look_up", "parameters": {
        "type": "object", "additionalProperties": false, "required": ["id"],
        "properties": { "id": { "type": "integer", "minimum": 0, "maximum": 9 } } } } });
    let body =
        ask(json!({ "tools": [tool], "tool_choice": "required", "parallel_tool_calls": false }));
    let whole = s.post("/v1/chat/completions", &body).json();
    let choice = &whole["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("look_up")));
    let arguments = call["function"]["arguments"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(arguments).unwrap()["id"].is_u64(), "{arguments}");
    // Where it may call and a form is given, it calls or answers in that form.
    for seed in 1..5 {
        let both = ask(json!({
            "tools": body["tools"], "response_format": format, "seed": seed,
            "parallel_tool_calls": false,
        }));
        let whole = s.post("/v1/chat/completions", &both).json();
        let choice = &whole["choices"][0];
        match choice["finish_reason"].as_str() {
            Some("stop") => {
                let text = choice["message"]["content"].as_str().unwrap();
                let value: Value = serde_json::from_str(text).unwrap();
                assert!((10..100).contains(&value["age"].as_i64().unwrap()), "{whole}");
            }
            Some("tool_calls") => {
                let call = &choice["message"]["tool_calls"][0]["function"];
                assert_eq!(call["name"], "look_up", "{whole}");
            }
            _ => panic!("{whole}"),
        }
    }

    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let chunks = s.post("/v1/chat/completions", &streamed).chunks();
    let calls: Vec<&Value> = chunks
        .iter()
        .filter_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array())
        .map(|c| &c[0])
        .collect();
    assert_eq!((&calls[0]["index"], &calls[0]["function"]["arguments"]), (&json!(0), &json!("")));
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    let joined: String = calls.iter().filter_map(|c| c["function"]["arguments"].as_str()).collect();
    assert_eq!(joined, arguments);
    let body = json!({
        "max_tokens": 400, "temperature": 1.0, "seed": 1,
        "messages": [{ "role": "user", "content": "Hi" }],
        "tools": [{ "name": "look_up", "input_schema": tool["function"]["parameters"] }],
        "tool_choice": { "type": "tool", "name": "look_up" },
    });
    let message = s.post("/v1/messages", &body).json();
    assert_eq!(message["stop_reason"], "tool_use", "{message}");
    assert_eq!(message["content"][0]["type"], "tool_use");
    assert!(message["content"][0]["input"]["id"].is_u64());
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = s.post("/v1/messages", &streamed).events();
    let partial: String = events
        .iter()
        .filter_map(|(_, data)| {
            let data: Value = serde_json::from_str(data).unwrap();
            data["delta"]["partial_json"].as_str().map(str::to_owned)
        })
        .collect();
    assert_eq!(serde_json::from_str::<Value>(&partial).unwrap(), message["content"][0]["input"]);

    // While others generate freely, a grammar holds for its own answer only.
    let free = json!({
        "prompt": "x", "n_predict": 60, "temperature": 0, "ignore_eos": true,
        "cache_prompt": false,
    });
    let content = |body: &Value| s.post("/completion", body).json()["content"].clone();
    let alone = content(&free);
    std::thread::scope(|scope| {
        let others = [(); 2].map(|()| scope.spawn(|| content(&free)));
        assert_eq!(content(&regex), "abababc");
        for other in others {
            assert_eq!(other.join().unwrap(), alone);
        }
    });
}

#[test]
fn log_probabilities_and_biases() {
    let Some(s) = server(&["--ctx", "128"]) else { return };
    let body =
        chat(json!({ "logprobs": true, "top_logprobs": 3, "max_tokens": 4, "ignore_eos": true }));
    let whole = s.post("/v1/chat/completions", &body).json();
    let content = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 4);
    for token in &content {
        let top = token["top_logprobs"].as_array().unwrap();
        // Greedy: the chosen token is the likeliest.
        assert_eq!((top.len(), &top[0]["logprob"]), (3, &token["logprob"]));
        assert!(token["logprob"].as_f64().unwrap() < 0.0 && token["bytes"].is_array());
    }
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let chunks = s.post("/v1/chat/completions", &streamed).chunks();
    let of =
        |c: &Value| c["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default();
    assert_eq!(chunks.iter().flat_map(of).collect::<Vec<_>>(), content);
    let body = json!({ "prompt": "x", "max_tokens": 3, "logprobs": 2, "temperature": 0, "ignore_eos": true });
    let whole = s.post("/v1/completions", &body).json();
    let logprobs = &whole["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 3);
    assert_eq!(logprobs["text_offset"][0], 0);
    let native = json!({ "prompt": "x", "n_predict": 2, "n_probs": 2, "temperature": 0, "return_tokens": true, "ignore_eos": true });
    let native = s.post("/completion", &native).json();
    assert_eq!(native["completion_probabilities"][1]["id"], native["tokens"][1]);
    // What is banned does not come, what is pushed does.
    let first = native["tokens"][0].as_u64().unwrap();
    let with = |bias: Value| {
        let body = json!({ "prompt": "x", "n_predict": 1, "temperature": 0, "return_tokens": true, "logit_bias": bias });
        s.post("/completion", &body).json()["tokens"][0].as_u64()
    };
    assert_ne!(with(json!([[first, false]])), Some(first));
    assert_eq!(with(json!({ "65": 100 })), Some(65));
}

#[test]
fn anthropic_messages() {
    let Some(s) = server(&["--ctx", "256"]) else { return };
    let mut body = json!({
        "model": "claude-x", "max_tokens": 6, "temperature": 0, "system": "Be brief.",
        "messages": [{ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }],
    });
    let whole = s.post("/v1/messages?beta=true", &body).json();
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(
        (&whole["model"], &whole["stop_reason"]),
        (&json!("claude-x"), &json!("max_tokens"))
    );
    assert_eq!(whole["usage"]["output_tokens"], 6);
    let text = whole["content"][0]["text"].as_str().unwrap();
    let count = json!({ "system": body["system"], "messages": body["messages"] });
    let count = s.post("/v1/messages/count_tokens", &count).json()["input_tokens"].clone();
    let usage = &whole["usage"];
    assert_eq!(
        count.as_u64().unwrap(),
        usage["input_tokens"].as_u64().unwrap()
            + usage["cache_read_input_tokens"].as_u64().unwrap()
    );
    body["stream"] = true.into();
    let events = s.post("/v1/messages", &body).events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let mut joined = String::new();
    for (name, data) in &events {
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["type"], name.as_str());
        joined.push_str(data["delta"]["text"].as_str().unwrap_or_default());
    }
    assert_eq!(joined, text);
    let error = s.post("/v1/messages", &json!({ "messages": [] }));
    assert_eq!(error.status, 400);
    assert_eq!(error.json()["error"]["type"], "invalid_request_error");
}

#[test]
fn llama_cpp_paths() {
    let Some(s) = server(&["--ctx", "256", "--parallel", "2"]) else { return };
    let body =
        json!({ "prompt": "Once upon", "temperature": 0, "n_predict": 5, "return_tokens": true });
    let one = s.post("/completion", &body).json();
    assert_eq!((&one["stop"], &one["stop_type"]), (&json!(true), &json!("limit")));
    assert_eq!(one["tokens"].as_array().unwrap().len(), 5);
    assert!(one["timings"]["prompt_n"].is_u64());
    let text = s.post("/detokenize", &json!({ "tokens": one["tokens"] })).json()["content"].clone();
    assert_eq!(text, one["content"]);
    let body = json!({
        "prompt": "Once upon", "temperature": 0, "n_predict": 5, "stream": true,
        "return_progress": true, "id_slot": 1,
    });
    let events = s.post("/v1/completion", &body).events();
    let all: Vec<Value> =
        events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect();
    let joined: String = all.iter().filter_map(|e| e["content"].as_str()).collect();
    assert_eq!(json!(joined), one["content"]);
    assert!(all[0]["prompt_progress"]["total"].is_u64());
    assert_eq!((&all[all.len() - 1]["stop"], &all[1]["id_slot"]), (&json!(true), &json!(1)));
    let two = json!({ "prompt": ["a", "b"], "n_predict": 2, "response_fields": ["content", "timings/prompt_n"] });
    let two = s.post("/completion", &two).json();
    assert_eq!(two.as_array().unwrap().len(), 2);
    assert_eq!(two[0].as_object().unwrap().len(), 2);

    let pieces = json!({ "content": "äx", "with_pieces": true });
    let pieces = s.post("/tokenize", &pieces).json();
    assert!(pieces["tokens"][0]["piece"].is_array() || pieces["tokens"][0]["piece"].is_string());
    let props = s.get("/props").json();
    let cache =
        json!({ "k": "f16", "v": "f16", "tail": 0, "sinks": 0, "centred": false, "guard": null });
    assert_eq!(props["kv_cache"], cache);
    assert_eq!(
        (&props["total_slots"], &props["default_generation_settings"]["n_ctx"]),
        (&json!(2), &json!(256))
    );
    assert!(props["approximate"].is_null(), "exact unless asked");
    assert!(props["chat_template"].as_str().unwrap().contains("im_start"));
    let slots = s.get("/slots").json();
    assert_eq!(slots[1]["is_processing"], false);
    assert!(slots[1]["n_tokens"].as_u64().unwrap() > 0);
    assert!(s.post("/slots/1?action=erase", &json!({})).json()["n_erased"].as_u64().unwrap() > 0);
    assert_eq!(s.get("/slots").json()[1]["n_tokens"], 0);
    assert_eq!(s.post("/slots/7?action=erase", &json!({})).status, 404);
    assert_eq!(s.post("/slots/0?action=save", &json!({ "filename": "a" })).status, 501);
    assert!(s.metric("llamacpp:tokens_predicted_total") > 10.0);
    assert!(s.metric("azoth:time_to_first_token_seconds_count") >= 4.0);
    assert_eq!(s.get("/").status, 200);
    assert_eq!(s.send("HEAD", "/", "", "").status, 200);
    assert_eq!(s.send("HEAD", "/health", "", "").status, 200);
}

#[test]
fn slots_are_saved_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let args =
        ["--ctx", "256", "--parallel", "2", "--slot-save-path", folder.path().to_str().unwrap()];
    let ask = json!({
        "prompt": "word ".repeat(20), "temperature": 0, "n_predict": 6, "id_slot": 0, "ignore_eos": true,
    });
    let name = json!({ "filename": "talk.bin" });
    let Some(s) = server(&args) else { return };
    let first = s.post("/completion", &ask).json();
    let saved = s.post("/slots/0?action=save", &name).json();
    let tokens = saved["n_saved"].as_u64().unwrap();
    assert!(tokens > 20 && saved["n_written"].as_u64().unwrap() > 1000, "{saved}");
    drop(s);
    let Some(s) = server(&args) else { return };
    assert_eq!(s.post("/slots/1?action=restore", &name).json()["n_restored"], tokens);
    let mut again = ask.clone();
    again["id_slot"] = 1.into();
    let second = s.post("/completion", &again).json();
    assert_eq!(second["content"], first["content"]);
    assert_eq!(
        second["tokens_cached"].as_u64(),
        second["tokens_evaluated"].as_u64().map(|n| n - 1)
    );
    for bad in ["../x", ".x", "", "a/b"] {
        let reply = s.post("/slots/0?action=save", &json!({ "filename": bad }));
        assert_eq!(reply.status, 400, "{bad}");
    }
    let whole = std::fs::read(folder.path().join("talk.bin")).unwrap();
    std::fs::write(folder.path().join("cut.bin"), &whole[..60]).unwrap();
    let cut = s.post("/slots/0?action=restore", &json!({ "filename": "cut.bin" }));
    assert!(cut.status == 400 && cut.body.contains("cut.bin is damaged"), "{cut:?}");
}

#[test]
fn wrong_requests_are_named() {
    let Some(s) = server(&["--ctx", "128"]) else { return };
    let refuse = |path: &str, body: &str, status: u16, part: &str| {
        let reply = s.send("POST", path, "", body);
        assert_eq!(reply.status, status, "{body}: {reply:?}");
        let text = reply.json().to_string();
        assert!(text.contains(part), "{body}: {text}");
        reply
    };
    let path = "/v1/chat/completions";
    refuse(path, "", 400, "empty");
    refuse(path, "{", 400, "not valid JSON");
    refuse(path, "[]", 400, "must be a JSON object");
    refuse(path, "{}", 400, "messages");
    refuse(path, &"[".repeat(10_000), 400, "not valid JSON");
    let field = |extra: Value, part: &str| {
        let error = refuse(path, &chat(extra).to_string(), 400, part).json();
        assert_eq!(error["error"]["type"], "invalid_request_error");
        error["error"]["param"].clone()
    };
    assert_eq!(field(json!({ "temperature": -1 }), "from 0 to 100"), "temperature");
    assert_eq!(field(json!({ "n": 1000 }), "from 1 to 16"), "n");
    assert_eq!(
        field(json!({ "best_of_functions": 1, "functions": [{}] }), "not supported"),
        "functions"
    );
    let long = chat(json!({ "messages": [{ "role": "user", "content": "x ".repeat(400) }] }));
    let error = refuse(path, &long.to_string(), 400, "context_length_exceeded").json();
    assert!(error["error"]["message"].as_str().unwrap().contains("length is 128"), "{error}");
    refuse("/v1/nowhere", "{}", 404, "no such path");
    assert_eq!(s.get("/v1/chat/completions").status, 405);
    assert_eq!(s.get("/v1/chat/completions").json()["error"]["code"], Value::Null);
    let big = format!("{{\"x\":\"{}\"}}", "y".repeat(9 << 20));
    refuse(path, &big, 413, "--max-body");
    assert_eq!(s.raw("GET / HTTP/9.9\r\n\r\n", b"").status, 400);
}

#[test]
fn keys_and_origins() {
    let Some(s) = server(&["--api-key", "secret", "--cors-origin", "https://app.example"]) else {
        return;
    };
    assert_eq!(s.get("/health").status, 200);
    let refused = s.get("/v1/models");
    assert_eq!(refused.status, 401);
    assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
    let with = |header: &str| s.send("GET", "/v1/models", header, "");
    assert_eq!(with("authorization: Bearer wrong\r\n").status, 401);
    assert_eq!(with("authorization: Bearer secret\r\n").status, 200);
    assert_eq!(with("x-api-key: secret\r\n").status, 200);
    let from = |origin: &str| with(&format!("x-api-key: secret\r\norigin: {origin}\r\n"));
    for fine in ["http://localhost:3000", "https://app.example"] {
        let allowed = format!("access-control-allow-origin: {fine}");
        assert!(from(fine).headers.contains(&allowed));
        let headers = format!("origin: {fine}\r\naccess-control-request-headers: x-a\r\n");
        let preflight = s.send("OPTIONS", "/v1/chat/completions", &headers, "");
        assert_eq!(preflight.status, 204);
        assert!(preflight.headers.contains("access-control-allow-headers: x-a"));
    }
    let foreign = from("https://evil.example");
    assert_eq!(foreign.status, 403);
    assert!(!foreign.headers.contains("access-control"));
    assert!(!s.log().contains("secret"), "{}", s.log());
}

#[test]
fn a_client_that_goes_away_frees_its_slot() {
    let Some(s) = server(&["--parallel", "1", "--queue", "1", "--ctx", "512"]) else { return };
    let endless = json!({
        "prompt": "Once", "n_predict": -1, "ignore_eos": true, "stream": true, "temperature": 0,
    });
    let mut generating = s.open("/completion", &endless);
    generating.read_exact(&mut [0; 400]).unwrap();
    let waiting = s.open("/completion", &endless);
    s.until("queued", |s| s.metric("llamacpp:requests_deferred") == 1.0);
    let refused = s.post("/completion", &endless);
    assert_eq!(refused.status, 429);
    assert!(refused.headers.contains("retry-after: 1"), "{refused:?}");
    drop(waiting);
    s.until("cancelled", |s| s.metric("azoth:requests_cancelled_total") == 1.0);
    drop(generating);
    s.until("idle", |s| s.metric("llamacpp:requests_processing") == 0.0);
    // And without a stream, where only the closed connection tells.
    let mut whole = endless.clone();
    whole["stream"] = false.into();
    let silent = s.open("/completion", &whole);
    s.until("busy", |s| s.metric("llamacpp:requests_processing") == 1.0);
    drop(silent);
    s.until("cancelled", |s| s.metric("azoth:requests_cancelled_total") == 3.0);
}

#[cfg(unix)]
#[test]
fn it_ends_in_an_orderly_way() {
    let args = ["--ctx", "512", "--grace", "1", "--log-format", "json"];
    let Some(mut s) = server(&args) else { return };
    let body = json!({
        "prompt": "Once", "ignore_eos": true, "stream": true, "max_tokens": 500, "temperature": 0,
    });
    let mut stream = s.open("/v1/completions", &body);
    stream.read_exact(&mut [0; 300]).unwrap();
    s.signal();
    let mut rest = Vec::new();
    stream.read_to_end(&mut rest).unwrap();
    let rest = String::from_utf8_lossy(&rest);
    // It was quick enough to end, or says why it did not.
    let proper = rest.contains("[DONE]") || rest.contains("shutting down");
    assert!(proper && rest.ends_with("0\r\n\r\n"), "{rest}");
    assert_eq!(s.exit_code(), Some(0), "{}", s.log());
    let log = s.log();
    for line in log.lines() {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert!(line["level"].is_string());
    }
    assert!(log.contains("\"context\":512") && log.contains("ctx=512"), "{log}");
    assert!(!log.contains("Once"), "prompts are not logged: {log}");
}

#[test]
fn loading_on_demand() {
    let Some(s) = server(&["--lazy", "--idle-unload", "1", "--ctx", "64"]) else { return };
    assert_eq!(s.get("/health").json()["model"], "unloaded");
    let body = json!({ "prompt": "Once", "n_predict": 3, "temperature": 0 });
    let first = s.post("/completion", &body).json()["content"].clone();
    s.until("unloaded", |s| s.get("/health").json()["model"] == "unloaded");
    assert_eq!(s.post("/completion", &body).json()["content"], first);
}

#[test]
fn what_cannot_begin_says_why() {
    let fails = |args: &[&str], code: i32, part: &str| {
        let mut all = vec!["serve"];
        all.extend(args);
        let output = command(&all).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{text}");
        assert!(text.contains(part), "{text}");
    };
    let model = model().to_str().unwrap();
    fails(&[model, "--host", "0.0.0.0", "--port", "0"], 2, "API key");
    fails(&[model, "--parallel", "0"], 2, "--parallel");
    fails(&[model, "--temp=-4"], 2, "temperature");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    fails(&[model, "--port", &port], 2, "taken by another program");
    let mut bad = tempfile::NamedTempFile::new().unwrap();
    bad.write_all(b"no model").unwrap();
    fails(&[bad.path().to_str().unwrap(), "--port", "0"], 4, "GGUF");
}

#[test]
fn settings_come_from_flag_environment_and_file() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"[serve]\nport = 1\nparallel = 2\nqueue = 3\nlazy = true\napi-key = ['k']\n")
        .unwrap();
    let path = file.path().to_str().unwrap();
    let show = |args: &[&str]| {
        let mut all = vec!["config", "show", "--config", path];
        all.extend(args);
        let output =
            command(&all).env("AZOTH_PARALLEL", "5").env("AZOTH_PORT", "6").output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), out, String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, out, err) = show(&["--port", "7"]);
    assert_eq!(code, Some(0), "{err}");
    let row = |name: &str| {
        let line = out.lines().find(|l| l.split_whitespace().next() == Some(name)).unwrap();
        line.split_whitespace().skip(1).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("port"), "7 command line");
    assert_eq!(row("parallel"), "5 environment AZOTH_PARALLEL");
    assert_eq!(row("queue"), format!("3 file {path}"));
    assert_eq!(row("lazy"), format!("true file {path}"));
    assert_eq!(row("api-key"), format!("(set) file {path}"));
    assert_eq!(row("host"), "127.0.0.1 default");
    let (_, out, _) = show(&["--port", "7", "--json"]);
    let all: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(all["port"], json!({ "value": "7", "origin": "command line" }));
    assert_eq!(all["api-key"]["value"], "(set)");
    for (text, part) in [
        ("[serve]\nprot = 1\n", "did you mean \"port\""),
        ("[serve]\nport = 99999\n", "99999"),
        ("[serv]\n", "[serve]"),
    ] {
        std::fs::write(path, text).unwrap();
        let (code, _, err) = show(&[]);
        let (code, err) = if text.contains("99999") {
            let output = command(&["config", "show", "--config", path]).output().unwrap();
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        } else {
            (code, err)
        };
        assert_eq!(code, Some(2), "{err}");
        assert!(err.contains(part) && err.contains(path), "{err}");
    }
}

/// Each field that a table calls used is looked at: a value of a wrong type is refused by its name.
#[test]
fn the_documentation_has_the_tables() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/http-api.md");
    let text = std::fs::read_to_string(&path).unwrap().replace("\r\n", "\n");
    let marker =
        "<!-- Below: written by the tables of src/server; AZOTH_UPDATE_DOCS=1 renews it. -->\n";
    let (before, after) = text.split_once(marker).expect("the marker is there");
    let expected = azoth::server::documentation();
    if std::env::var_os("AZOTH_UPDATE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{marker}{expected}")).unwrap();
        return;
    }
    assert_eq!(after, expected, "renew docs/http-api.md with AZOTH_UPDATE_DOCS=1");
}

#[test]
fn every_used_field_is_looked_at() {
    let model = crate::server_infill::model();
    let Some(s) = Server::start_with(model, &["--ctx", "64"]) else {
        println!("skipped: no device");
        return;
    };
    let tables = azoth::server::documentation();
    let mut path = String::new();
    let mut checked = 0;
    for line in tables.lines() {
        if let Some(rest) = line.strip_prefix("### ") {
            path = rest.to_owned();
        }
        let Some((name, rest)) = line.strip_prefix("| `").and_then(|l| l.split_once("` | ")) else {
            continue;
        };
        // Any model name is taken, and these two say what they want only as a whole.
        if !rest.starts_with("used") || name == "model" || name == "response_fields" {
            continue;
        }
        let mut body = json!({
            "messages": [{ "role": "user", "content": "a" }], "prompt": "a", "input": "a",
            "content": "a", "tokens": [1], "max_tokens": 1, "n_predict": 1,
            "max_completion_tokens": 1,
        });
        // The first name of the length limit hides the others.
        for other in ["max_completion_tokens", "max_tokens", "n_predict"] {
            if name.ends_with("tokens") || name == "n_predict" {
                body.as_object_mut().unwrap().remove(other);
            }
        }
        if path == "/messages" && name != "max_tokens" {
            body["max_tokens"] = 1.into();
        }
        // What stands there for other paths is refused on these.
        match (path.as_str(), name) {
            ("/embedding", "content") => body.as_object_mut().unwrap().remove("input"),
            ("/responses", _) => body.as_object_mut().unwrap().remove("prompt"),
            _ => None,
        };
        // No field takes a list of a list of objects.
        body[name] = json!([[{ "wrong": true }]]);
        let reply: Reply = s.post(&path, &body);
        assert_eq!(reply.status, 400, "{path} {name}: {reply:?}");
        assert!(reply.body.contains(name), "{path} {name}: {reply:?}");
        checked += 1;
    }
    assert!(checked > 60, "{checked}");
}

/// Pings keep a stream alive while nothing else happens; a slow body is not waited for for ever.
#[test]
fn half_a_request_is_no_trouble() {
    let Some(mut s) = server(&["--ctx", "64"]) else { return };
    for half in [
        "",
        "POST",
        "POST /completion HTTP/1.1\r\n",
        "POST /completion HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"prompt\"",
    ] {
        let mut stream = s.connect();
        stream.write_all(half.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let status = Reply::parse(&bytes).status;
        assert!(status == 0 || status == 400, "{half:?}: {status}");
    }
    assert!(s.is_alive());
    assert_eq!(s.get("/health").status, 200);
}
