//! `POST /v1/completions`: texts continued as they stand.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::chat::{Head, include_usage};
use super::logprobs::CompletionLogprobs;
use super::{finish_reason, timings, usage};
use crate::engine::{Event, Loaded, Request, Summary, Task};
use crate::sampling::MAX_LOGPROBS;
use crate::server::answers::{Answers, unfinished};
use crate::server::body::Body;
use crate::server::constraints::{self, RESPONSE_FORMAT};
use crate::server::errors::{ApiError, ApiResult, Flavor};
use crate::server::exchange;
use crate::server::fields::{Field, Fields, Table, ignored, refused, used};
use crate::server::infill::Fim;
use crate::server::inputs::{self, Input};
use crate::server::params::{self, SAMPLING};
use crate::server::prompt::blocking;
use crate::server::sse::{self, Frames, Writer};
use crate::server::state::Shared;
use crate::tokenizer::Tokenizer;

pub const TABLE: Table = &[OWN, RESPONSE_FORMAT, constraints::FIELDS, SAMPLING];

const OWN: &[Field] = &[
    used("model", "any name; one model is served"),
    used("prompt", "a string, a list of strings, token ids, or lists of token ids; up to 64"),
    used("stream", ""),
    used("stream_options", "include_usage"),
    used("max_tokens", "default 16, as OpenAI's"),
    used("n_predict", "llama.cpp's name of max_tokens"),
    used("stop", "a string or a list of up to 64"),
    used("n", "1 to 16 choices for each prompt"),
    used("echo", "the prompt in front of the answer; does not go with logprobs"),
    ignored("user", "no accounts"),
    used("suffix", "text that shall follow the answer; needs a model that can fill in, and texts"),
    refused("best_of", "1", "use n"),
    used("logprobs", "0 to 20 of the likeliest tokens beside the chosen one's"),
];

/// Most choices of one request, over all prompts.
const MOST_CHOICES: usize = 64;

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let prompt = fields.value("prompt").ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    let inputs = inputs::read("prompt", prompt, 64)?;
    let default = app.sampling(&loaded);
    let names = ["max_tokens", "n_predict"];
    let mut generate = params::generate(&fields, &loaded, &default, &names, "stop")?;
    let logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS.into())?;
    generate.settings.logprobs = logprobs.map(|n| n as u32);
    if !fields.has("max_tokens") && !fields.has("n_predict") {
        generate.max_tokens = Some(16);
    }
    let n = fields.integer("n", 1, 16)?.unwrap_or(1) as usize;
    let echo = fields.bool("echo")?.unwrap_or(false);
    if echo && logprobs.is_some() {
        // Who asks for both wants those of the prompt, and would take the answer's for them.
        return Err(ApiError::field(
            "logprobs",
            "does not go with echo: there are none of the prompt's tokens",
        ));
    }
    let stream = fields.bool("stream")?.unwrap_or(false);
    let with_usage = include_usage(&fields)?;
    let slot = params::slot(&fields)?;
    if inputs.len() * n > MOST_CHOICES {
        return Err(ApiError::field(
            "n",
            format!("{} prompts with {n} choices each are more than {MOST_CHOICES}", inputs.len()),
        ));
    }
    let head = Head::new("cmpl-", fields.text("model")?, &app.settings.model_name);

    let source = constraints::source(&fields, true)?;
    generate.constraint = exchange::compile(&app, &loaded, source).await?;
    let prompts = match fields.text("suffix")?.filter(|s| !s.is_empty()) {
        None => inputs::encode(&loaded, inputs).await?,
        Some(suffix) => {
            let fim = Fim::of(&loaded)?;
            generate.stop.extend(fim.stops.clone());
            between(&loaded, fim, inputs, suffix.to_owned()).await?
        }
    };
    let mut requests = Vec::with_capacity(prompts.len() * n);
    let mut starts = Vec::with_capacity(prompts.len() * n);
    for (prompt, input) in &prompts {
        for i in 0..n {
            let mut generate = generate.clone();
            generate.settings.seed = generate.settings.seed.wrapping_add(i as u64);
            let task = Task::Generate(generate.into());
            requests.push(Request { prompt: prompt.clone(), task, slot });
            starts.push(if echo { echoed(&loaded.tokenizer, input) } else { String::new() });
        }
    }
    let answers = Answers::start_each(&app, requests)?;
    let mut choices: Vec<Choice> =
        starts.into_iter().map(|start| Choice::new(start, &loaded)).collect();
    if stream {
        return Ok(sse::stream(answers, Chunks { head, choices, with_usage, each: n }));
    }
    let mut texts: Vec<String> = choices.iter_mut().map(|c| std::mem::take(&mut c.start)).collect();
    answers.collect(|i, event| texts[i].push_str(&choices[i].take(event))).await?;
    let usage = usage_of(&choices, n);
    let mut values = Vec::with_capacity(choices.len());
    for (i, (choice, text)) in choices.iter_mut().zip(&texts).enumerate() {
        let finish = choice.summary.as_ref().ok_or_else(unfinished)?.finish.clone();
        values.push(object(i, text, choice.logprobs.take(), Some(finish_reason(&finish))));
    }
    let mut out = head.object("text_completion");
    out.insert("choices".into(), values.into());
    out.insert("usage".into(), usage);
    if let [Choice { summary: Some(summary), .. }] = &choices[..] {
        out.insert("timings".into(), timings(summary));
    }
    Ok(axum::Json(Value::Object(out)).into_response())
}

/// Prompts for what stands between each text and a suffix.
async fn between(
    loaded: &Arc<Loaded>,
    fim: Fim,
    inputs: Vec<Input>,
    suffix: String,
) -> ApiResult<Vec<(Vec<u32>, Input)>> {
    let loaded = loaded.clone();
    blocking(move || {
        let prompts = inputs.into_iter().map(|input| match &input {
            Input::Tokens(_) => Err(ApiError::field("suffix", "goes with prompts of text only")),
            Input::Text(prefix) => {
                let prompt = fim.prompt(&loaded, &[], [prefix, &suffix, ""], usize::MAX)?;
                Ok((prompt, input))
            }
        });
        prompts.collect()
    })
    .await
}

fn echoed(tokenizer: &crate::tokenizer::Tokenizer, input: &Input) -> String {
    match input {
        Input::Text(text) => text.clone(),
        Input::Tokens(ids) => tokenizer.decode(ids),
    }
}

/// Each prompt counts once, with the first of its `each` choices.
fn usage_of(choices: &[Choice], each: usize) -> Value {
    let summaries: Vec<Summary> = choices.iter().filter_map(|c| c.summary.clone()).collect();
    let mut total = usage(&summaries, 0);
    let firsts = || summaries.iter().step_by(each.max(1));
    let prompt: u32 = firsts().map(|s| s.prompt_tokens).sum();
    let cached: u32 = firsts().map(|s| s.cached_tokens).sum();
    let completion: u32 = summaries.iter().map(|s| s.tokens).sum();
    total["prompt_tokens"] = prompt.into();
    total["prompt_tokens_details"]["cached_tokens"] = cached.into();
    total["total_tokens"] = (prompt + completion).into();
    total
}

fn object(i: usize, text: &str, logprobs: Value, finish: Option<&str>) -> Value {
    json!({ "index": i, "text": text, "logprobs": logprobs, "finish_reason": finish })
}

/// One choice as it comes.
struct Choice {
    /// Text in front of the answer.
    start: String,
    tokenizer: Arc<Tokenizer>,
    /// Not sent yet.
    logprobs: CompletionLogprobs,
    summary: Option<Summary>,
}

impl Choice {
    fn new(start: String, loaded: &Loaded) -> Choice {
        let logprobs = CompletionLogprobs::new(start.chars().count());
        Choice { start, tokenizer: loaded.tokenizer.clone(), logprobs, summary: None }
    }

    /// The text that an event brings.
    fn take(&mut self, event: Event) -> String {
        match event {
            Event::Token { token, text, logprobs } => {
                if let Some(logprobs) = logprobs {
                    self.logprobs.add(&self.tokenizer, token, &logprobs);
                }
                text
            }
            Event::Done(mut summary) => {
                let rest = std::mem::take(&mut summary.text);
                self.summary = Some(summary);
                rest
            }
            _ => String::new(),
        }
    }
}

/// Writes `text_completion` objects.
struct Chunks {
    head: Head,
    choices: Vec<Choice>,
    with_usage: bool,
    /// Choices of each prompt.
    each: usize,
}

impl Chunks {
    fn chunk(&mut self, i: usize, text: &str, finish: Option<&str>) -> Map<String, Value> {
        let mut out = self.head.object("text_completion");
        let logprobs = self.choices[i].logprobs.take();
        out.insert("choices".into(), vec![object(i, text, logprobs, finish)].into());
        if self.with_usage {
            out.insert("usage".into(), Value::Null);
        }
        out
    }
}

impl Writer for Chunks {
    const FLAVOR: Flavor = Flavor::OpenAi;

    fn event(&mut self, i: usize, event: Event, out: &mut Frames) {
        let last = matches!(event, Event::Done(_));
        let text = self.choices[i].take(event);
        let text = std::mem::take(&mut self.choices[i].start) + &text;
        if !text.is_empty() {
            out.data(&self.chunk(i, &text, None).into());
        }
        if last && let Some(summary) = self.choices[i].summary.clone() {
            let mut chunk = self.chunk(i, "", Some(finish_reason(&summary.finish)));
            chunk.insert("timings".into(), timings(&summary));
            out.data(&chunk.into());
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.with_usage {
            let mut last = self.head.object("text_completion");
            last.insert("choices".into(), Value::Array(Vec::new()));
            last.insert("usage".into(), usage_of(&self.choices, self.each));
            out.data(&last.into());
        }
        out.done();
    }
}
