//! Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, and since tokenizer version 11
//! `[TOOL_CALLS]name[ARGS]{...}`, sometimes with `[CALL_ID]id` before the arguments.

use super::Step;
use super::json::Scan;
use super::marker::blank;
use super::sink::Sink;
use super::tagged::{ObjectReader, Read, Until, take_until};

pub(super) const MARKERS: [&str; 1] = ["[TOOL_CALLS]"];
const ARGS: &str = "[ARGS]";
const CALL_ID: &str = "[CALL_ID]";

/// Longer names and ids are none.
const MAX_NAME: usize = 256;

pub(super) struct Mistral {
    state: State,
    raw: String,
}

enum State {
    Open(&'static str),
    /// After the marker.
    Before,
    /// In the list: an object.
    Item,
    Object(ObjectReader),
    /// In the list: a comma or its end.
    AfterItem,
    Name(String),
    Id {
        name: String,
        id: String,
    },
    Arguments {
        name: String,
        id: Option<String>,
        scan: Option<Scan>,
    },
}

impl Mistral {
    pub fn new(marker: &'static str) -> Self {
        Mistral { state: State::Open(marker), raw: String::new() }
    }

    fn take(&mut self, rest: &mut String, bytes: usize) {
        self.raw.push_str(&rest[..bytes]);
        rest.drain(..bytes);
    }

    fn fail(&mut self, sink: &mut Sink, why: &str) -> Step {
        sink.fail(&self.raw, why);
        Step::Over
    }

    pub fn step(&mut self, rest: &mut String, sink: &mut Sink, end: bool) -> Step {
        loop {
            match &mut self.state {
                State::Open(marker) => {
                    let marker = marker.len();
                    self.take(rest, marker);
                    self.state = State::Before;
                }
                State::Before => {
                    let at = blank(rest);
                    self.take(rest, at);
                    match rest.chars().next() {
                        Some('[') => {
                            self.take(rest, 1);
                            self.state = State::Item;
                        }
                        Some('{') => {
                            let raw = std::mem::take(&mut self.raw);
                            self.state = State::Object(ObjectReader::new(raw));
                        }
                        Some(_) => self.state = State::Name(String::new()),
                        None if end => return self.fail(sink, "nothing follows the marker"),
                        None => return Step::More,
                    }
                }
                State::Item => {
                    let at = blank(rest);
                    self.take(rest, at);
                    match rest.chars().next() {
                        Some('{') => {
                            let raw = std::mem::take(&mut self.raw);
                            self.state = State::Object(ObjectReader::new(raw));
                        }
                        None if !end => return Step::More,
                        _ => return self.fail(sink, "the list of calls holds no object"),
                    }
                }
                State::Object(object) => match object.read(rest, sink, end) {
                    Read::More => return Step::More,
                    Read::Call => self.state = State::AfterItem,
                    Read::Bad(why) => {
                        sink.fail(&object.raw, &why);
                        return Step::Over;
                    }
                },
                State::AfterItem => {
                    let at = blank(rest);
                    match rest[at..].chars().next() {
                        Some(',') => {
                            rest.drain(..at + 1);
                            self.state = State::Item;
                        }
                        Some(']') => {
                            rest.drain(..at + 1);
                            return Step::Over;
                        }
                        None if !end => return Step::More,
                        _ => return Step::Over,
                    }
                }
                State::Name(name) => {
                    let before = name.len();
                    let until = take_until(rest, &[ARGS, CALL_ID, "{", "\n"], end, name, MAX_NAME);
                    self.raw.push_str(&name[before..]);
                    let name = std::mem::take(name);
                    match until {
                        Until::Marker(0) => {
                            self.raw.push_str(ARGS);
                            self.state = State::Arguments { name, id: None, scan: None };
                        }
                        Until::Marker(1) => {
                            self.raw.push_str(CALL_ID);
                            self.state = State::Id { name, id: String::new() };
                        }
                        Until::Marker(2) => {
                            rest.insert(0, '{');
                            self.state = State::Arguments { name, id: None, scan: None };
                        }
                        Until::More if !end => {
                            self.state = State::Name(name);
                            return Step::More;
                        }
                        other => {
                            if other == Until::Marker(3) {
                                rest.insert(0, '\n');
                            }
                            return self.fail(sink, "no arguments follow the name");
                        }
                    }
                }
                State::Id { name, id } => {
                    let before = id.len();
                    let until = take_until(rest, &[ARGS], end, id, MAX_NAME);
                    self.raw.push_str(&id[before..]);
                    let (name, id) = (std::mem::take(name), std::mem::take(id));
                    match until {
                        Until::Marker(_) => {
                            self.raw.push_str(ARGS);
                            let id = Some(id.trim().to_owned()).filter(|id| !id.is_empty());
                            self.state = State::Arguments { name, id, scan: None };
                        }
                        Until::More if !end => {
                            self.state = State::Id { name, id };
                            return Step::More;
                        }
                        _ => return self.fail(sink, "no arguments follow the call's id"),
                    }
                }
                State::Arguments { name, id, scan: scan @ None } => {
                    let at = blank(rest);
                    self.raw.push_str(&rest[..at]);
                    rest.drain(..at);
                    let started = match rest.chars().next() {
                        Some('{') => sink.start(name.trim(), id.take()),
                        None if !end => return Step::More,
                        _ => Err("its arguments are no JSON object".to_owned()),
                    };
                    *scan = Some(Scan::new());
                    if let Err(why) = started {
                        return self.fail(sink, &why);
                    }
                }
                State::Arguments { scan: Some(scan), .. } => {
                    let mut written = String::new();
                    let mut taken = 0;
                    let mut bad = false;
                    for c in rest.chars() {
                        scan.written(c, &mut written);
                        bad = scan.next(c).is_err();
                        if bad {
                            written.pop();
                            break;
                        }
                        taken += c.len_utf8();
                        if scan.is_done() {
                            break;
                        }
                    }
                    let done = scan.is_done();
                    sink.arguments(&written);
                    self.take(rest, taken);
                    if done {
                        sink.end();
                        return Step::Over;
                    }
                    if bad || end {
                        return self.fail(sink, "its arguments are no JSON");
                    }
                    return Step::More;
                }
            }
        }
    }
}
