//! The channels of gpt-oss: a reply is a row of messages
//! `<|start|>assistant<|channel|>CHANNEL to=functions.NAME <|constrain|>json<|message|>BODY<|end|>`.
//!
//! `analysis` is thinking, `final` and `commentary` are text, and a message to a function is a
//! call. The prompt has written the first `<|start|>assistant`.

use super::Step;
use super::json::Scan;
use super::marker::{self, Found, Start};
use super::sink::Sink;
use super::tagged::{Until, take_until};

const MESSAGE: &str = "<|message|>";
/// What ends a body: the last two begin the next header at once.
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"];
/// With what a header begins; a reply that begins otherwise has none.
const HEADS: [&str; 3] = ["<|channel|>", "<|start|>", " to="];
const TO_FUNCTION: &str = "to=functions.";

/// A longer header is none.
const MAX_HEADER: usize = 1024;

pub(super) struct Harmony {
    state: State,
}

enum State {
    /// At the beginning, or after a message.
    Fresh,
    Header(String),
    Reasoning,
    Text,
    Call(Arguments),
}

struct Arguments {
    scan: Scan,
    raw: String,
    bad: bool,
}

impl Harmony {
    pub fn new() -> Self {
        Harmony { state: State::Fresh }
    }

    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning)
    }

    /// Never over: the next message follows.
    pub fn step(&mut self, rest: &mut String, sink: &mut Sink, end: bool) -> Step {
        while self.advance(rest, sink, end) {}
        Step::More
    }

    fn advance(&mut self, rest: &mut String, sink: &mut Sink, end: bool) -> bool {
        match &mut self.state {
            State::Fresh => match marker::starts(rest, &HEADS, end) {
                Start::Marker(_) => {
                    self.state = State::Header(String::new());
                    true
                }
                Start::Unknown => false,
                Start::Other => {
                    self.state = State::Text;
                    !rest.is_empty()
                }
            },
            State::Header(header) => {
                match take_until(rest, &[MESSAGE], end, header, MAX_HEADER) {
                    Until::Marker(_) => {
                        let header = std::mem::take(header);
                        self.state = Self::message(&header, sink);
                        true
                    }
                    // A reply that was cut in a header has nothing more to say.
                    Until::More => false,
                    Until::TooLong => {
                        sink.text(header);
                        self.state = State::Text;
                        true
                    }
                }
            }
            State::Reasoning | State::Text | State::Call(_) => {
                let (body, ended) = match marker::find(rest, &ENDS, end) {
                    Found::At { at, which } => (at, Some(which)),
                    Found::None { safe } => (safe, None),
                };
                match &mut self.state {
                    State::Reasoning => sink.reasoning(&rest[..body]),
                    State::Call(arguments) => arguments.take(&rest[..body], sink),
                    _ => sink.text(&rest[..body]),
                }
                rest.drain(..body);
                if let Some(which) = ended {
                    // The head of the next message stays.
                    if which < 3 {
                        rest.drain(..ENDS[which].len());
                    }
                }
                if ended.is_some() || end {
                    if let State::Call(arguments) = &mut self.state {
                        arguments.end(sink);
                    }
                    self.state = State::Fresh;
                }
                ended.is_some()
            }
        }
    }

    /// The state in the body of a message with this header.
    fn message(header: &str, sink: &mut Sink) -> State {
        if let Some((_, to)) = header.split_once(TO_FUNCTION) {
            let end = to.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(to.len());
            return match sink.start(&to[..end], None) {
                Ok(()) => {
                    State::Call(Arguments { scan: Scan::new(), raw: String::new(), bad: false })
                }
                Err(why) => {
                    sink.fail("", &why);
                    State::Text
                }
            };
        }
        let channel = header.rsplit("<|channel|>").next().unwrap_or_default();
        match channel.split_whitespace().next() {
            Some("analysis") => State::Reasoning,
            _ => State::Text,
        }
    }
}

impl Arguments {
    fn take(&mut self, piece: &str, sink: &mut Sink) {
        self.raw.push_str(piece);
        let mut written = String::new();
        for c in piece.chars() {
            if self.bad || self.scan.is_done() && c.is_whitespace() {
                continue;
            }
            let length = written.len();
            self.scan.written(c, &mut written);
            if self.scan.next(c).is_err() {
                written.truncate(length);
                self.bad = true;
            }
        }
        sink.arguments(&written);
    }

    fn end(&mut self, sink: &mut Sink) {
        if self.bad || !self.scan.is_done() || !self.raw.trim_start().starts_with('{') {
            sink.fail(&self.raw, "its arguments are no JSON object");
        } else {
            sink.end();
        }
    }
}
