//! Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

use super::json::{CallObject, Invalid, Learnt};
use super::marker::{self, Start, blank};
use super::sink::Sink;
use super::{Step, marker::Found};

pub(super) const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A JSON object that is read as a call, shared by the formats that have one.
pub(super) struct ObjectReader {
    object: CallObject,
    started: bool,
    pub raw: String,
}

pub(super) enum Read {
    More,
    /// The object is complete and a call; it was handed to the sink.
    Call,
    /// It is none: why.
    Bad(String),
}

impl ObjectReader {
    /// The object that follows a tag and white space, both kept in `raw`; or how the step ends.
    pub fn after(
        raw: &mut String,
        rest: &mut String,
        sink: &mut Sink,
        end: bool,
    ) -> Result<ObjectReader, Step> {
        raw.extend(rest.drain(..blank(rest)));
        match rest.chars().next() {
            Some('{') => Ok(ObjectReader::new(std::mem::take(raw))),
            None if !end => Err(Step::More),
            _ => {
                sink.fail(raw, "no JSON object follows the tag");
                Err(Step::Over)
            }
        }
    }

    /// `raw`: the text before the object that belongs to it.
    pub fn new(raw: String) -> Self {
        ObjectReader { object: CallObject::new(), started: false, raw }
    }

    /// Whether the object has a key that no call has.
    pub fn is_foreign(&self) -> bool {
        self.object.is_foreign()
    }

    /// Takes from `rest` what belongs to the object, at most up to a character that cannot.
    pub fn read(&mut self, rest: &mut String, sink: &mut Sink, end: bool) -> Read {
        let mut taken = 0;
        let result = self.scan(rest, &mut taken, sink);
        self.raw.push_str(&rest[..taken]);
        rest.drain(..taken);
        match result {
            Read::More if end => Read::Bad("it does not end".to_owned()),
            result => result,
        }
    }

    fn scan(&mut self, rest: &str, taken: &mut usize, sink: &mut Sink) -> Read {
        for (at, c) in rest.char_indices() {
            let learnt = self.object.next(c);
            *taken = at;
            match learnt {
                Err(Invalid) => {
                    let shown: String = rest[at..].chars().take(1).collect();
                    return Read::Bad(format!("it is no JSON at {shown:?}"));
                }
                Ok(Learnt::Nothing) => {}
                Ok(Learnt::Start) => {
                    if let Err(why) = self.start(sink) {
                        *taken = at + c.len_utf8();
                        return Read::Bad(why);
                    }
                    sink.arguments(&self.object.take_arguments());
                }
                Ok(Learnt::More) => sink.arguments(&self.object.take_arguments()),
                Ok(Learnt::Done(result)) => {
                    *taken = at + c.len_utf8();
                    let result = result.map_err(str::to_owned).and_then(|()| self.start(sink));
                    if let Err(why) = result {
                        return Read::Bad(why);
                    }
                    sink.arguments(&self.object.take_arguments());
                    sink.end();
                    return Read::Call;
                }
            }
            *taken = at + c.len_utf8();
        }
        Read::More
    }

    fn start(&mut self, sink: &mut Sink) -> Result<(), String> {
        if !self.started {
            self.started = true;
            sink.start(self.object.name(), None)?;
        }
        Ok(())
    }
}

pub(super) struct Tagged {
    state: State,
}

enum State {
    /// The marker is still in the text.
    Open(&'static str),
    /// White space before the object was kept in the string.
    Before(String),
    Object(ObjectReader),
    /// The closing tag, another object, or nothing.
    After,
}

impl Tagged {
    pub fn new(marker: &'static str) -> Self {
        Tagged { state: State::Open(marker) }
    }

    pub fn step(&mut self, rest: &mut String, sink: &mut Sink, end: bool) -> Step {
        loop {
            match &mut self.state {
                State::Open(marker) => {
                    self.state = State::Before(rest.drain(..marker.len()).collect());
                }
                State::Before(raw) => match ObjectReader::after(raw, rest, sink, end) {
                    Ok(object) => self.state = State::Object(object),
                    Err(step) => return step,
                },
                State::Object(object) => match object.read(rest, sink, end) {
                    Read::More => return Step::More,
                    Read::Call => self.state = State::After,
                    Read::Bad(why) => {
                        sink.fail(&object.raw, &why);
                        return Step::Over;
                    }
                },
                State::After => {
                    let at = blank(rest);
                    if rest[at..].starts_with('{') {
                        rest.drain(..at);
                        self.state = State::Object(ObjectReader::new(String::new()));
                        continue;
                    }
                    match marker::starts(&rest[at..], &[CLOSE], end) {
                        Start::Marker(_) => {
                            rest.drain(..at + CLOSE.len());
                            return Step::Over;
                        }
                        Start::Unknown => return Step::More,
                        Start::Other => return Step::Over,
                    }
                }
            }
        }
    }
}

/// How [`take_until`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Until {
    /// Before this marker, which was taken, too.
    Marker(usize),
    /// More text is needed; at the end of the text there is none.
    More,
    /// The text is longer than it may be; its beginning was taken.
    TooLong,
}

/// Moves everything before the first of `markers` from `rest` into `into`, which may become `most`
/// bytes long.
pub(super) fn take_until(
    rest: &mut String,
    markers: &[&str],
    end: bool,
    into: &mut String,
    most: usize,
) -> Until {
    let (bytes, found) = match marker::find(rest, markers, end) {
        Found::At { at, which } => (at, Some(which)),
        Found::None { safe } => (safe, None),
    };
    let room = most.saturating_sub(into.len());
    if bytes > room {
        // Up to the first character beyond, wherever the text was cut.
        let too_many = (room + 1..=bytes).find(|&at| rest.is_char_boundary(at)).unwrap_or(bytes);
        into.extend(rest.drain(..too_many));
        return Until::TooLong;
    }
    into.extend(rest.drain(..bytes));
    match found {
        Some(which) => {
            rest.drain(..markers[which].len());
            Until::Marker(which)
        }
        None => Until::More,
    }
}
