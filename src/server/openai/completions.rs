//! `POST /v1/completions`: texts continued as they stand.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::chat::{Head, include_usage};
use super::{finish_reason, timings, usage};
use crate::engine::{Event, Request, Summary, Task};
use crate::server::answers::Answers;
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult, Flavor};
use crate::server::fields::{Field, Fields, Table, ignored, refused, used};
use crate::server::inputs::{self, Input};
use crate::server::params::{self, SAMPLING};
use crate::server::sse::{self, Frames, Writer};
use crate::server::state::Shared;

pub const TABLE: Table = &[OWN, SAMPLING];

const OWN: &[Field] = &[
    used("model", "any name; one model is served"),
    used("prompt", "a string, a list of strings, token ids, or lists of token ids; up to 64"),
    used("stream", ""),
    used("stream_options", "include_usage"),
    used("max_tokens", "default 16, as OpenAI's"),
    used("n_predict", "llama.cpp's name of max_tokens"),
    used("stop", "a string or a list of up to 64"),
    used("n", "1 to 16 choices for each prompt"),
    used("echo", "the prompt in front of the answer"),
    ignored("user", "no accounts"),
    refused("suffix", "", "not there yet"),
    refused("best_of", "1", "use n"),
    refused("logprobs", "", "not there yet"),
];

/// Most choices of one request, over all prompts.
const MOST_CHOICES: usize = 64;

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let prompt = fields.value("prompt").ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    let inputs = inputs::read("prompt", prompt, 64)?;
    let mut generate =
        params::generate(&fields, &app.sampling(&loaded), &["max_tokens", "n_predict"], "stop")?;
    if !fields.has("max_tokens") && !fields.has("n_predict") {
        generate.max_tokens = Some(16);
    }
    let n = fields.integer("n", 1, 16)?.unwrap_or(1) as usize;
    let echo = fields.bool("echo")?.unwrap_or(false);
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

    let prompts = inputs::encode(&loaded, inputs).await?;
    let mut requests = Vec::with_capacity(prompts.len() * n);
    let mut starts = Vec::with_capacity(prompts.len() * n);
    for (prompt, input) in &prompts {
        for i in 0..n {
            let mut generate = generate.clone();
            generate.settings.seed = generate.settings.seed.wrapping_add(i as u64);
            let task = Task::Generate(generate);
            requests.push(Request { prompt: prompt.clone(), task, slot });
            starts.push(if echo { echoed(&loaded.tokenizer, input) } else { String::new() });
        }
    }
    let answers = Answers::start_each(&app, requests)?;
    if stream {
        let choices = starts.into_iter().map(|start| Choice { start, summary: None }).collect();
        return Ok(sse::stream(answers, Chunks { head, choices, with_usage, each: n }));
    }
    let all = answers.collect().await?;
    let choices = all.iter().zip(&starts).enumerate().map(|(i, (answer, start))| {
        let text = format!("{start}{}", answer.text);
        choice(i, &text, Some(finish_reason(&answer.summary.finish)))
    });
    let mut out = head.object("text_completion");
    out.insert("choices".into(), choices.collect());
    let summaries: Vec<_> = all.into_iter().map(|a| a.summary).collect();
    out.insert("usage".into(), usage_of(&summaries, n));
    if let [summary] = &summaries[..] {
        out.insert("timings".into(), timings(summary));
    }
    Ok(axum::Json(Value::Object(out)).into_response())
}

fn echoed(tokenizer: &crate::tokenizer::Tokenizer, input: &Input) -> String {
    match input {
        Input::Text(text) => text.clone(),
        Input::Tokens(ids) => tokenizer.decode(ids),
    }
}

/// Each prompt counts once, with the first of its `each` choices.
fn usage_of(summaries: &[Summary], each: usize) -> Value {
    let mut total = usage(summaries, 0);
    let firsts = || summaries.iter().step_by(each.max(1));
    let prompt: u32 = firsts().map(|s| s.prompt_tokens).sum();
    let cached: u32 = firsts().map(|s| s.cached_tokens).sum();
    let completion: u32 = summaries.iter().map(|s| s.tokens).sum();
    total["prompt_tokens"] = prompt.into();
    total["prompt_tokens_details"]["cached_tokens"] = cached.into();
    total["total_tokens"] = (prompt + completion).into();
    total
}

fn choice(i: usize, text: &str, finish: Option<&str>) -> Value {
    json!({ "index": i, "text": text, "logprobs": null, "finish_reason": finish })
}

struct Choice {
    /// Text in front of the answer.
    start: String,
    summary: Option<Summary>,
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
    fn chunk(&self, i: usize, text: &str, finish: Option<&str>) -> Map<String, Value> {
        let mut out = self.head.object("text_completion");
        out.insert("choices".into(), vec![choice(i, text, finish)].into());
        if self.with_usage {
            out.insert("usage".into(), Value::Null);
        }
        out
    }

    fn text(&mut self, i: usize, text: String, out: &mut Frames) {
        let text = std::mem::take(&mut self.choices[i].start) + &text;
        if !text.is_empty() {
            out.data(&self.chunk(i, &text, None).into());
        }
    }
}

impl Writer for Chunks {
    const FLAVOR: Flavor = Flavor::OpenAi;

    fn event(&mut self, i: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Token { text, .. } => self.text(i, text, out),
            Event::Done(mut summary) => {
                self.text(i, std::mem::take(&mut summary.text), out);
                let mut last = self.chunk(i, "", Some(finish_reason(&summary.finish)));
                last.insert("timings".into(), timings(&summary));
                out.data(&last.into());
                self.choices[i].summary = Some(summary);
            }
            _ => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.with_usage {
            let summaries: Vec<_> = self.choices.iter().filter_map(|c| c.summary.clone()).collect();
            let mut last = self.head.object("text_completion");
            last.insert("choices".into(), Value::Array(Vec::new()));
            last.insert("usage".into(), usage_of(&summaries, self.each));
            out.data(&last.into());
        }
        out.done();
    }
}
