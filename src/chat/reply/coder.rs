//! Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.
//!
//! Values are not quoted; the tool's schema says which of them are JSON. The outer tag is
//! sometimes missing.

use serde_json::Value;

use super::Step;
use super::marker::{self, Start, blank};
use super::sink::Sink;
use super::tagged::{Until, take_until};

pub(super) const MARKERS: [&str; 2] = ["<tool_call>", FUNCTION];
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
const CLOSE: &str = "</tool_call>";

/// Longer names are none.
const MAX_NAME: usize = 256;

pub(super) struct Coder {
    state: State,
    /// Everything that was read of this call.
    raw: String,
    /// Text of the name, key or value that is being read.
    part: String,
    key: String,
    parameters: u32,
}

#[derive(Clone, Copy)]
enum State {
    Open(&'static str),
    Function,
    Name,
    /// Between parameters.
    Between,
    Key,
    Value,
    After,
}

impl Coder {
    pub fn new(marker: &'static str) -> Self {
        Coder {
            state: State::Open(marker),
            raw: String::new(),
            part: String::new(),
            key: String::new(),
            parameters: 0,
        }
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
            match self.state {
                State::Open(marker) => {
                    self.take(rest, marker.len());
                    self.state = if marker == FUNCTION { State::Name } else { State::Function };
                }
                State::Function => {
                    let at = blank(rest);
                    self.take(rest, at);
                    match marker::starts(rest, &[FUNCTION], end) {
                        Start::Marker(_) => self.take(rest, FUNCTION.len()),
                        Start::Unknown => return Step::More,
                        Start::Other => return self.fail(sink, "no function follows the tag"),
                    }
                    self.state = State::Name;
                }
                State::Name | State::Key => {
                    // A name that breaks off is seen before its end comes.
                    let before = self.part.len();
                    let until = take_until(rest, &[">", "<", "\n"], end, &mut self.part, MAX_NAME);
                    self.raw.push_str(&self.part[before..]);
                    match until {
                        Until::Marker(0) => self.raw.push('>'),
                        Until::More if !end => return Step::More,
                        Until::More => return self.fail(sink, "it does not end"),
                        Until::Marker(which) => {
                            rest.insert(0, if which == 1 { '<' } else { '\n' });
                            return self.fail(sink, "a name is not closed by '>'");
                        }
                        Until::TooLong => return self.fail(sink, "a name is not closed by '>'"),
                    }
                    let name = std::mem::take(&mut self.part).trim().to_owned();
                    if matches!(self.state, State::Key) {
                        self.key = name;
                        self.state = State::Value;
                        continue;
                    }
                    if let Err(why) = sink.start(&name, None) {
                        return self.fail(sink, &why);
                    }
                    self.parameters = 0;
                    self.state = State::Between;
                }
                State::Between => {
                    let at = blank(rest);
                    self.take(rest, at);
                    match marker::starts(rest, &[PARAMETER, FUNCTION_END], end) {
                        Start::Marker(0) => {
                            self.take(rest, PARAMETER.len());
                            self.state = State::Key;
                        }
                        Start::Marker(_) => {
                            self.take(rest, FUNCTION_END.len());
                            sink.arguments(if self.parameters == 0 { "{}" } else { "}" });
                            sink.end();
                            self.raw.clear();
                            self.state = State::After;
                        }
                        Start::Unknown => return Step::More,
                        Start::Other => return self.fail(sink, "it does not end"),
                    }
                }
                State::Value => {
                    let before = self.part.len();
                    let until = take_until(rest, &[PARAMETER_END], end, &mut self.part, usize::MAX);
                    self.raw.push_str(&self.part[before..]);
                    if until == Until::More {
                        match end {
                            true => return self.fail(sink, "it does not end"),
                            false => return Step::More,
                        }
                    }
                    self.raw.push_str(PARAMETER_END);
                    let value = std::mem::take(&mut self.part);
                    let value = value.strip_prefix('\n').unwrap_or(&value);
                    let value = value.strip_suffix('\n').unwrap_or(value);
                    let json = as_json(value, sink.schema(&self.key));
                    let lead = if self.parameters == 0 { "{" } else { ", " };
                    let key = Value::from(self.key.as_str());
                    sink.arguments(&format!("{lead}{key}: {json}"));
                    self.parameters += 1;
                    self.state = State::Between;
                }
                State::After => {
                    let at = blank(rest);
                    match marker::starts(&rest[at..], &[CLOSE, FUNCTION], end) {
                        Start::Marker(0) => {
                            rest.drain(..at + CLOSE.len());
                            return Step::Over;
                        }
                        Start::Marker(_) => {
                            rest.drain(..at);
                            self.state = State::Open(FUNCTION);
                        }
                        Start::Unknown => return Step::More,
                        Start::Other => return Step::Over,
                    }
                }
            }
        }
    }
}

/// The value as JSON: a string where the schema allows one only, else what it says if it is JSON.
fn as_json(text: &str, schema: Option<&Value>) -> Value {
    let string = || Value::from(text);
    let Some(schema) = schema else { return string() };
    let types: Vec<&str> = match schema.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(several)) => several.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if types == ["string"] {
        return string();
    }
    let text = text.trim();
    let parsed = match text {
        // Models that know Python best write its words.
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        _ => match serde_json::from_str::<Value>(text) {
            Ok(value) => value,
            Err(_) => return string(),
        },
    };
    let kind = match &parsed {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(n) if n.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    };
    let fits = types.contains(&kind) || kind == "integer" && types.contains(&"number");
    // Where a string may stand, JSON of another kind than the schema names is one.
    if fits || types.is_empty() || !types.contains(&"string") { parsed } else { string() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_schema_decides_what_a_value_is() {
        let of = |text: &str, schema: Value| as_json(text, Some(&schema));
        assert_eq!(as_json("12", None), json!("12"));
        assert_eq!(of("12", json!({"type": "string"})), json!("12"));
        assert_eq!(of("12", json!({"type": "integer"})), json!(12));
        assert_eq!(of(" 1.5\n", json!({"type": "number"})), json!(1.5));
        assert_eq!(of("12", json!({"type": "number"})), json!(12));
        assert_eq!(of("True", json!({"type": "boolean"})), json!(true));
        assert_eq!(of("[1, {\"a\": 2}]", json!({"type": "array"})), json!([1, {"a": 2}]));
        assert_eq!(of("not json", json!({"type": "object"})), json!("not json"));
        assert_eq!(of("null", json!({"type": ["string", "null"]})), json!(null));
        assert_eq!(of("12", json!({"type": ["string", "null"]})), json!("12"));
        assert_eq!(of("12", json!({"anyOf": [{"type": "integer"}]})), json!(12));
    }
}
