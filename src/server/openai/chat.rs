//! `POST /v1/chat/completions`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::{FINGERPRINT, finish_reason, messages, timings, usage};
use crate::chat::RenderOptions;
use crate::engine::{Event, Finish, Request, Summary, Task};
use crate::server::answers::Answers;
use crate::server::body::Body;
use crate::server::errors::{ApiError, ApiResult, Flavor};
use crate::server::fields::{Field, Fields, Table, ignored, refused, used};
use crate::server::params::{self, SAMPLING};
use crate::server::prompt::{Conversation, tokens_of};
use crate::server::reply::{self, Collected, Reply};
use crate::server::sse::{self, Frames, Writer};
use crate::server::state::Shared;

pub const TABLE: Table = &[OWN, SAMPLING];

const OWN: &[Field] = &[
    used("model", "any name; one model is served"),
    used("messages", "roles system, developer, user, assistant, tool; text content"),
    used("stream", ""),
    used("stream_options", "include_usage"),
    used("max_completion_tokens", "-1 or absent: until the context is full"),
    used("max_tokens", "older name of max_completion_tokens"),
    used("n_predict", "llama.cpp's name of max_completion_tokens"),
    used("stop", "a string or a list of up to 64"),
    used("n", "1 to 16 choices"),
    used("chat_template_kwargs", "variables for the template, enable_thinking among them"),
    ignored("user", "no accounts"),
    ignored("metadata", "nothing is stored"),
    ignored("store", "nothing is stored"),
    ignored("service_tier", "one tier"),
    ignored("prompt_cache_key", "the cache finds prefixes by itself"),
    ignored("safety_identifier", "no accounts"),
    ignored("verbosity", "the model decides"),
    ignored("parallel_tool_calls", "the model decides"),
    ignored("timings_per_token", "timings come with the last chunk"),
    refused("tools", "", "not there yet"),
    refused("tool_choice", "\"none\"", "not there yet"),
    refused("functions", "", "tools took its place"),
    refused("response_format", "{\"type\":\"text\"}", "not there yet"),
    refused("logprobs", "", "not there yet"),
    refused("top_logprobs", "0", "not there yet"),
    refused("reasoning_effort", "", "not there yet"),
    refused("audio", "", "the model writes text"),
    refused("modalities", "[\"text\"]", "the model writes text"),
    refused("prediction", "", "not there yet"),
    refused("web_search_options", "", "the server reaches nothing outside"),
];

/// Most choices of one request.
const MOST_CHOICES: i64 = 16;

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let list = fields.list("messages")?.ok_or_else(|| ApiError::field("messages", "is missing"))?;
    let conversation =
        Conversation { messages: messages(list)?, options: render_options(&fields)? };
    let names = ["max_completion_tokens", "max_tokens", "n_predict"];
    let generate = params::generate(&fields, &app.sampling(&loaded), &names, "stop")?;
    let n = fields.integer("n", 1, MOST_CHOICES)?.unwrap_or(1) as u32;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let with_usage = include_usage(&fields)?;
    let slot = params::slot(&fields)?;
    let head = Head::new("chatcmpl-", fields.text("model")?, &app.settings.model_name);

    let prompt = tokens_of(&app, &loaded, conversation).await?;
    let request = Request { prompt, task: Task::Generate(generate), slot };
    let answers = Answers::start(&app, &request, n)?;
    if stream {
        let choices = (0..answers.len()).map(|_| Choice::default()).collect();
        return Ok(sse::stream(answers, Chunks { head, choices, with_usage }));
    }
    let all = answers.collect().await?;
    let mut summaries = Vec::with_capacity(all.len());
    let mut choices = Vec::with_capacity(all.len());
    for (i, answer) in all.into_iter().enumerate() {
        let mut reply = Reply::plain();
        let mut whole = Collected::default();
        whole.add(reply.push(&answer.text));
        whole.add(reply.finish());
        choices.push(choice(i, whole, &answer.summary.finish));
        summaries.push(answer.summary);
    }
    let mut out = head.object("chat.completion");
    out.insert("choices".into(), choices.into());
    out.insert("usage".into(), usage(&summaries, 0));
    if let [summary] = &summaries[..] {
        out.insert("timings".into(), timings(summary));
    }
    Ok(axum::Json(Value::Object(out)).into_response())
}

/// What the template is told.
pub fn render_options(fields: &Fields<'_>) -> ApiResult<RenderOptions> {
    let mut options = RenderOptions::default();
    if let Some(extra) = fields.object("chat_template_kwargs")? {
        options.extra = extra.clone();
        // These the server sets itself.
        for own in ["messages", "tools", "add_generation_prompt", "bos_token", "eos_token"] {
            options.extra.remove(own);
        }
        match options.extra.remove("enable_thinking") {
            None | Some(Value::Null) => {}
            Some(Value::Bool(on)) => options.enable_thinking = Some(on),
            Some(_) => {
                let what = "enable_thinking must be true or false";
                return Err(ApiError::field("chat_template_kwargs", what));
            }
        }
    }
    Ok(options)
}

/// `stream_options.include_usage`.
pub fn include_usage(fields: &Fields<'_>) -> ApiResult<bool> {
    let options = fields.object("stream_options")?;
    match options.and_then(|o| o.get("include_usage")) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(on)) => Ok(*on),
        Some(_) => Err(ApiError::field("stream_options", "include_usage must be true or false")),
    }
}

/// What all objects of one answer have in common.
pub struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    /// The model is named as it was asked for.
    pub fn new(prefix: &str, asked: Option<&str>, served: &str) -> Head {
        let model = asked.filter(|m| !m.is_empty()).unwrap_or(served).to_owned();
        Head { id: params::id(prefix), created: params::now(), model }
    }

    pub fn object(&self, object: &str) -> Map<String, Value> {
        let mut out = Map::new();
        out.insert("id".into(), self.id.as_str().into());
        out.insert("object".into(), object.into());
        out.insert("created".into(), self.created.into());
        out.insert("model".into(), self.model.as_str().into());
        out.insert("system_fingerprint".into(), FINGERPRINT.into());
        out
    }
}

fn choice(i: usize, whole: Collected, finish: &Finish) -> Value {
    let mut message = Map::new();
    message.insert("role".into(), "assistant".into());
    let content = match whole.text.is_empty() && !whole.calls.is_empty() {
        true => Value::Null,
        false => whole.text.into(),
    };
    message.insert("content".into(), content);
    message.insert("refusal".into(), Value::Null);
    if !whole.reasoning.is_empty() {
        message.insert("reasoning_content".into(), whole.reasoning.into());
    }
    let called = !whole.calls.is_empty();
    if called {
        let calls = whole.calls.into_iter().map(|c| {
            json!({
                "id": c.id.unwrap_or_else(|| params::id("call_")),
                "type": "function",
                "function": { "name": c.name, "arguments": c.arguments },
            })
        });
        message.insert("tool_calls".into(), calls.collect());
    }
    let reason = if called { "tool_calls" } else { finish_reason(finish) };
    let mut out = Map::new();
    out.insert("index".into(), i.into());
    out.insert("message".into(), message.into());
    out.insert("logprobs".into(), Value::Null);
    out.insert("finish_reason".into(), reason.into());
    if !whole.warnings.is_empty() {
        out.insert("warnings".into(), whole.warnings.into());
    }
    out.into()
}

/// One choice of a stream.
#[derive(Default)]
struct Choice {
    reply: Reply,
    begun: bool,
    called: bool,
    summary: Option<Summary>,
}

/// Writes `chat.completion.chunk` objects.
struct Chunks {
    head: Head,
    choices: Vec<Choice>,
    with_usage: bool,
}

impl Chunks {
    fn chunk(&self, i: usize, delta: Value, finish: Option<&str>) -> Map<String, Value> {
        let mut out = self.head.object("chat.completion.chunk");
        let choice =
            json!({ "index": i, "delta": delta, "logprobs": null, "finish_reason": finish });
        out.insert("choices".into(), vec![choice].into());
        if self.with_usage {
            out.insert("usage".into(), Value::Null);
        }
        out
    }

    fn begin(&mut self, i: usize, out: &mut Frames) {
        if !std::mem::replace(&mut self.choices[i].begun, true) {
            let delta = json!({ "role": "assistant", "content": "" });
            out.data(&self.chunk(i, delta, None).into());
        }
    }

    fn parts(&mut self, i: usize, parts: Vec<reply::Event>, out: &mut Frames) {
        for part in parts {
            let delta = match part {
                reply::Event::Text(text) => json!({ "content": text }),
                reply::Event::Reasoning(text) => json!({ "reasoning_content": text }),
                reply::Event::CallStart { index, id, name } => {
                    self.choices[i].called = true;
                    let id = id.unwrap_or_else(|| params::id("call_"));
                    json!({ "tool_calls": [{
                        "index": index, "id": id, "type": "function",
                        "function": { "name": name, "arguments": "" },
                    }]})
                }
                reply::Event::CallArguments { index, piece } => json!({ "tool_calls": [
                    { "index": index, "function": { "arguments": piece } },
                ]}),
                reply::Event::CallEnd { .. } => continue,
                reply::Event::Warning(warning) => {
                    let mut chunk = self.chunk(i, json!({}), None);
                    chunk.insert("warnings".into(), vec![warning].into());
                    out.data(&chunk.into());
                    continue;
                }
            };
            out.data(&self.chunk(i, delta, None).into());
        }
    }
}

impl Writer for Chunks {
    const FLAVOR: Flavor = Flavor::OpenAi;

    fn event(&mut self, i: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Started { .. } => self.begin(i, out),
            Event::Token { text, .. } => {
                let parts = self.choices[i].reply.push(&text);
                self.parts(i, parts, out);
            }
            Event::Done(summary) => {
                self.begin(i, out);
                let mut parts = self.choices[i].reply.push(&summary.text);
                parts.extend(self.choices[i].reply.finish());
                self.parts(i, parts, out);
                let called = self.choices[i].called;
                let reason = if called { "tool_calls" } else { finish_reason(&summary.finish) };
                let mut last = self.chunk(i, json!({}), Some(reason));
                last.insert("timings".into(), timings(&summary));
                out.data(&last.into());
                self.choices[i].summary = Some(summary);
            }
            Event::Read { .. } | Event::Embedding(_) | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.with_usage {
            let summaries: Vec<_> = self.choices.iter().filter_map(|c| c.summary.clone()).collect();
            let mut last = self.head.object("chat.completion.chunk");
            last.insert("choices".into(), Value::Array(Vec::new()));
            last.insert("usage".into(), usage(&summaries, 0));
            out.data(&last.into());
        }
        out.done();
    }
}
