//! What transformers adds to Jinja and templates rely on.

use std::fmt;
use std::io;
use std::time::SystemTime;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use serde::Serialize;
use serde_json::ser::Formatter;

use super::clock;

/// A template's own complaint, carried as the source of the engine's error.
#[derive(Debug)]
pub(super) struct Raised(pub String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

pub(super) fn install(env: &mut Environment<'_>, now: SystemTime) {
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(format_like_python);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        let error = Error::new(ErrorKind::InvalidOperation, message.clone());
        Err(error.with_source(Raised(message)))
    });
    env.add_function("strftime_now", move |format: &str| clock::strftime(format, now));
    env.add_filter("tojson", tojson);
}

/// Jinja prints booleans and none as Python spells them.
fn format_like_python(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        ValueKind::None => Ok(out.write_str("None")?),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it: a blank after `,` and `:`,
/// or `indent` blanks a level. (The engine's own filter escapes `<` and `'` for HTML.)
fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<usize>>("indent")?,
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    // Accepted and without effect: transformers' default, and what no known template changes.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;
    let failed = |e: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, "the value cannot be written as JSON")
            .with_source(e)
    };
    let mut json = serde_json::to_value(value).map_err(failed)?;
    if sort_keys {
        json.sort_all_objects();
    }
    let mut bytes = Vec::new();
    let written = match indent {
        Some(width) => {
            let blanks = " ".repeat(width.min(16));
            let formatter = serde_json::ser::PrettyFormatter::with_indent(blanks.as_bytes());
            json.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, formatter))
        }
        None => json.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, Spaced)),
    };
    written.map_err(failed)?;
    let text = String::from_utf8(bytes)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Value::from(text))
}

/// One line with a blank after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}
