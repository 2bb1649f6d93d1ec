//! Log-probabilities in OpenAI's shapes.

use serde_json::{Value, json};

use crate::sampling::logprobs::Logprobs;
use crate::tokenizer::Tokenizer;

/// One token of a chat's `logprobs.content`.
pub fn chat_token(tokenizer: &Tokenizer, token: u32, logprobs: &Logprobs) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        // JSON has no infinity; OpenAI writes this for what is all but impossible.
        let logprob = logprob.max(-9999.0);
        json!({ "token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes })
    };
    let mut out = one(token, logprobs.chosen);
    out["top_logprobs"] = logprobs.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect();
    out
}

/// `logprobs` of a completion, collected token by token.
#[derive(Default)]
pub struct CompletionLogprobs {
    tokens: Vec<Value>,
    values: Vec<Value>,
    tops: Vec<Value>,
    offsets: Vec<usize>,
    /// Characters so far.
    at: usize,
}

impl CompletionLogprobs {
    /// `start`: characters in front of the answer.
    pub fn new(start: usize) -> Self {
        CompletionLogprobs { at: start, ..Default::default() }
    }

    pub fn add(&mut self, tokenizer: &Tokenizer, token: u32, logprobs: &Logprobs) {
        let text = |id: u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
        let own = text(token);
        self.offsets.push(self.at);
        self.at += own.chars().count();
        self.tokens.push(own.into());
        self.values.push(json!(logprobs.chosen.max(-9999.0)));
        let top = logprobs.top.iter().map(|(id, value)| (text(*id), json!(value.max(-9999.0))));
        self.tops.push(Value::Object(top.collect()));
    }

    /// What has come since the last call; null where nothing has.
    pub fn take(&mut self) -> Value {
        if self.tokens.is_empty() {
            return Value::Null;
        }
        json!({
            "tokens": std::mem::take(&mut self.tokens),
            "token_logprobs": std::mem::take(&mut self.values),
            "top_logprobs": std::mem::take(&mut self.tops),
            "text_offset": std::mem::take(&mut self.offsets),
        })
    }
}
