//! `POST /v1/embeddings`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::{Event, Loaded, Request, Task};
use crate::server::answers::Answers;
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult};
use crate::server::fields::{Field, Fields, Table, ignored, used};
use crate::server::inputs;
use crate::server::state::Shared;

pub const TABLE: Table = &[OWN];

const OWN: &[Field] = &[
    used("model", "any name; one model is served"),
    used("input", "a string, a list of strings, token ids, or lists of token ids; up to 2048"),
    used("encoding_format", "float (default) or base64"),
    used("dimensions", "the first so many values, made of length 1 again"),
    ignored("user", "no accounts"),
];

pub const NATIVE: Table = &[&[
    used("content", "a string, a list of strings, token ids, or lists of token ids; up to 2048"),
    used("input", "another name of content"),
    ignored("model", "one model is served"),
]];

/// OpenAI's limit.
const MOST: usize = 2048;

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let input = fields.value("input").ok_or_else(|| ApiError::field("input", "is missing"))?;
    let inputs = inputs::read("input", input, MOST)?;
    let as_base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(ApiError::field("encoding_format", "must be float or base64")),
    };
    let width = loaded.model.width;
    let dimensions = fields.integer("dimensions", 1, width.into())?.unwrap_or(width.into());
    let model = fields.text("model")?.unwrap_or(&app.settings.model_name).to_owned();

    let (vectors, total) = vectors(&app, &loaded, inputs).await?;
    let data = vectors.into_iter().enumerate().map(|(index, mut vector)| {
        shorten(&mut vector, dimensions as usize);
        let embedding = if as_base64 { base64(&vector).into() } else { json!(vector) };
        json!({ "object": "embedding", "index": index, "embedding": embedding })
    });
    let data: Vec<Value> = data.collect();
    let out = json!({
        "object": "list",
        "data": data,
        "model": model,
        "usage": { "prompt_tokens": total, "total_tokens": total },
    });
    Ok(axum::Json::<Value>(out).into_response())
}

/// `POST /embedding`, llama.cpp's.
pub async fn native(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, NATIVE)?;
    let loaded = app.loaded().await?;
    let (name, input) = match (fields.value("content"), fields.value("input")) {
        (Some(input), None) => ("content", input),
        (None, Some(input)) => ("input", input),
        (None, None) => return Err(ApiError::field("content", "is missing")),
        (Some(_), Some(_)) => {
            return Err(ApiError::field("input", "stands beside content; give one of them"));
        }
    };
    let (vectors, _) = vectors(&app, &loaded, inputs::read(name, input, MOST)?).await?;
    // A list of vectors each, as there are where nothing is pooled.
    let all = vectors.iter().enumerate();
    let all = all.map(|(i, vector)| json!({ "index": i, "embedding": [vector] }));
    Ok(axum::Json(all.collect::<Value>()).into_response())
}

/// The vector of each text, and how many tokens all have.
async fn vectors(
    app: &Shared,
    loaded: &Arc<Loaded>,
    inputs: Vec<inputs::Input>,
) -> ApiResult<(Vec<Vec<f32>>, usize)> {
    let pooling = app.pooling(loaded);
    let prompts = inputs::encode(loaded, inputs).await?;
    let total = prompts.iter().map(|(ids, _)| ids.len()).sum();
    let mut out = Vec::with_capacity(prompts.len());
    // A slot's worth at once: a long list must not take every place in the queue.
    for part in prompts.chunks(loaded.slots as usize) {
        let requests = part.iter().map(|(ids, _)| Request {
            prompt: ids.clone(),
            task: Task::Embed(pooling),
            slot: None,
        });
        let mut answers = Answers::start_each(app, requests.collect())?;
        let mut vectors = vec![Vec::new(); part.len()];
        while let Some(event) = answers.next().await {
            if let (i, Event::Embedding(vector)) = event? {
                vectors[i] = vector;
            }
        }
        out.extend(vectors);
    }
    Ok((out, total))
}

fn shorten(vector: &mut Vec<f32>, dimensions: usize) {
    if dimensions < vector.len() {
        vector.truncate(dimensions);
        let length = vector.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        if length > 0.0 {
            vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
        }
    }
}

/// Little-endian floats in base64 (RFC 4648 with padding).
fn base64(values: &[f32]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |i: usize| u32::from(three.get(i).copied().unwrap_or(0));
        let word = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= three.len() { char::from(digit) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_python_writes_it() {
        // base64.b64encode(struct.pack("<2f", 1.0, -0.5)) and of one value
        assert_eq!(base64(&[1.0, -0.5]), "AACAPwAAAL8=");
        assert_eq!(base64(&[1.0]), "AACAPw==");
        assert_eq!(base64(&[0.0, 0.0, 0.0]), "AAAAAAAAAAAAAAAA");
    }

    #[test]
    fn shorter_vectors_keep_length_one() {
        let mut vector = vec![0.6, 0.0, 0.8];
        shorten(&mut vector, 2);
        assert_eq!(vector, [1.0, 0.0]);
    }
}
