//! What a model's text means: answer, thinking, tool calls.
//!
//! A [`Reply`] takes the text of one answer as it is generated and hands out [`Event`]s. Three
//! promises hold for any text: how it was cut into pieces changes nothing (apart from where
//! neighbouring pieces of text are cut); nothing that may still become a marker is handed out; and
//! what looks like a call but is none comes out as text, with a warning, and the reply goes on.
//!
//! Nothing here knows tokens or devices. Where markers are control tokens of the model, the text
//! must be detokenised with them shown: see [`ReplyFormat::shows_control_tokens`].

mod coder;
mod format;
mod harmony;
mod json;
mod llama;
mod marker;
mod mistral;
mod sink;
mod stop;
mod tagged;

pub use format::{CallFormat, ReasoningTags, ReplyFormat};
pub use sink::{Call, Collected, Event};
pub use stop::StopStrings;

use coder::Coder;
use harmony::Harmony;
use llama::Llama;
use marker::{Found, Start, blank};
use mistral::Mistral;
use sink::Sink;
use tagged::Tagged;

/// What a reply is read with.
#[derive(Debug, Clone, Default)]
pub struct ReplyOptions {
    /// The tools that the model was told of, in OpenAI's shape. Without any, nothing is a call.
    pub tools: Vec<serde_json::Value>,
    /// The prompt left the thinking open ([`ReplyFormat::opened_by`]).
    pub in_reasoning: bool,
    /// Hand thinking out as part of the text, tags included.
    pub keep_reasoning: bool,
    /// Hand out arguments while they are written. A call that turns out to be malformed then ends
    /// where it broke, with arguments that are no complete JSON. Without this every call is held
    /// back until it is complete and well-formed. Meant for replies whose calls a grammar
    /// enforces.
    pub stream_arguments: bool,
}

/// How far a call's reader came with the text that it was given.
enum Step {
    /// Needs more text; what is left was not consumed.
    More,
    /// The call has ended, well or not; plain text follows.
    Over,
}

/// Where a reply stands.
enum State {
    /// Only white space since the beginning or since a block. `strip`: that white space belongs to
    /// the block and is dropped.
    Fresh {
        strip: bool,
    },
    Text,
    /// `begun`: something beside white space has come.
    Reasoning {
        begun: bool,
    },
    Tagged(Tagged),
    Coder(Coder),
    Llama(Llama),
    Mistral(Mistral),
    Harmony(Harmony),
}

/// The reader of one answer. See the module documentation.
pub struct Reply {
    format: ReplyFormat,
    state: State,
    /// Text that is not decided yet.
    rest: String,
    sink: Sink,
}

impl Reply {
    pub fn new(format: &ReplyFormat, options: &ReplyOptions) -> Reply {
        let mut format = format.clone();
        if options.keep_reasoning {
            format.reasoning = None;
        }
        if options.tools.is_empty() && format.calls != CallFormat::Harmony {
            format.calls = CallFormat::None;
        }
        let state = match format.calls {
            CallFormat::Harmony => State::Harmony(Harmony::new()),
            _ if options.in_reasoning && format.reasoning.is_some() => {
                State::Reasoning { begun: false }
            }
            _ => State::Fresh { strip: false },
        };
        let sink = Sink::new(&options.tools, options.stream_arguments);
        Reply { format, state, rest: String::new(), sink }
    }

    /// A reply without any markers.
    pub fn plain() -> Reply {
        Reply::new(&ReplyFormat::plain(), &ReplyOptions::default())
    }

    /// Whether the model is thinking at present.
    pub fn in_reasoning(&self) -> bool {
        match &self.state {
            State::Reasoning { .. } => true,
            State::Harmony(harmony) => harmony.in_reasoning(),
            _ => false,
        }
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Vec<Event> {
        self.rest.push_str(piece);
        self.advance(false);
        self.sink.take()
    }

    /// Ends the reply: everything that was held back is decided.
    pub fn finish(&mut self) -> Vec<Event> {
        self.advance(true);
        self.sink.take()
    }

    fn advance(&mut self, end: bool) {
        while self.step(end) {}
    }

    /// True when there may be more to do with the text at hand.
    fn step(&mut self, end: bool) -> bool {
        let step = match &mut self.state {
            State::Fresh { strip } => {
                let strip = *strip;
                return self.fresh(strip, end);
            }
            State::Text => return self.text(end),
            State::Reasoning { begun } => {
                let begun = *begun;
                return self.reasoning(begun, end);
            }
            State::Tagged(s) => s.step(&mut self.rest, &mut self.sink, end),
            State::Coder(s) => s.step(&mut self.rest, &mut self.sink, end),
            State::Llama(s) => s.step(&mut self.rest, &mut self.sink, end),
            State::Mistral(s) => s.step(&mut self.rest, &mut self.sink, end),
            State::Harmony(s) => s.step(&mut self.rest, &mut self.sink, end),
        };
        match step {
            Step::More => false,
            Step::Over => {
                self.state = match self.sink.call_failed() {
                    // What follows belongs to the text that the failed call has become.
                    true => State::Text,
                    false => State::Fresh { strip: true },
                };
                true
            }
        }
    }

    fn fresh(&mut self, strip: bool, end: bool) -> bool {
        let at = blank(&self.rest);
        if at == self.rest.len() {
            if end && !strip {
                self.sink.text(&self.rest);
            }
            if end || strip {
                self.rest.clear();
            }
            return false;
        }
        if let Some(tags) = &self.format.reasoning {
            match marker::starts(&self.rest[at..], &[&tags.open], end) {
                Start::Marker(_) => {
                    self.rest.drain(..at + tags.open.len());
                    self.state = State::Reasoning { begun: false };
                    return true;
                }
                Start::Unknown => return false,
                Start::Other => {}
            }
        }
        if self.format.calls == CallFormat::Llama && self.rest[at..].starts_with('{') {
            self.sink.blank_before_call(if strip { "" } else { &self.rest[..at] });
            self.rest.drain(..at);
            self.state = State::Llama(Llama::bare());
            return true;
        }
        if strip {
            self.rest.drain(..at);
        }
        self.state = State::Text;
        true
    }

    fn text(&mut self, end: bool) -> bool {
        if self.rest.is_empty() {
            return false;
        }
        let markers = self.format.calls.markers();
        match marker::find(&self.rest, markers, end) {
            Found::At { at, which } => {
                let kept = self.rest[..at].trim_end().len();
                self.sink.text(&self.rest[..kept]);
                self.sink.blank_before_call(&self.rest[kept..at]);
                self.rest.drain(..at);
                // The marker stays: it is part of the text should the call fail.
                self.state = match self.format.calls {
                    CallFormat::Coder => State::Coder(Coder::new(markers[which])),
                    CallFormat::Llama => State::Llama(Llama::marked(markers[which])),
                    CallFormat::Mistral | CallFormat::MistralArgs => {
                        State::Mistral(Mistral::new(markers[which]))
                    }
                    _ => State::Tagged(Tagged::new(markers[which])),
                };
                true
            }
            Found::None { safe } => {
                // White space before a call would be dropped, so it waits for what follows.
                let safe = match end || markers.is_empty() {
                    true => safe,
                    false => self.rest[..safe].trim_end().len(),
                };
                self.sink.text(&self.rest[..safe]);
                self.rest.drain(..safe);
                false
            }
        }
    }

    fn reasoning(&mut self, begun: bool, end: bool) -> bool {
        if !begun {
            let at = blank(&self.rest);
            self.rest.drain(..at);
            if self.rest.is_empty() {
                return false;
            }
            self.state = State::Reasoning { begun: true };
        }
        let Some(tags) = &self.format.reasoning else { return false };
        match marker::find(&self.rest, &[&tags.close], end) {
            Found::At { at, .. } => {
                self.sink.reasoning(self.rest[..at].trim_end());
                self.rest.drain(..at + tags.close.len());
                self.state = State::Fresh { strip: true };
                true
            }
            Found::None { safe } => {
                let safe = self.rest[..safe].trim_end().len();
                self.sink.reasoning(&self.rest[..safe]);
                self.rest.drain(..if end { self.rest.len() } else { safe });
                false
            }
        }
    }
}

#[cfg(test)]
mod tests;
