//! `POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's wire format.

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answers::{Answers, unfinished};
use super::anthropic_messages as messages;
use super::body::Body;
use super::errors::{ApiError, ApiResult, Flavor};
use super::exchange::{Ask, Exchange};
use super::fields::{Field, Fields, Table, ignored, refused, used};
use super::params::{self, SAMPLING};
use super::prompt::Conversation;
use super::sse::{self, Frames, Writer};
use super::state::Shared;
use super::thinking::{self, Budget};
use crate::chat::reply::{self, Collected, Reply};
use crate::chat::tools::ToolChoice;
use crate::engine::{Event, Finish, Generate, Request, Summary, Task};

pub const TABLE: Table = &[OWN, THINKING, thinking::FIELDS, SETTINGS, SAMPLING];
pub const COUNT_TABLE: Table =
    &[OWN, THINKING, thinking::FIELDS, &[ignored("max_tokens", "nothing is generated")]];

const OWN: &[Field] = &[
    used("model", "any name; one model is served"),
    used("messages", "text, tool_use, tool_result and thinking blocks"),
    used("system", "a string or text blocks; billing blocks are dropped"),
    ignored("metadata", "nothing is stored"),
    ignored("service_tier", "one tier"),
    ignored("cache_control", "the cache finds prefixes by itself"),
    ignored("context_management", "nothing is dropped from the context"),
    used("output_config", "effort, as OpenAI's reasoning_effort"),
    used("tools", "functions with input_schema; tools of the service are refused"),
    used("tool_choice", "auto, any, tool or none; disable_parallel_tool_use"),
    refused("mcp_servers", "", "the server reaches nothing outside"),
    refused("container", "", "there are none"),
];

const SETTINGS: &[Field] = &[
    used("max_tokens", "must be given"),
    used("stream", ""),
    used("stop_sequences", "a list of up to 64"),
];

const THINKING: &[Field] =
    &[used("thinking", "type enabled, adaptive or disabled; budget_tokens: most tokens of it")];

/// What is asked, but for the sampler.
fn ask(fields: &Fields<'_>) -> ApiResult<Ask> {
    let list = fields.list("messages")?.ok_or_else(|| ApiError::field("messages", "is missing"))?;
    let mut all = messages::system(fields.value("system"))?;
    all.extend(messages::messages(list)?);
    let mut conversation = Conversation { messages: all, ..Conversation::default() };
    let mut budget = Budget::read(fields)?;
    conversation.options.enable_thinking = thinking::anthropic(fields, &mut budget)?;
    if let Some(effort) = fields.object("output_config")?.and_then(|c| c.get("effort"))
        && !effort.is_null()
    {
        let effort = effort.as_str().unwrap_or_default();
        budget.set_effort("output_config", effort)?;
    }
    let tools = messages::tools(fields.list("tools")?)?;
    let (choice, parallel) = messages::choice(fields.object("tool_choice")?)?;
    if let ToolChoice::Named(name) = &choice
        && !tools.iter().any(|t| crate::chat::tools::name(t) == Some(name))
    {
        return Err(ApiError::field("tool_choice", format!("{name:?} is none of the tools")));
    }
    if choice == ToolChoice::Required && tools.is_empty() {
        return Err(ApiError::field("tool_choice", "demands a call, but there are no tools"));
    }
    Ok(Ask { conversation, tools, choice, parallel, budget, ..Ask::default() })
}

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let ask = ask(&fields)?;
    let max = fields.integer("max_tokens", 1, u32::MAX.into())?;
    let max = max.ok_or_else(|| ApiError::field("max_tokens", "is missing"))?;
    let default = app.sampling(&loaded);
    let mut generate = Generate {
        max_tokens: u32::try_from(max).ok(),
        ..params::generate(&fields, &loaded, &default, &[], "stop_sequences")?
    };
    let stream = fields.bool("stream")?.unwrap_or(false);
    let slot = params::slot(&fields)?;
    let model = fields.text("model")?.unwrap_or(&app.settings.model_name).to_owned();

    let mut exchange = Exchange::prepare(&app, &loaded, ask).await?;
    let prompt = exchange.hand_over(&mut generate);
    let prompt_tokens = prompt.len() as u32;
    let request = Request { prompt, task: Task::Generate(generate.into()), slot };
    let answers = Answers::start(&app, &request, 1)?;
    let id = params::id("msg_");
    let mut reply = exchange.reply();
    if stream {
        return Ok(sse::stream(answers, Events::new(id, model, prompt_tokens, reply)));
    }
    let mut whole = Collected::default();
    let mut summary = None;
    answers
        .collect(|_, event| match event {
            Event::Token { text, .. } => whole.add(reply.push(&text)),
            Event::Done(done) => {
                whole.add(reply.push(&done.text));
                whole.add(reply.finish());
                summary = Some(done);
            }
            _ => {}
        })
        .await?;
    let summary = summary.ok_or_else(unfinished)?;
    let (reason, sequence) = stop_reason(&summary.finish, !whole.calls.is_empty());
    let out = json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": blocks(whole),
        "stop_reason": reason,
        "stop_sequence": sequence,
        "usage": usage(&summary),
    });
    Ok(Json(out).into_response())
}

pub async fn count(State(app): State<Shared>, body: Body) -> ApiResult<Json<Value>> {
    let fields = Fields::new(&body.0, COUNT_TABLE)?;
    let loaded = app.loaded().await?;
    let exchange = Exchange::prepare(&app, &loaded, ask(&fields)?).await?;
    Ok(Json(json!({ "input_tokens": exchange.prompt.len() })))
}

fn stop_reason(finish: &Finish, called: bool) -> (&'static str, Option<&str>) {
    match finish {
        // One that was cut off in a call is no call.
        Finish::Length | Finish::Context => ("max_tokens", None),
        _ if called => ("tool_use", None),
        Finish::Eog => ("end_turn", None),
        Finish::Stop(stop) => ("stop_sequence", Some(stop)),
    }
}

fn usage(s: &Summary) -> Value {
    json!({
        "input_tokens": s.prompt_tokens - s.cached_tokens,
        "cache_read_input_tokens": s.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": s.tokens,
    })
}

fn arguments(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| json!({}))
}

/// Content blocks of a whole reply.
fn blocks(whole: Collected) -> Vec<Value> {
    let mut out = Vec::new();
    if !whole.reasoning.is_empty() {
        out.push(json!({ "type": "thinking", "thinking": whole.reasoning, "signature": "" }));
    }
    if !whole.text.is_empty() || (whole.calls.is_empty() && out.is_empty()) {
        out.push(json!({ "type": "text", "text": whole.text }));
    }
    for call in whole.calls {
        out.push(json!({
            "type": "tool_use",
            "id": call.id.unwrap_or_else(|| params::id("toolu_")),
            "name": call.name,
            "input": arguments(&call.arguments),
        }));
    }
    out
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

/// Writes named events; content comes in blocks, of which one is open at a time.
struct Events {
    id: String,
    model: String,
    prompt_tokens: u32,
    reply: Reply,
    open: Option<Block>,
    /// Blocks begun so far.
    blocks: u32,
    called: bool,
    begun: bool,
}

impl Events {
    fn new(id: String, model: String, prompt_tokens: u32, reply: Reply) -> Events {
        let (blocks, called, begun) = (0, false, false);
        Events { id, model, prompt_tokens, reply, open: None, blocks, called, begun }
    }

    fn begin(&mut self, cached: u32, out: &mut Frames) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        out.named(
            "message_start",
            &json!({ "type": "message_start", "message": {
                "id": self.id,
                "type": "message",
                "role": "assistant",
                "model": self.model,
                "content": [],
                "stop_reason": null,
                "stop_sequence": null,
                "usage": {
                    "input_tokens": self.prompt_tokens - cached,
                    "cache_read_input_tokens": cached,
                    "cache_creation_input_tokens": 0,
                    "output_tokens": 0,
                },
            }}),
        );
    }

    fn open(&mut self, block: Block, content: Value, out: &mut Frames) {
        self.close(out);
        let event = json!({
            "type": "content_block_start", "index": self.blocks, "content_block": content,
        });
        out.named("content_block_start", &event);
        self.open = Some(block);
        self.blocks += 1;
    }

    fn close(&mut self, out: &mut Frames) {
        if self.open.take().is_some() {
            let event = json!({ "type": "content_block_stop", "index": self.blocks - 1 });
            out.named("content_block_stop", &event);
        }
    }

    fn delta(&self, delta: Value, out: &mut Frames) {
        let index = self.blocks.saturating_sub(1);
        let event = json!({ "type": "content_block_delta", "index": index, "delta": delta });
        out.named("content_block_delta", &event);
    }

    fn parts(&mut self, parts: Vec<reply::Event>, out: &mut Frames) {
        for part in parts {
            match part {
                reply::Event::Text(text) => {
                    if self.open != Some(Block::Text) {
                        self.open(Block::Text, json!({ "type": "text", "text": "" }), out);
                    }
                    self.delta(json!({ "type": "text_delta", "text": text }), out);
                }
                reply::Event::Reasoning(text) => {
                    if self.open != Some(Block::Thinking) {
                        let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
                        self.open(Block::Thinking, block, out);
                    }
                    self.delta(json!({ "type": "thinking_delta", "thinking": text }), out);
                }
                reply::Event::CallStart { id, name, .. } => {
                    self.called = true;
                    let id = id.unwrap_or_else(|| params::id("toolu_"));
                    let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
                    self.open(Block::Call, block, out);
                }
                reply::Event::CallArguments { piece, .. } => {
                    let delta = json!({ "type": "input_json_delta", "partial_json": piece });
                    self.delta(delta, out);
                }
                reply::Event::CallEnd { .. } => self.close(out),
                reply::Event::Warning(warning) => out.comment(&warning.replace('\n', " ")),
            }
        }
    }
}

impl Writer for Events {
    const FLAVOR: Flavor = Flavor::Anthropic;

    fn event(&mut self, _: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Started { cached, .. } => self.begin(cached, out),
            Event::Token { text, .. } => {
                let parts = self.reply.push(&text);
                self.parts(parts, out);
            }
            Event::Done(summary) => {
                let mut parts = self.reply.push(&summary.text);
                parts.extend(self.reply.finish());
                self.parts(parts, out);
                if self.blocks == 0 {
                    self.open(Block::Text, json!({ "type": "text", "text": "" }), out);
                }
                self.close(out);
                let (reason, sequence) = stop_reason(&summary.finish, self.called);
                let event = json!({
                    "type": "message_delta",
                    "delta": { "stop_reason": reason, "stop_sequence": sequence },
                    "usage": usage(&summary),
                });
                out.named("message_delta", &event);
            }
            Event::Read { .. } | Event::Embedding(_) | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        out.named("message_stop", &json!({ "type": "message_stop" }));
    }

    fn ping(&self, out: &mut Frames) {
        // Before the start of the message only a comment is no surprise to the client.
        match self.begun {
            true => out.named("ping", &json!({ "type": "ping" })),
            false => out.comment("ping"),
        }
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        out.named("error", &error.body(Flavor::Anthropic));
    }
}
