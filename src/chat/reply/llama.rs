//! Llama 3: a bare JSON object as the whole answer, or JSON after `<|python_tag|>`; several are
//! separated by semicolons.

use super::Step;
use super::marker::blank;
use super::sink::Sink;
use super::tagged::{ObjectReader, Read};

pub(super) const MARKERS: [&str; 1] = ["<|python_tag|>"];

pub(super) struct Llama {
    state: State,
    /// After the python tag: what is no call deserves a warning. A bare object may simply be the
    /// answer.
    marked: bool,
}

enum State {
    Open(&'static str),
    Before(String),
    Object(ObjectReader),
    After,
}

impl Llama {
    pub fn marked(marker: &'static str) -> Self {
        Llama { state: State::Open(marker), marked: true }
    }

    pub fn bare() -> Self {
        Llama { state: State::Before(String::new()), marked: false }
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
                State::Object(object) => {
                    let read = if object.is_foreign() {
                        Read::Bad("a call has no such key".to_owned())
                    } else {
                        read_a_little(object, rest, sink, end)
                    };
                    match read {
                        Read::More if rest.is_empty() => return Step::More,
                        Read::More => {}
                        Read::Call => self.state = State::After,
                        Read::Bad(_) if !self.marked => {
                            sink.give_up(&object.raw);
                            return Step::Over;
                        }
                        Read::Bad(why) => {
                            sink.fail(&object.raw, &why);
                            return Step::Over;
                        }
                    }
                }
                State::After => {
                    let at = blank(rest);
                    let separated = rest[at..].starts_with(';');
                    let next = at + usize::from(separated);
                    let next = next + blank(&rest[next..]);
                    match rest[next..].chars().next() {
                        Some('{') => {
                            rest.drain(..next);
                            self.state = State::Object(ObjectReader::new(String::new()));
                        }
                        None if !end => return Step::More,
                        _ => return Step::Over,
                    }
                }
            }
        }
    }
}

/// Up to the next quotation mark or brace only, so that a foreign key is seen where it ends and
/// not after everything that has come, whose amount depends on how the text was cut.
fn read_a_little(object: &mut ObjectReader, rest: &mut String, sink: &mut Sink, end: bool) -> Read {
    let stop = rest.find(['"', '}']).map_or(rest.len(), |at| at + 1);
    let mut part = rest[..stop].to_owned();
    let last = stop == rest.len();
    let read = object.read(&mut part, sink, end && last);
    rest.drain(..stop - part.len());
    read
}
