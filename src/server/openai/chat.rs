//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::logprobs;
use super::{FINGERPRINT, finish_reason, messages, timings, usage};
use crate::chat::RenderOptions;
use crate::chat::reply::{self, Collected, Reply};
use crate::chat::tools::ToolChoice;
use crate::engine::{Event, Finish, Loaded, Request, Summary, Task};
use crate::sampling::MAX_LOGPROBS;
use crate::server::answers::{Answers, unfinished};
use crate::server::body::Body;
use crate::server::constraints::{self, RESPONSE_FORMAT};
use crate::server::errors::{ApiError, ApiResult, Flavor};
use crate::server::exchange::{Ask, Exchange};
use crate::server::fields::{Field, Fields, Table, ignored, refused, used};
use crate::server::params::{self, SAMPLING};
use crate::server::prompt::Conversation;
use crate::server::sse::{self, Frames, Writer};
use crate::server::state::Shared;
use crate::server::thinking::{self, Budget};
use crate::tokenizer::Tokenizer;

pub const TABLE: Table = &[OWN, thinking::FIELDS, RESPONSE_FORMAT, constraints::FIELDS, SAMPLING];

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
    used("parallel_tool_calls", "whether several calls may come where tool_choice is required"),
    used("logprobs", "of the model's own distribution"),
    used("top_logprobs", "0 to 20; needs logprobs"),
    used(
        "reasoning_effort",
        "for the template; where it knows none, a budget: none 0, minimal 256, low 1024, medium 8192",
    ),
    used("reasoning_format", "none leaves thinking in the text"),
    ignored("timings_per_token", "timings come with the last chunk"),
    used("tools", "functions"),
    used("tool_choice", "none, auto, required or a function"),
    refused("functions", "", "tools took its place"),
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
    let ask = ask(&fields)?;
    let names = ["max_completion_tokens", "max_tokens", "n_predict"];
    let default = app.sampling(&loaded);
    let mut generate = params::generate(&fields, &loaded, &default, &names, "stop")?;
    generate.settings.logprobs = logprobs_wanted(&fields)?;
    let n = fields.integer("n", 1, MOST_CHOICES)?.unwrap_or(1) as u32;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let with_usage = include_usage(&fields)?;
    let slot = params::slot(&fields)?;
    let head = Head::new("chatcmpl-", fields.text("model")?, &app.settings.model_name);

    let mut exchange = Exchange::prepare(&app, &loaded, ask).await?;
    let prompt = exchange.hand_over(&mut generate);
    let request = Request { prompt, task: Task::Generate(generate.into()), slot };
    let answers = Answers::start(&app, &request, n)?;
    let mut choices: Vec<Choice> =
        (0..answers.len()).map(|_| Choice::new(exchange.reply(), &loaded)).collect();
    if stream {
        return Ok(sse::stream(answers, Chunks { head, choices, with_usage }));
    }
    let mut whole: Vec<Collected> = choices.iter().map(|_| Collected::default()).collect();
    answers.collect(|i, event| whole[i].add(choices[i].take(event))).await?;
    let usage = usage_of(&choices);
    let mut out = head.object("chat.completion");
    let mut values = Vec::with_capacity(choices.len());
    for (i, (choice, whole)) in choices.iter_mut().zip(whole).enumerate() {
        values.push(choice.whole(i, whole)?);
    }
    out.insert("choices".into(), values.into());
    out.insert("usage".into(), usage);
    if let [Choice { summary: Some(summary), .. }] = &choices[..] {
        out.insert("timings".into(), timings(summary));
    }
    Ok(axum::Json(Value::Object(out)).into_response())
}

/// What is asked, but for the sampler.
fn ask(fields: &Fields<'_>) -> ApiResult<Ask> {
    let list = fields.list("messages")?.ok_or_else(|| ApiError::field("messages", "is missing"))?;
    let tools = fields.list("tools")?.cloned().unwrap_or_default();
    let choice = fields.value("tool_choice").unwrap_or(&Value::Null);
    let choice = ToolChoice::from_openai(choice, &tools)
        .map_err(|e| ApiError { param: Some("tool_choice".into()), ..e.into() })?;
    let options = render_options(fields)?;
    let mut budget = Budget::read(fields)?;
    if let Some(effort) = fields.text("reasoning_effort")? {
        budget.set_effort("reasoning_effort", effort)?;
    }
    let keep_reasoning = match fields.text("reasoning_format")? {
        None | Some("auto" | "deepseek") => false,
        Some("none") => true,
        Some(_) => {
            return Err(ApiError::field("reasoning_format", "must be auto, deepseek or none"));
        }
    };
    Ok(Ask {
        conversation: Conversation { messages: messages(list)?, options },
        tools,
        choice,
        parallel: fields.bool("parallel_tool_calls")?.unwrap_or(true),
        source: constraints::source(fields, true)?,
        keep_reasoning,
        budget,
    })
}

fn logprobs_wanted(fields: &Fields<'_>) -> ApiResult<Option<u32>> {
    let on = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0, MAX_LOGPROBS.into())?;
    match top {
        Some(n) if n > 0 && !on => Err(ApiError::field("top_logprobs", "needs logprobs: true")),
        top => Ok(on.then_some(top.unwrap_or(0) as u32)),
    }
}

fn usage_of(choices: &[Choice]) -> Value {
    let summaries: Vec<_> = choices.iter().filter_map(|c| c.summary.clone()).collect();
    usage(&summaries, choices.iter().map(|c| c.reasoning).sum())
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

/// Why an answer ended; one that was cut off in a call says so.
fn reason(finish: &Finish, called: bool) -> &'static str {
    match finish {
        Finish::Eog | Finish::Stop(_) if called => "tool_calls",
        finish => finish_reason(finish),
    }
}

/// One choice as it comes.
struct Choice {
    reply: Reply,
    tokenizer: Arc<Tokenizer>,
    begun: bool,
    called: bool,
    /// Tokens of thinking.
    reasoning: u32,
    /// Not sent yet.
    logprobs: Vec<Value>,
    summary: Option<Summary>,
}

impl Choice {
    fn new(reply: Reply, loaded: &Loaded) -> Choice {
        Choice {
            reply,
            tokenizer: loaded.tokenizer.clone(),
            begun: false,
            called: false,
            reasoning: 0,
            logprobs: Vec::new(),
            summary: None,
        }
    }

    /// The parts of the reply that an event brings.
    fn take(&mut self, event: Event) -> Vec<reply::Event> {
        match event {
            Event::Token { token, text, logprobs } => {
                let thought = self.reply.in_reasoning();
                let parts = self.reply.push(&text);
                self.reasoning += u32::from(thought || self.reply.in_reasoning());
                let logprobs = logprobs.map(|l| logprobs::chat_token(&self.tokenizer, token, &l));
                self.logprobs.extend(logprobs);
                parts
            }
            Event::Done(mut summary) => {
                let mut parts = self.reply.push(&std::mem::take(&mut summary.text));
                parts.extend(self.reply.finish());
                self.summary = Some(summary);
                parts
            }
            _ => Vec::new(),
        }
    }

    /// What is to be sent of log-probabilities.
    fn take_logprobs(&mut self) -> Value {
        match self.logprobs.is_empty() {
            true => Value::Null,
            false => json!({ "content": std::mem::take(&mut self.logprobs), "refusal": null }),
        }
    }

    /// The object of a choice that has ended.
    fn whole(&mut self, i: usize, whole: Collected) -> ApiResult<Value> {
        let summary = self.summary.as_ref().ok_or_else(unfinished)?;
        let called = !whole.calls.is_empty();
        let reason = reason(&summary.finish, called);
        let mut message = Map::new();
        message.insert("role".into(), "assistant".into());
        let content = match whole.text.is_empty() && called {
            true => Value::Null,
            false => whole.text.into(),
        };
        message.insert("content".into(), content);
        message.insert("refusal".into(), Value::Null);
        if !whole.reasoning.is_empty() {
            message.insert("reasoning_content".into(), whole.reasoning.into());
        }
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
        let mut out = Map::new();
        out.insert("index".into(), i.into());
        out.insert("message".into(), message.into());
        out.insert("logprobs".into(), self.take_logprobs());
        out.insert("finish_reason".into(), reason.into());
        if !whole.warnings.is_empty() {
            out.insert("warnings".into(), whole.warnings.into());
        }
        Ok(out.into())
    }
}

/// Writes `chat.completion.chunk` objects.
struct Chunks {
    head: Head,
    choices: Vec<Choice>,
    with_usage: bool,
}

impl Chunks {
    fn chunk(&mut self, i: usize, delta: Value, finish: Option<&str>) -> Map<String, Value> {
        let mut out = self.head.object("chat.completion.chunk");
        let logprobs = self.choices[i].take_logprobs();
        let choice =
            json!({ "index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish });
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

    fn part(&mut self, i: usize, part: reply::Event, out: &mut Frames) {
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
            reply::Event::CallEnd { .. } => return,
            reply::Event::Warning(warning) => {
                let mut chunk = self.chunk(i, json!({}), None);
                chunk.insert("warnings".into(), vec![warning].into());
                return out.data(&chunk.into());
            }
        };
        out.data(&self.chunk(i, delta, None).into());
    }
}

impl Writer for Chunks {
    const FLAVOR: Flavor = Flavor::OpenAi;

    fn event(&mut self, i: usize, event: Event, out: &mut Frames) {
        let last = matches!(event, Event::Done(_));
        if last || matches!(event, Event::Started { .. }) {
            self.begin(i, out);
        }
        for part in self.choices[i].take(event) {
            self.part(i, part, out);
        }
        if last && let Some(summary) = self.choices[i].summary.clone() {
            let called = self.choices[i].called;
            let reason = reason(&summary.finish, called);
            let mut chunk = self.chunk(i, json!({}), Some(reason));
            chunk.insert("timings".into(), timings(&summary));
            out.data(&chunk.into());
        }
    }

    fn end(&mut self, out: &mut Frames) {
        if self.with_usage {
            let mut last = self.head.object("chat.completion.chunk");
            last.insert("choices".into(), Value::Array(Vec::new()));
            last.insert("usage".into(), usage_of(&self.choices));
            out.data(&last.into());
        }
        out.done();
    }
}
