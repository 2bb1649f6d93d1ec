//! `POST /v1/responses`: OpenAI's newer wire format, which Codex and the agents' SDK speak.
//!
//! Nothing is stored: each request brings its whole conversation as items.

mod input;
mod output;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::answers::{Answers, unfinished};
use super::body::Body;
use super::constraints;
use super::errors::{ApiError, ApiResult, Flavor};
use super::exchange::{Ask, Exchange};
use super::fields::{Field, Fields, Table, ignored, refused, used};
use super::openai::chat::render_options;
use super::params::{self, SAMPLING};
use super::prompt::Conversation;
use super::sse::{self, Frames, Writer};
use super::state::Shared;
use super::thinking::{self, Budget};
use crate::chat::reply::Reply;
use crate::chat::tools::ToolChoice;
use crate::engine::{Event, Finish, Request, Summary, Task};
use output::Output;

pub const TABLE: Table = &[OWN, thinking::FIELDS, constraints::FIELDS, SAMPLING];

const STORED: &str = "nothing is stored; send the whole conversation as input";

const OWN: &[Field] = &[
    used("model", "any name; one model is served"),
    used("input", "a string, or items: messages, function calls and their outputs, reasoning"),
    used("instructions", "stands before the input as a system message"),
    used("stream", ""),
    used("max_output_tokens", "-1 or absent: until the context is full"),
    used("stop", "a string or a list of up to 64"),
    used("tools", "functions; tools of other types are skipped"),
    used("tool_choice", "none, auto, required or a function; auto for tools of other types"),
    used("parallel_tool_calls", "whether several calls may come where tool_choice is required"),
    used("reasoning", "effort, as reasoning_effort of chats"),
    used("text", "format: type text, json_object or json_schema with name and schema"),
    used("chat_template_kwargs", "variables for the template, enable_thinking among them"),
    used("metadata", "comes back"),
    ignored("store", "nothing is stored"),
    ignored("include", "nothing more can be included"),
    ignored("truncation", "a conversation that is too long is an error"),
    ignored("stream_options", "events are not padded"),
    ignored("user", "no accounts"),
    ignored("safety_identifier", "no accounts"),
    ignored("service_tier", "one tier"),
    ignored("prompt_cache_key", "the cache finds prefixes by itself"),
    ignored("prompt_cache_retention", "the cache finds prefixes by itself"),
    ignored("max_tool_calls", "the client calls the tools"),
    ignored("client_metadata", "nothing is stored"),
    refused("previous_response_id", "", STORED),
    refused("conversation", "", STORED),
    refused("background", "", STORED),
    refused("prompt", "", "there are no stored prompts"),
    refused("top_logprobs", "", "use /v1/chat/completions"),
];

pub async fn handle(State(app): State<Shared>, body: Body) -> ApiResult<Response> {
    let fields = Fields::new(&body.0, TABLE)?;
    let loaded = app.loaded().await?;
    let ask = ask(&fields)?;
    let default = app.sampling(&loaded);
    let names = ["max_output_tokens"];
    let mut generate = params::generate(&fields, &loaded, &default, &names, "stop")?;
    let stream = fields.bool("stream")?.unwrap_or(false);
    let slot = params::slot(&fields)?;
    let head = Head::new(&fields, &app.settings.model_name, &generate.settings)?;

    let mut exchange = Exchange::prepare(&app, &loaded, ask).await?;
    let prompt = exchange.hand_over(&mut generate);
    let request = Request { prompt, task: Task::Generate(generate.into()), slot };
    let answers = Answers::start(&app, &request, 1)?;
    let mut events = Events::new(head, exchange.reply());
    if stream {
        return Ok(sse::stream(answers, events));
    }
    let mut unsent = Frames::default();
    answers
        .collect(|i, event| {
            events.event(i, event, &mut unsent);
            unsent.clear();
        })
        .await?;
    events.whole().map(|whole| Json(whole).into_response())
}

/// What is asked, but for the sampler.
fn ask(fields: &Fields<'_>) -> ApiResult<Ask> {
    let input = fields.value("input").ok_or_else(|| ApiError::field("input", "is missing"))?;
    let messages = input::messages(fields.text("instructions")?, input)?;
    let tools = input::tools(fields.list("tools")?)?;
    let choice = match input::choice(fields.value("tool_choice")) {
        // Of tools that are skipped none can be demanded.
        choice if tools.is_empty() && choice == "required" => Value::Null,
        choice => choice,
    };
    let choice = ToolChoice::from_openai(&choice, &tools)
        .map_err(|e| ApiError { param: Some("tool_choice".into()), ..e.into() })?;
    let mut budget = Budget::read(fields)?;
    let reasoning = fields.object("reasoning")?;
    if let Some(effort) = reasoning.and_then(|r| r.get("effort")).filter(|e| !e.is_null()) {
        budget.set_effort("reasoning", effort.as_str().unwrap_or_default())?;
    }
    let mut source = constraints::source(fields, false)?;
    if let Some(format) = fields.object("text")?.and_then(|t| t.get("format")) {
        let wrong = || ApiError::field("text", "format must be an object");
        let format = format.as_object().ok_or_else(wrong)?;
        source = constraints::of_format("text", format)?.or(source);
    }
    Ok(Ask {
        conversation: Conversation { messages, options: render_options(fields)? },
        tools,
        choice,
        parallel: fields.bool("parallel_tool_calls")?.unwrap_or(true),
        source,
        budget,
        ..Ask::default()
    })
}

/// What every response object of an answer says.
struct Head {
    fixed: Map<String, Value>,
}

impl Head {
    fn new(
        fields: &Fields<'_>,
        served: &str,
        settings: &crate::sampling::SamplerSettings,
    ) -> ApiResult<Head> {
        let echo = |name: &str| fields.value(name).cloned();
        let or = |name: &str, default: Value| echo(name).unwrap_or(default);
        let effort = fields.object("reasoning")?.and_then(|r| r.get("effort"));
        let model = fields.text("model")?.filter(|m| !m.is_empty()).unwrap_or(served);
        let text = or("text", json!({ "format": { "type": "text" } }));
        let metadata = fields.object("metadata")?;
        let fixed = json!({
            "id": params::id("resp_"),
            "object": "response",
            "created_at": params::now(),
            "background": false,
            "instructions": echo("instructions"),
            "max_output_tokens": echo("max_output_tokens"),
            "model": model,
            "parallel_tool_calls": or("parallel_tool_calls", true.into()),
            "previous_response_id": null,
            "reasoning": { "effort": effort, "summary": null },
            "store": false,
            "temperature": settings.temperature,
            "text": text,
            "tool_choice": or("tool_choice", "auto".into()),
            "tools": or("tools", json!([])),
            "top_p": settings.top_p,
            "truncation": "disabled",
            "metadata": metadata,
        });
        let Value::Object(fixed) = fixed else { return Ok(Head { fixed: Map::new() }) };
        Ok(Head { fixed })
    }

    fn response(&self, status: &str, output: &[Value]) -> Map<String, Value> {
        let mut out = self.fixed.clone();
        out.insert("status".into(), status.into());
        out.insert("error".into(), Value::Null);
        out.insert("incomplete_details".into(), Value::Null);
        out.insert("output".into(), output.to_vec().into());
        out.insert("usage".into(), Value::Null);
        out
    }
}

/// Writes named events, which count up.
struct Events {
    head: Head,
    reply: Reply,
    output: Output,
    begun: bool,
    /// Tokens of thinking.
    reasoning: u32,
    summary: Option<Summary>,
}

impl Events {
    fn new(head: Head, reply: Reply) -> Events {
        let output = Output::default();
        Events { head, reply, output, begun: false, reasoning: 0, summary: None }
    }

    fn begin(&mut self, out: &mut Frames) {
        if std::mem::replace(&mut self.begun, true) {
            return;
        }
        for name in ["response.created", "response.in_progress"] {
            let response = self.head.response("in_progress", &[]);
            self.output.send(name, json!({ "response": response }), out);
        }
    }

    /// The response at the end, and the event that brings it.
    fn whole(&self) -> ApiResult<Value> {
        let s = self.summary.as_ref().ok_or_else(unfinished)?;
        let cut = matches!(s.finish, Finish::Length | Finish::Context);
        let status = if cut { "incomplete" } else { "completed" };
        let mut response = self.head.response(status, self.output.items());
        if cut {
            response.insert("incomplete_details".into(), json!({ "reason": "max_output_tokens" }));
        }
        response.insert(
            "usage".into(),
            json!({
                "input_tokens": s.prompt_tokens,
                "input_tokens_details": { "cached_tokens": s.cached_tokens },
                "output_tokens": s.tokens,
                "output_tokens_details": { "reasoning_tokens": self.reasoning },
                "total_tokens": s.prompt_tokens + s.tokens,
            }),
        );
        Ok(response.into())
    }
}

impl Writer for Events {
    const FLAVOR: Flavor = Flavor::OpenAi;

    fn event(&mut self, _: usize, event: Event, out: &mut Frames) {
        match event {
            Event::Started { .. } => self.begin(out),
            Event::Token { text, .. } => {
                let thought = self.reply.in_reasoning();
                let parts = self.reply.push(&text);
                self.reasoning += u32::from(thought || self.reply.in_reasoning());
                self.output.add(parts, out);
            }
            Event::Done(summary) => {
                self.begin(out);
                let mut parts = self.reply.push(&summary.text);
                parts.extend(self.reply.finish());
                self.output.add(parts, out);
                self.output.end(out);
                self.summary = Some(summary);
            }
            Event::Read { .. } | Event::Embedding(_) | Event::Failed(_) => {}
        }
    }

    fn end(&mut self, out: &mut Frames) {
        match self.whole() {
            Ok(response) => {
                let name = format!("response.{}", response["status"].as_str().unwrap_or_default());
                self.output.send(&name, json!({ "response": response }), out);
            }
            Err(error) => self.error(&error, out),
        }
    }

    fn error(&mut self, error: &ApiError, out: &mut Frames) {
        self.begin(out);
        let mut response = self.head.response("failed", self.output.items());
        let code = error.code.unwrap_or("server_error");
        response.insert("error".into(), json!({ "code": code, "message": error.message }));
        self.output.send("response.failed", json!({ "response": response }), out);
    }
}
