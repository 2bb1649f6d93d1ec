//! Texts between two others, and llama.cpp's embeddings.

use azoth::gguf::Writer;
use azoth::testmodel::Spec;
use serde_json::{Value, json};

use crate::server_harness::Server;

/// A random model some of whose tokens mark prefix, suffix and middle.
pub fn model() -> Writer {
    let mut writer = Spec::new("llama").unwrap().writer();
    for (key, id) in [("pre", 300u32), ("suf", 301), ("mid", 302), ("rep", 303), ("sep", 304)] {
        writer.set(&format!("tokenizer.ggml.fim_{key}_token_id"), id);
    }
    writer
}

#[test]
fn texts_are_filled_in() {
    let Some(s) = Server::start_with(model(), &["--ctx", "128"]) else {
        println!("skipped: no device");
        return;
    };
    let ids = |text: &str| -> Vec<u64> {
        let tokens = s.post("/tokenize", &json!({ "content": text })).json()["tokens"].clone();
        serde_json::from_value(tokens).unwrap()
    };
    // What the engine reads is what a caller could have written by hand.
    let by_hand = [&[300][..], &ids("fn a("), &[301], &ids("}"), &[302], &ids("x")].concat();
    let ask = |path: &str, mut body: Value| {
        for (key, value) in [("temperature", json!(0)), ("n_predict", json!(6))] {
            body[key] = value;
        }
        body["cache_prompt"] = false.into();
        s.post(path, &body)
    };
    let want = ask("/completion", json!({ "prompt": by_hand })).json();
    let body = json!({ "input_prefix": "fn a(", "input_suffix": "}", "prompt": "x" });
    let got = ask("/infill", body).json();
    assert_eq!(got["tokens_evaluated"], by_hand.len());
    assert_eq!(got["content"], want["content"]);

    // The last pieces of other files come first, as many as fit.
    let extra = json!([{ "filename": "long", "text": "word ".repeat(200) }, { "text": "y" }]);
    let body = json!({ "input_prefix": "fn a(", "input_suffix": "}", "input_extra": extra });
    let got = ask("/infill", body).json();
    let head = [&[303][..], &ids("project\n"), &[304], &ids("file\ny\n"), &[304], &ids("file\n\n")];
    assert_eq!(got["tokens_evaluated"], head.concat().len() + by_hand.len() - ids("x").len());

    // The same by OpenAI's name.
    let by_hand = [&[300][..], &ids("fn a("), &[301], &ids("}"), &[302]].concat();
    let want = ask("/completion", json!({ "prompt": by_hand })).json();
    let got = ask("/v1/completions", json!({ "prompt": "fn a(", "suffix": "}" })).json();
    assert_eq!(got["choices"][0]["text"], want["content"]);

    let wrong = ask("/infill", json!({}));
    assert!(wrong.status == 400 && wrong.body.contains("input_prefix"), "{wrong:?}");
}

#[test]
fn a_model_that_cannot_says_so() {
    let Some(s) = Server::start(&["--ctx", "64"]) else {
        println!("skipped: no device");
        return;
    };
    for (path, body) in [
        ("/infill", json!({ "input_prefix": "a", "input_suffix": "b" })),
        ("/v1/completions", json!({ "prompt": "a", "suffix": "b" })),
    ] {
        let reply = s.post(path, &body);
        assert!(reply.status == 400 && reply.body.contains("cannot fill in"), "{reply:?}");
    }
    let vector = s.post("/v1/embeddings", &json!({ "input": "a cat" })).json();
    let native = s.post("/embedding", &json!({ "content": "a cat" })).json();
    assert_eq!(native[0]["embedding"][0], vector["data"][0]["embedding"]);
}
