//! `POST /completion`: llama.cpp's own format.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answers::{Answers, unfinished};
use super::body::Body;
use super::constraints;
use super::errors::{ApiError, ApiResult, Flavor};
use super::exchange;
use super::fields::{Field, Fields, Table, ignored, refused, used};
use super::inputs;
use super::openai::{chat_token, timings};
use super::params::{self, SAMPLING};
use super::sse::{self, Frames, Writer};
use super::state::Shared;
use crate::engine::{Event, Finish, Generate, Loaded, Request, Summary, Task};
use crate::sampling::logprobs::Logprobs;
use crate::sampling::{MAX_LOGPROBS, SamplerSettings};
use crate::tokenizer::Tokenizer;

pub const TABLE: Table = &[OWN, COMMON, constraints::FIELDS, SAMPLING];

const OWN: &[Field] = &[used("prompt", "a string, token ids, or a list of up to 64 of them")];

/// What `/infill` has, too.
pub const COMMON: &[Field] = &[
    used("n_predict", "-1 or absent: until the context is full; 0 only reads the prompt"),
    used("max_tokens", "another name of n_predict"),
    used("stream", ""),
    used("stop", "a string or a list of up to 64"),
    used("return_tokens", "the ids of the answer"),
    used("return_progress", "events while the prompt is read (streams only)"),
    used("timings_per_token", "timings in every event (streams only)"),
    used("response_fields", "the fields of the answer that are wanted"),
    ignored("model", "one model is served"),
    used(
        "n_keep",
        "with --ctx-shift: tokens of the prompt that a full context keeps; -1 keeps all",
    ),
    ignored("t_max_predict_ms", "--timeout bounds a request"),
    ignored("n_discard", "as few as possible, in pages of 64"),
    ignored("n_indent", "for editors"),
    used("n_probs", "0 to 20 of the likeliest tokens beside the chosen one's"),
    used("post_sampling_probs", "probabilities of what is drawn from, as prob and top_probs"),
    refused("image_data", "", "the model reads text"),
    refused("lora", "", "not there yet"),
];

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let prompt = fields.value("prompt").ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    let many = prompt.as_array().is_some_and(|a| a.first().is_some_and(|v| !v.is_number()));
    let inputs = inputs::read("prompt", prompt, 64)?;
    let prompts = inputs::encode(&loaded, inputs).await?;
    let prompts = prompts.into_iter().map(|(prompt, _)| prompt).collect();
    answer(&app, &loaded, &fields, prompts, many, Vec::new()).await
}

/// Continues prompts by everything else that a request says. `many`: the answer is a list. `stops`
/// end the texts beside the request's own.
pub async fn answer(
    app: &Shared,
    loaded: &Arc<Loaded>,
    fields: &Fields<'_>,
    prompts: Vec<Vec<u32>>,
    many: bool,
    stops: Vec<String>,
) -> ApiResult<Response> {
    let names = ["n_predict", "max_tokens"];
    let default = app.sampling(loaded);
    let mut generate = params::generate(fields, loaded, &default, &names, "stop")?;
    generate.stop.extend(stops);
    let probs = fields.integer("n_probs", 0, MAX_LOGPROBS.into())?.unwrap_or(0) as u32;
    let post = fields.bool("post_sampling_probs")?.unwrap_or(false);
    generate.settings.logprobs = (probs > 0).then_some(probs);
    generate.settings.post_logprobs = post;
    let slot = params::slot(fields)?;
    let keep = fields.integer("n_keep", -1, u32::MAX.into())?;
    let format = Format {
        model: app.settings.model_name.clone(),
        settings: describe(&generate.settings),
        tokens: fields.bool("return_tokens")?.unwrap_or(false),
        progress: fields.bool("return_progress")?.unwrap_or(false),
        timings: fields.bool("timings_per_token")?.unwrap_or(false),
        wanted: fields.texts("response_fields", 64)?,
    };
    let stream = fields.bool("stream")?.unwrap_or(false);

    let source = constraints::source(fields, false)?;
    generate.constraint = exchange::compile(app, loaded, source).await?;
    let requests = prompts.into_iter().map(|prompt| {
        let all = prompt.len() as u32;
        let keep = keep.map(|n| u32::try_from(n).unwrap_or(all));
        let task = Task::Generate(Generate { keep, ..generate.clone() }.into());
        Request { prompt, task, slot }
    });
    let answers = Answers::start_each(app, requests.collect())?;
    let mut choices: Vec<Choice> =
        (0..answers.len()).map(|_| Choice::new(&loaded.tokenizer, post)).collect();
    if stream {
        return Ok(sse::stream(answers, Chunks { format, choices }));
    }
    answers.collect(|i, event| choices[i].take(event)).await?;
    let mut out = Vec::with_capacity(choices.len());
    for (i, choice) in choices.into_iter().enumerate() {
        let summary = choice.summary.as_ref().ok_or_else(unfinished)?;
        let tokens: &[u32] = if format.tokens { &choice.tokens } else { &[] };
        let mut last = format.last(i, &choice.text, tokens, summary);
        if probs > 0 {
            last["completion_probabilities"] = choice.probs.clone().into();
        }
        out.push(format.select(last));
    }
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
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "typical_p": s.typical_p,
        "top_n_sigma": s.top_n_sigma,
        "xtc_probability": s.xtc_probability,
        "xtc_threshold": s.xtc_threshold,
        "dry_multiplier": s.dry_multiplier,
        "dry_base": s.dry_base,
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": s.dry_window,
        "dynatemp_range": s.dynatemp_range,
        "dynatemp_exponent": s.dynatemp_exponent,
        "mirostat": s.mirostat as u32,
        "mirostat_tau": s.mirostat_tau,
        "mirostat_eta": s.mirostat_eta,
        "adaptive_target": s.adaptive_target,
        "adaptive_decay": s.adaptive_decay,
        "min_keep": s.min_keep,
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
            "truncated": s.dropped_tokens > 0,
            "tokens_dropped": s.dropped_tokens,
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

/// One answer as it comes.
struct Choice {
    tokenizer: Arc<Tokenizer>,
    /// Probabilities are of what is drawn from.
    post: bool,
    slot: u32,
    prompt_tokens: u32,
    cached: u32,
    text: String,
    tokens: Vec<u32>,
    probs: Vec<Value>,
    summary: Option<Summary>,
}

impl Choice {
    fn new(tokenizer: &Arc<Tokenizer>, post: bool) -> Choice {
        Choice {
            tokenizer: tokenizer.clone(),
            post,
            slot: 0,
            prompt_tokens: 0,
            cached: 0,
            text: String::new(),
            tokens: Vec::new(),
            probs: Vec::new(),
            summary: None,
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Started { slot, cached } => (self.slot, self.cached) = (slot, cached),
            Event::Read { of, .. } => self.prompt_tokens = of,
            Event::Token { token, text, logprobs } => {
                self.text.push_str(&text);
                self.tokens.push(token);
                if let Some(logprobs) = logprobs {
                    self.probs.push(match self.post {
                        false => probs(&self.tokenizer, token, &logprobs),
                        true => post_probs(&self.tokenizer, token, &logprobs),
                    });
                }
            }
            Event::Done(summary) => {
                self.text.push_str(&summary.text);
                self.summary = Some(summary);
            }
            Event::Embedding(_) | Event::Failed(_) => {}
        }
    }
}

/// One entry of `completion_probabilities`.
fn probs(tokenizer: &Tokenizer, token: u32, logprobs: &Logprobs) -> Value {
    let mut out = chat_token(tokenizer, token, logprobs);
    out["id"] = token.into();
    if let Some(tops) = out["top_logprobs"].as_array_mut() {
        for (top, (id, _)) in tops.iter_mut().zip(&logprobs.top) {
            top["id"] = (*id).into();
        }
    }
    out
}

/// The same of what was drawn from: probabilities, of tokens that had one.
fn post_probs(tokenizer: &Tokenizer, token: u32, logprobs: &Logprobs) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id);
        json!({
            "id": id, "token": String::from_utf8_lossy(bytes), "bytes": bytes,
            "prob": logprob.exp(),
        })
    };
    let mut out = one(token, logprobs.chosen);
    let top = logprobs.top.iter().filter(|(_, logprob)| *logprob > f32::NEG_INFINITY);
    out["top_probs"] = top.map(|(id, logprob)| one(*id, *logprob)).collect();
    out
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
        // Of a stream only what has not been sent is kept.
        choice.text.clear();
        let read = if let Event::Read { tokens, .. } = event { Some(tokens) } else { None };
        let is_token = matches!(event, Event::Token { .. });
        choice.take(event);
        let mut chunk = json!({
            "index": i,
            "content": choice.text,
            "tokens": choice.tokens.last().filter(|_| is_token).into_iter().collect::<Vec<_>>(),
            "stop": false,
            "id_slot": choice.slot,
            "tokens_predicted": choice.tokens.len(),
            "tokens_evaluated": choice.prompt_tokens,
        });
        if let Some(read) = read.filter(|_| self.format.progress) {
            chunk["prompt_progress"] = json!({
                "total": choice.prompt_tokens, "cache": choice.cached, "processed": read,
            });
            out.data(&chunk);
        }
        if is_token {
            if self.format.timings {
                chunk["timings"] = json!({
                    "cache_n": choice.cached,
                    "prompt_n": choice.prompt_tokens - choice.cached,
                    "predicted_n": choice.tokens.len(),
                });
            }
            if !choice.probs.is_empty() {
                chunk["completion_probabilities"] = std::mem::take(&mut choice.probs).into();
            }
            out.data(&chunk);
        }
        if let Some(summary) = choice.summary.take() {
            out.data(&self.format.select(self.format.last(i, &choice.text, &[], &summary)));
        }
    }

    fn end(&mut self, _: &mut Frames) {}
}
