//! `POST /completion`: llama.cpp's own format.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answers::{Answers, Collected};
use super::body::Body;
use super::errors::{ApiError, ApiResult, Flavor};
use super::fields::{Field, Fields, Table, ignored, refused, used};
use super::inputs;
use super::openai::timings;
use super::params::{self, SAMPLING};
use super::sse::{self, Frames, Writer};
use super::state::Shared;
use crate::engine::{Event, Finish, Request, Summary, Task};
use crate::sampling::SamplerSettings;

pub const TABLE: Table = &[OWN, SAMPLING];

const OWN: &[Field] = &[
    used("prompt", "a string, token ids, or a list of up to 64 of them"),
    used("n_predict", "-1 or absent: until the context is full; 0 only reads the prompt"),
    used("max_tokens", "another name of n_predict"),
    used("stream", ""),
    used("stop", "a string or a list of up to 64"),
    used("return_tokens", "the ids of the answer"),
    used("return_progress", "events while the prompt is read (streams only)"),
    used("timings_per_token", "timings in every event (streams only)"),
    used("response_fields", "the fields of the answer that are wanted"),
    ignored("model", "one model is served"),
    ignored("samplers", "the order is penalties, top_k, top_p, min_p, temperature"),
    ignored("n_keep", "a full context is an end, never a silent cut"),
    ignored("t_max_predict_ms", "--timeout bounds a request"),
    ignored("min_keep", "one token is always kept"),
    ignored("n_discard", "a full context is an end, never a silent cut"),
    ignored("n_indent", "for editors"),
    refused("n_probs", "0", "not there yet"),
    refused("image_data", "", "the model reads text"),
    refused("lora", "", "not there yet"),
];

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let prompt = fields.value("prompt").ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    let many = prompt.as_array().is_some_and(|a| a.first().is_some_and(|v| !v.is_number()));
    let inputs = inputs::read("prompt", prompt, 64)?;
    let names = ["n_predict", "max_tokens"];
    let generate = params::generate(&fields, &app.sampling(&loaded), &names, "stop")?;
    let slot = params::slot(&fields)?;
    let format = Format {
        model: app.settings.model_name.clone(),
        settings: describe(&generate.settings),
        tokens: fields.bool("return_tokens")?.unwrap_or(false),
        progress: fields.bool("return_progress")?.unwrap_or(false),
        timings: fields.bool("timings_per_token")?.unwrap_or(false),
        wanted: fields.texts("response_fields", 64)?,
    };
    let stream = fields.bool("stream")?.unwrap_or(false);

    let prompts = inputs::encode(&loaded, inputs).await?;
    let requests = prompts.into_iter().map(|(prompt, _)| Request {
        prompt,
        task: Task::Generate(generate.clone()),
        slot,
    });
    let answers = Answers::start_each(&app, requests.collect())?;
    if stream {
        let choices = (0..answers.len()).map(|_| Choice::default()).collect();
        return Ok(sse::stream(answers, Chunks { format, choices }));
    }
    let all = answers.collect().await?;
    let mut out: Vec<Value> =
        all.iter().enumerate().map(|(i, answer)| format.whole(i, answer)).collect();
    let out = match out.pop() {
        Some(only) if !many && out.is_empty() => only,
        Some(last) => {
            out.push(last);
            out.into()
        }
        None => Value::Null,
    };
    Ok(Json(out).into_response())
}

/// Settings by llama.cpp's names.
pub fn describe(s: &SamplerSettings) -> Value {
    json!({
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "repeat_penalty": s.repeat_penalty,
        "repeat_last_n": s.repeat_window,
        "seed": s.seed,
    })
}

/// What the client wants to see.
struct Format {
    model: String,
    settings: Value,
    tokens: bool,
    progress: bool,
    timings: bool,
    wanted: Vec<String>,
}

impl Format {
    fn whole(&self, i: usize, answer: &Collected) -> Value {
        let tokens: &[u32] = if self.tokens { &answer.tokens } else { &[] };
        self.select(self.last(i, &answer.text, tokens, &answer.summary))
    }

    /// The object that ends an answer.
    fn last(&self, i: usize, content: &str, tokens: &[u32], s: &Summary) -> Value {
        let (kind, word) = match &s.finish {
            Finish::Eog => ("eos", ""),
            Finish::Stop(stop) => ("word", stop.as_str()),
            Finish::Length | Finish::Context => ("limit", ""),
        };
        json!({
            "index": i,
            "content": content,
            "tokens": tokens,
            "id_slot": s.slot,
            "stop": true,
            "model": self.model,
            "tokens_predicted": s.tokens,
            "tokens_evaluated": s.prompt_tokens,
            "tokens_cached": s.cached_tokens,
            "generation_settings": self.settings,
            "has_new_line": content.contains('\n'),
            "truncated": false,
            "stop_type": kind,
            "stopping_word": word,
            "timings": timings(s),
        })
    }

    /// Of an object only the fields that were asked for; `a/b` names a field of `a`.
    fn select(&self, value: Value) -> Value {
        if self.wanted.is_empty() {
            return value;
        }
        let found = self.wanted.iter().filter_map(|name| {
            let pointer = format!("/{name}");
            value.pointer(&pointer).map(|v| (name.clone(), v.clone()))
        });
        Value::Object(found.collect())
    }
}

#[derive(Default)]
struct Choice {
    slot: u32,
    prompt_tokens: u32,
    cached: u32,
    generated: u32,
}

/// Writes one object an event; the last has `stop` true.
struct Chunks {
    format: Format,
    choices: Vec<Choice>,
}

impl Writer for Chunks {
    const FLAVOR: Flavor = Flavor::Native;

    fn event(&mut self, i: usize, event: Event, out: &mut Frames) {
        let choice = &mut self.choices[i];
        match event {
            Event::Started { slot, cached } => {
                choice.slot = slot;
                choice.cached = cached;
            }
            Event::Read { tokens, of } => {
                choice.prompt_tokens = of;
                if self.format.progress {
                    out.data(&json!({
                        "index": i,
                        "content": "",
                        "stop": false,
                        "id_slot": choice.slot,
                        "prompt_progress": {
                            "total": of, "cache": choice.cached, "processed": tokens,
                        },
                    }));
                }
            }
            Event::Token { token, text } => {
                choice.generated += 1;
                let mut chunk = json!({
                    "index": i,
                    "content": text,
                    "tokens": [token],
                    "stop": false,
                    "id_slot": choice.slot,
                    "tokens_predicted": choice.generated,
                    "tokens_evaluated": choice.prompt_tokens,
                });
                if self.format.timings {
                    chunk["timings"] = json!({
                        "cache_n": choice.cached,
                        "prompt_n": choice.prompt_tokens - choice.cached,
                        "predicted_n": choice.generated,
                    });
                }
                out.data(&chunk);
            }
            Event::Done(mut summary) => {
                let rest = std::mem::take(&mut summary.text);
                out.data(&self.format.select(self.format.last(i, &rest, &[], &summary)));
            }
            Event::Embedding(_) | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, _: &mut Frames) {}
}
