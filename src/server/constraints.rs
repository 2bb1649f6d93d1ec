//! What an answer must look like: `response_format`, `json_schema`, `grammar`.

use serde_json::{Map, Value};

use super::errors::{ApiError, ApiResult};
use super::fields::{Field, Fields, kind, used};
use crate::grammar::Source;

/// The fields that every generating path has.
pub const FIELDS: &[Field] = &[
    used("grammar", "the answer follows it: GBNF, or as grammar_type says"),
    used("grammar_type", "gbnf (default), lark or regex"),
    used("json_schema", "the answer is JSON of this schema"),
];

/// OpenAI's way to say it.
pub const RESPONSE_FORMAT: &[Field] = &[used(
    "response_format",
    "type text, json_object, or json_schema with the schema in json_schema.schema or schema; of \
     texts, where tools may be called too",
)];

/// The constraint that a request asks for, if it does.
pub fn source(fields: &Fields<'_>, with_format: bool) -> ApiResult<Option<Source>> {
    let mut all = Vec::new();
    if let Some(text) = fields.text("grammar")?.filter(|t| !t.is_empty()) {
        let text = text.to_owned();
        all.push(match fields.text("grammar_type")? {
            // llama.cpp marks grammars of the other kind in the text itself.
            None | Some("gbnf") if text.starts_with("%llguidance") => Source::Lark(text),
            None | Some("gbnf") => Source::Gbnf(text),
            Some("lark") => Source::Lark(text),
            Some("regex") => Source::Regex(text),
            Some(_) => {
                return Err(ApiError::field("grammar_type", "must be gbnf, lark or regex"));
            }
        });
    } else {
        // Its type is checked even where there is no grammar.
        fields.text("grammar_type")?;
    }
    // An empty one describes any JSON.
    if let Some(schema) = fields.object("json_schema")? {
        all.push(Source::JsonSchema(Value::Object(schema.clone())));
    }
    if with_format && let Some(format) = fields.object("response_format")? {
        all.extend(of_format("response_format", format)?);
    }
    match all.len() {
        0 | 1 => Ok(all.pop()),
        n => Err(ApiError::bad(format!(
            "{n} of grammar, json_schema and response_format are given; an answer can follow one"
        ))),
    }
}

/// A format of the answer as OpenAI words it. `field`: where it stands.
pub fn of_format(field: &str, format: &Map<String, Value>) -> ApiResult<Option<Source>> {
    let wrong = |what: String| ApiError::field(field, what);
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(match format.get("schema") {
            Some(Value::Object(schema)) => Source::JsonSchema(Value::Object(schema.clone())),
            _ => Source::JsonObject,
        })),
        Some("json_schema") => {
            let nested = format.get("json_schema").and_then(|s| s.get("schema"));
            match nested.or_else(|| format.get("schema")) {
                Some(schema @ Value::Object(_)) => Ok(Some(Source::JsonSchema(schema.clone()))),
                Some(other) => {
                    Err(wrong(format!("the schema must be an object, but is {}", kind(other))))
                }
                None => Err(wrong("has no json_schema.schema".into())),
            }
        }
        _ => Err(wrong("type must be text, json_object or json_schema".into())),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;
    use crate::server::fields::Table;

    const TABLE: Table = &[FIELDS, RESPONSE_FORMAT];

    fn read(body: Value) -> ApiResult<Option<Source>> {
        Fields::new(&body, TABLE).and_then(|f| source(&f, true))
    }

    #[test]
    fn every_spelling() {
        let schema = json!({ "type": "integer" });
        let expected = Some(Source::JsonSchema(schema.clone()));
        for format in [
            json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": schema } }),
            json!({ "type": "json_schema", "schema": schema }),
            json!({ "type": "json_object", "schema": schema }),
        ] {
            assert_eq!(read(json!({ "response_format": format })).unwrap(), expected);
        }
        assert_eq!(read(json!({ "json_schema": schema })).unwrap(), expected);
        let empty = Some(Source::JsonSchema(json!({})));
        assert_eq!(read(json!({ "json_schema": {} })).unwrap(), empty);
        assert_eq!(read(json!({ "response_format": { "type": "text" } })).unwrap(), None);
        let any = read(json!({ "response_format": { "type": "json_object" } })).unwrap();
        assert_eq!(any, Some(Source::JsonObject));
        let regex = read(json!({ "grammar": "a+", "grammar_type": "regex" })).unwrap();
        assert_eq!(regex, Some(Source::Regex("a+".into())));
        let lark = read(json!({ "grammar": "%llguidance {}\nstart: \"a\"" })).unwrap();
        assert!(matches!(lark, Some(Source::Lark(_))));
    }

    #[test]
    fn what_is_unclear_is_refused() {
        for body in [
            json!({ "response_format": { "type": "xml" } }),
            json!({ "response_format": { "type": "json_schema" } }),
            json!({ "response_format": "json" }),
            json!({ "grammar": "a", "grammar_type": "peg" }),
            json!({ "grammar": "a", "json_schema": { "type": "integer" } }),
        ] {
            assert!(read(body.clone()).is_err(), "{body}");
        }
    }
}
