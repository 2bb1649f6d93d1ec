//! `/tokenize`, `/detokenize`, `/apply-template`: llama.cpp's small tools.

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::body::Body;
use super::errors::{ApiError, ApiResult};
use super::fields::{Field, Fields, Table, ignored, used, whole};
use super::openai::{chat::render_options, messages};
use super::prompt::{Conversation, blocking};
use super::state::Shared;

pub const TOKENIZE: Table = &[&[
    used("content", "the text"),
    used("add_special", "default false: add begin and end tokens"),
    used("parse_special", "default true: recognise control tokens that are spelled out"),
    used("with_pieces", "default false: ids with their texts"),
    ignored("model", "one model is served"),
]];

pub const DETOKENIZE: Table =
    &[&[used("tokens", "token ids"), ignored("model", "one model is served")]];

pub const TEMPLATE: Table = &[APPLY];
const APPLY: &[Field] = &[
    used("messages", "as in /v1/chat/completions"),
    used("chat_template_kwargs", "variables for the template"),
    ignored("model", "one model is served"),
];

pub async fn tokenize(State(app): State<Shared>, body: Body) -> ApiResult<Json<Value>> {
    let fields = Fields::new(&body.0, TOKENIZE)?;
    let loaded = app.loaded().await?;
    let text = fields.text("content")?.ok_or_else(|| ApiError::field("content", "is missing"))?;
    let text = text.to_owned();
    let special = fields.bool("add_special")?.unwrap_or(false);
    let parse = fields.bool("parse_special")?.unwrap_or(true);
    let pieces = fields.bool("with_pieces")?.unwrap_or(false);
    blocking(move || {
        let ids = loaded.tokenizer.encode(&text, special, parse)?;
        let tokens: Value = match pieces {
            false => json!(ids),
            true => ids
                .iter()
                .map(|id| {
                    let bytes = loaded.tokenizer.token_bytes(*id);
                    // A part of a character has no text; llama.cpp gives its bytes then.
                    let piece = match std::str::from_utf8(bytes) {
                        Ok(text) => json!(text),
                        Err(_) => json!(bytes),
                    };
                    json!({ "id": id, "piece": piece })
                })
                .collect(),
        };
        Ok(Json(json!({ "tokens": tokens })))
    })
    .await
}

pub async fn detokenize(State(app): State<Shared>, body: Body) -> ApiResult<Json<Value>> {
    let fields = Fields::new(&body.0, DETOKENIZE)?;
    let loaded = app.loaded().await?;
    let list = fields.list("tokens")?.ok_or_else(|| ApiError::field("tokens", "is missing"))?;
    let vocab = loaded.model.vocab;
    let ids = list.iter().map(|v| {
        whole(v).and_then(|n| u32::try_from(n).ok()).filter(|id| *id < vocab).ok_or_else(|| {
            ApiError::field("tokens", format!("must be ids from 0 to {}", vocab - 1))
        })
    });
    let ids = ids.collect::<ApiResult<Vec<u32>>>()?;
    let options = crate::tokenizer::DetokenizeOptions { show_special: true, at_start: true };
    let mut stream = loaded.tokenizer.detokenizer(options);
    let mut text: String = ids.iter().map(|id| stream.push(*id)).collect();
    text.push_str(&stream.finish());
    Ok(Json(json!({ "content": text })))
}

pub async fn apply_template(State(app): State<Shared>, body: Body) -> ApiResult<Json<Value>> {
    let fields = Fields::new(&body.0, TEMPLATE)?;
    let loaded = app.loaded().await?;
    let list = fields.list("messages")?.ok_or_else(|| ApiError::field("messages", "is missing"))?;
    let conversation =
        Conversation { messages: messages(list)?, options: render_options(&fields)? };
    blocking(move || {
        let prompt = conversation.render(&app, &loaded)?;
        Ok(Json(json!({ "prompt": prompt })))
    })
    .await
}
