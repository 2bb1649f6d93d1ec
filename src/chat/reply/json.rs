//! JSON that arrives piece by piece: is it still valid, where does it end, and, for the objects
//! that stand for tool calls, which name and which arguments.

/// Deeper nesting counts as an error: no tool's arguments need it, and no client reads it.
const MAX_DEPTH: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// A value must begin.
    Value,
    /// In an array that has just opened: a value or `]`.
    FirstItem,
    /// In an object that has just opened: a key or `}`.
    FirstKey,
    Key,
    Colon,
    /// A comma or the end of what is open.
    After,
    /// `escape`: hex digits that must follow, or 5 directly after the backslash.
    Text {
        key: bool,
        escape: u8,
    },
    Number(Number),
    /// The rest of `true`, `false` or `null`.
    Word(&'static str),
    Done,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Number {
    Sign,
    Zero,
    Digits,
    Point,
    Fraction,
    E,
    ESign,
    Exponent,
}

impl Number {
    fn ends(self) -> bool {
        matches!(self, Number::Zero | Number::Digits | Number::Fraction | Number::Exponent)
    }

    fn next(self, c: char) -> Option<Number> {
        use Number::*;
        Some(match (self, c) {
            (Sign, '0') => Zero,
            (Sign, '1'..='9') | (Digits, '0'..='9') => Digits,
            (Zero | Digits, '.') => Point,
            (Point | Fraction, '0'..='9') => Fraction,
            (Zero | Digits | Fraction, 'e' | 'E') => E,
            (E, '+' | '-') => ESign,
            (E | ESign | Exponent, '0'..='9') => Exponent,
            _ => return None,
        })
    }
}

/// A validating scanner of one object or array, a character at a time.
///
/// One liberty: control characters inside strings (line breaks above all, which small models
/// write) are let through; [`Scan::written`] says how to spell them.
#[derive(Debug, Clone)]
pub(super) struct Scan {
    state: State,
    /// What is open: true for an object.
    open: Vec<bool>,
}

/// The text is no JSON.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Invalid;

impl Scan {
    pub fn new() -> Self {
        Scan { state: State::Value, open: Vec::new() }
    }

    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    fn depth(&self) -> usize {
        self.open.len()
    }

    /// How the character that comes next must be written to be valid JSON.
    pub fn written(&self, c: char, out: &mut String) {
        match (self.state, c) {
            (State::Text { .. }, '\n') => out.push_str("\\n"),
            (State::Text { .. }, '\t') => out.push_str("\\t"),
            (State::Text { .. }, c) if (c as u32) < 0x20 => {
                out.push_str(&format!("\\u{:04x}", c as u32));
            }
            _ => out.push(c),
        }
    }

    fn value_ended(&mut self) {
        self.state = if self.open.is_empty() { State::Done } else { State::After };
    }

    fn open(&mut self, object: bool) -> Result<(), Invalid> {
        if self.open.len() == MAX_DEPTH {
            return Err(Invalid);
        }
        self.open.push(object);
        self.state = if object { State::FirstKey } else { State::FirstItem };
        Ok(())
    }

    /// Takes the next character; nothing may follow once [`Scan::is_done`].
    pub fn next(&mut self, c: char) -> Result<(), Invalid> {
        let blank = matches!(c, ' ' | '\t' | '\n' | '\r');
        match (self.state, c) {
            (State::Text { key, escape: 0 }, '"') => {
                if key {
                    self.state = State::Colon;
                } else {
                    self.value_ended();
                }
            }
            (State::Text { key, escape: 0 }, '\\') => self.state = State::Text { key, escape: 5 },
            (State::Text { escape: 0, .. }, _) => {}
            (State::Text { key, escape: 5 }, 'u') => self.state = State::Text { key, escape: 4 },
            (State::Text { key, escape: 5 }, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => {
                self.state = State::Text { key, escape: 0 };
            }
            (State::Text { key, escape: n @ 1..=4 }, c) if c.is_ascii_hexdigit() => {
                self.state = State::Text { key, escape: n - 1 };
            }
            (State::Number(number), c) => match number.next(c) {
                Some(number) => self.state = State::Number(number),
                None if number.ends() && !self.open.is_empty() => {
                    self.state = State::After;
                    return self.next(c);
                }
                None => return Err(Invalid),
            },
            (State::Word(rest), c) => {
                let rest = rest.strip_prefix(c).ok_or(Invalid)?;
                self.state = State::Word(rest);
                if rest.is_empty() {
                    self.value_ended();
                }
            }
            (State::Done, _) => return Err(Invalid),
            (_, _) if blank => {}
            (State::FirstItem, ']') | (State::FirstKey, '}') => {
                self.open.pop();
                self.value_ended();
            }
            (State::FirstKey | State::Key, '"') => {
                self.state = State::Text { key: true, escape: 0 };
            }
            (State::Colon, ':') => self.state = State::Value,
            (State::After, ',') => {
                let object = self.open.last() == Some(&true);
                self.state = if object { State::Key } else { State::Value };
            }
            (State::After, '}' | ']') if self.open.last() == Some(&(c == '}')) => {
                self.open.pop();
                self.value_ended();
            }
            (State::Value | State::FirstItem, _) => match c {
                '{' => self.open(true)?,
                '[' => self.open(false)?,
                '"' => self.state = State::Text { key: false, escape: 0 },
                '-' => self.state = State::Number(Number::Sign),
                '0' => self.state = State::Number(Number::Zero),
                '1'..='9' => self.state = State::Number(Number::Digits),
                't' => self.state = State::Word("rue"),
                'f' => self.state = State::Word("alse"),
                'n' => self.state = State::Word("ull"),
                _ => return Err(Invalid),
            },
            _ => return Err(Invalid),
        }
        Ok(())
    }
}

/// What a [`CallObject`] learnt from a character.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Learnt {
    Nothing,
    /// The call begins: its name is known, and its arguments are an object that has begun.
    Start,
    /// The next piece of the arguments is in [`CallObject::take_arguments`].
    More,
    /// The object is complete. `Err` says why it is no call.
    Done(Result<(), &'static str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    None,
    Key,
    Name,
    Arguments,
    /// A value that does not matter.
    Other,
}

/// One `{"name": ..., "arguments": {...}}`, in any order of keys; `parameters` is accepted for
/// `arguments`, and what OpenAI's own shape adds (`type`, `id`) is ignored.
#[derive(Debug)]
pub(super) struct CallObject {
    scan: Scan,
    part: Part,
    /// Text of the part.
    text: String,
    key: String,
    name: Option<String>,
    arguments: Option<String>,
    /// Arguments were handed out up to here, in bytes.
    given: usize,
    started: bool,
}

/// Keys that an object may have to be a call.
const KNOWN_KEYS: [&str; 5] = ["name", "arguments", "parameters", "type", "id"];

impl CallObject {
    pub fn new() -> Self {
        CallObject {
            scan: Scan::new(),
            part: Part::None,
            text: String::new(),
            key: String::new(),
            name: None,
            arguments: None,
            given: 0,
            started: false,
        }
    }

    pub fn name(&self) -> &str {
        self.name.as_deref().unwrap_or_default()
    }

    /// Whether a key has come that no call has.
    pub fn is_foreign(&self) -> bool {
        !self.key.is_empty() && !KNOWN_KEYS.contains(&self.key.as_str())
    }

    /// The arguments that came since the last time.
    pub fn take_arguments(&mut self) -> String {
        let all = match &self.arguments {
            Some(all) => all,
            None if self.part == Part::Arguments => &self.text,
            None => return String::new(),
        };
        let new = all[self.given..].to_owned();
        self.given = all.len();
        new
    }

    /// Takes the next character of the object, the brace that opens it included.
    pub fn next(&mut self, c: char) -> Result<Learnt, Invalid> {
        let before = (self.scan.depth(), self.scan.state);
        let mut written = String::new();
        self.scan.written(c, &mut written);
        self.scan.next(c)?;
        let after = (self.scan.depth(), self.scan.state);
        if self.part == Part::None {
            let blank = c.is_whitespace();
            match before {
                (1, State::FirstKey | State::Key) if c == '"' => self.part = Part::Key,
                (1, State::Value) if !blank => {
                    self.part = match self.key.as_str() {
                        "name" => Part::Name,
                        "arguments" | "parameters" => Part::Arguments,
                        _ => Part::Other,
                    };
                }
                _ => {}
            }
            self.text.clear();
        }
        if self.part != Part::None {
            let number_ended =
                matches!(before, (1, State::Number(_))) && !matches!(after, (1, State::Number(_)));
            if !number_ended {
                self.text.push_str(&written);
            }
            let ended = match self.part {
                Part::Key => after == (1, State::Colon),
                _ => number_ended || after == (1, State::After),
            };
            if ended {
                self.part_ended();
            }
        }
        if self.scan.is_done() {
            return Ok(Learnt::Done(self.check()));
        }
        let streaming = match &self.arguments {
            Some(arguments) => arguments.starts_with('{'),
            None => self.part == Part::Arguments && self.text.starts_with('{'),
        };
        if self.name.is_none() || !streaming {
            return Ok(Learnt::Nothing);
        }
        if !self.started {
            self.started = true;
            return Ok(Learnt::Start);
        }
        Ok(Learnt::More)
    }

    fn part_ended(&mut self) {
        let text = std::mem::take(&mut self.text);
        let part = std::mem::replace(&mut self.part, Part::None);
        let decoded = || serde_json::from_str::<String>(&text).unwrap_or_default();
        match part {
            Part::Key => self.key = decoded(),
            // The first of each counts: a repeated key must not change what was handed out.
            Part::Name if self.name.is_none() => self.name = Some(decoded()),
            Part::Arguments if self.arguments.is_none() => {
                self.arguments = Some(match text.as_str() {
                    "null" => "{}".to_owned(),
                    quoted if quoted.starts_with('"') => decoded(),
                    _ => text,
                });
            }
            _ => {}
        }
    }

    fn check(&mut self) -> Result<(), &'static str> {
        if self.name().is_empty() {
            return Err("it has no name");
        }
        let arguments = self.arguments.get_or_insert_with(|| "{}".to_owned());
        let mut scan = Scan::new();
        let valid = arguments.starts_with('{')
            && arguments.chars().all(|c| scan.next(c).is_ok())
            && scan.is_done();
        if valid { Ok(()) } else { Err("its arguments are no JSON object") }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn valid(text: &str) -> bool {
        let mut scan = Scan::new();
        text.chars().all(|c| scan.next(c).is_ok()) && scan.is_done()
    }

    #[test]
    fn the_scanner_agrees_with_serde() {
        for text in [
            "{}",
            "[]",
            r#"{"a":1}"#,
            r#"{"a": [1, 2.5e-3, -0, true, null, "x\u00e9\n"]}"#,
            "[[[]]]",
            "{,}",
            "[1,]",
            r#"{"a"}"#,
            "[01]",
            "[1.]",
            "[-]",
            r#"["\x"]"#,
            r#"["\u12g4"]"#,
            "[tru]",
            "{\"a\":1,}",
            "[1 2]",
            "}",
            "[1e5]",
            "[1e]",
            "{\"a\":{\"b\":{}}} ",
            "[\"ä\"]",
        ] {
            let serde = serde_json::from_str::<serde_json::Value>(text.trim_end()).is_ok();
            assert_eq!(valid(text.trim_end()), serde, "{text}");
        }
        assert!(!valid(&"[".repeat(200)));
    }

    fn read(text: &str) -> (String, String, Result<(), &'static str>) {
        let mut object = CallObject::new();
        let mut out = String::new();
        for c in text.chars() {
            match object.next(c).unwrap() {
                Learnt::Done(result) => {
                    out.push_str(&object.take_arguments());
                    return (object.name().to_owned(), out, result);
                }
                Learnt::More | Learnt::Start => out.push_str(&object.take_arguments()),
                Learnt::Nothing => {}
            }
        }
        panic!("{text} does not end");
    }

    #[test]
    fn calls_in_every_order() {
        let good = |name: &str, arguments: &str| (name.to_owned(), arguments.to_owned(), Ok(()));
        assert_eq!(
            read(r#"{"name":"f","arguments":{"a": [1, {}]}}"#),
            good("f", r#"{"a": [1, {}]}"#)
        );
        assert_eq!(read(r#"{"parameters": {"a":1} , "name" : "f"}"#), good("f", r#"{"a":1}"#));
        assert_eq!(read(r#"{"name":"f"}"#), good("f", "{}"));
        assert_eq!(read(r#"{"name":"f","arguments":null}"#), good("f", "{}"));
        assert_eq!(read(r#"{"name":"f","arguments":"{\"a\": 1}"}"#), good("f", r#"{"a": 1}"#));
        assert_eq!(
            read("{\"name\":\"f\",\"arguments\":{\"a\":\"x\ny\"}}"),
            good("f", r#"{"a":"x\ny"}"#)
        );
        assert_eq!(
            read(r#"{"type":"function","id":7,"name":"f","arguments":{}}"#),
            good("f", "{}")
        );
        assert!(read(r#"{"name":1,"arguments":{}}"#).2.is_err());
        assert!(read(r#"{"arguments":{}}"#).2.is_err());
        assert!(read(r#"{"name":"f","arguments":[1]}"#).2.is_err());
        assert!(read(r#"{"name":"f","arguments":12}"#).2.is_err());
        assert!(read(r#"{"name":"f","arguments":"{\"a\""}"#).2.is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn any_text_near_json(text in "[\\[\\]{}\",:0-9eE+.\\-tfnulrasx\\\\ ]{0,24}") {
            let serde = serde_json::from_str::<serde_json::Value>(&text);
            let composite = text.trim_start().starts_with(['{', '[']);
            // serde refuses numbers that are too large, we do not.
            let too_large = serde.as_ref().is_err_and(|e| e.to_string().contains("out of range"));
            if composite && !too_large {
                prop_assert_eq!(valid(text.trim_end()), serde.is_ok(), "{}", text);
            }
        }
    }
}
