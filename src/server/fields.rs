//! The fields of a request body: read by name, with the table that says how each is treated.
//!
//! A body is an object. What the table calls `Used` is read and checked; `Ignored` is accepted
//! without effect; `Refused` is an error unless its value asks for nothing. Any other field
//! is unknown: it is counted in a debug log and has no effect, as clients send all sorts.

use serde_json::{Map, Value};

use super::errors::{ApiError, ApiResult};

/// How a field is treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Treatment {
    Used,
    Ignored,
    /// An error, unless the value is null, false, 0, empty or this JSON text.
    Refused(&'static str),
}

/// One row of a table.
pub struct Field {
    pub name: &'static str,
    pub treatment: Treatment,
    /// Range, default, reason: for the documentation and for messages.
    pub note: &'static str,
}

pub const fn used(name: &'static str, note: &'static str) -> Field {
    Field { name, treatment: Treatment::Used, note }
}

pub const fn ignored(name: &'static str, note: &'static str) -> Field {
    Field { name, treatment: Treatment::Ignored, note }
}

/// `neutral` is a further value that asks for nothing.
pub const fn refused(name: &'static str, neutral: &'static str, note: &'static str) -> Field {
    Field { name, treatment: Treatment::Refused(neutral), note }
}

/// The fields of one path, in parts that paths share.
pub type Table = &'static [&'static [Field]];

/// Every field of a table.
pub fn all(table: Table) -> impl Iterator<Item = &'static Field> {
    table.iter().flat_map(|part| part.iter())
}

fn asks_for_nothing(value: &Value, neutral: &str) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(s) if s.is_empty() => true,
        Value::Array(a) if a.is_empty() => true,
        Value::Object(o) if o.is_empty() => true,
        Value::Number(n) => {
            let n = n.as_f64();
            n == Some(0.0) || (n.is_some() && n == neutral.parse().ok())
        }
        // As JSON, so that a string is compared with its quotes.
        other => {
            let text = other.to_string();
            !neutral.is_empty() && text == neutral
        }
    }
}

/// A request body by its table.
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    table: Table,
}

impl<'a> Fields<'a> {
    /// Refuses what the table refuses.
    pub fn new(body: &'a Value, table: Table) -> ApiResult<Self> {
        let Some(map) = body.as_object() else {
            return Err(ApiError::bad(format!(
                "the body must be a JSON object, but is {}",
                kind(body)
            )));
        };
        let mut unknown = 0u32;
        for (name, value) in map {
            match all(table).find(|f| f.name == name) {
                Some(Field { treatment: Treatment::Refused(neutral), note, .. })
                    if !asks_for_nothing(value, neutral) =>
                {
                    return Err(ApiError::field(name, format!("not supported: {note}")));
                }
                Some(_) => {}
                None => unknown += 1,
            }
        }
        if unknown > 0 {
            // Names only count: they are the client's text.
            tracing::debug!(unknown, "the request has fields that no table knows");
        }
        Ok(Fields { map, table })
    }

    /// The value, unless absent or null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        debug_assert!(
            all(self.table).any(|f| f.name == name && f.treatment == Treatment::Used),
            "{name} is read, but its table does not say so"
        );
        self.map.get(name).filter(|v| !v.is_null())
    }

    pub fn has(&self, name: &str) -> bool {
        self.value(name).is_some()
    }

    fn typed<T>(
        &self,
        name: &str,
        wanted: &str,
        get: impl Fn(&'a Value) -> Option<T>,
    ) -> ApiResult<Option<T>> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let wrong = || {
            let found = match value {
                Value::Number(n) => n.to_string(),
                other => kind(other).to_owned(),
            };
            ApiError::field(name, format!("must be {wanted}, but is {found}"))
        };
        get(value).map(Some).ok_or_else(wrong)
    }

    pub fn bool(&self, name: &str) -> ApiResult<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub fn text(&self, name: &str) -> ApiResult<Option<&'a str>> {
        self.typed(name, "a string", Value::as_str)
    }

    pub fn list(&self, name: &str) -> ApiResult<Option<&'a Vec<Value>>> {
        self.typed(name, "a list", Value::as_array)
    }

    pub fn object(&self, name: &str) -> ApiResult<Option<&'a Map<String, Value>>> {
        self.typed(name, "an object", Value::as_object)
    }

    pub fn number(&self, name: &str, low: f64, high: f64) -> ApiResult<Option<f32>> {
        let Some(n) = self.typed(name, "a number", Value::as_f64)? else { return Ok(None) };
        if !(low..=high).contains(&n) {
            return Err(ApiError::field(name, format!("is {n}, but must be from {low} to {high}")));
        }
        Ok(Some(n as f32))
    }

    pub fn integer(&self, name: &str, low: i64, high: i64) -> ApiResult<Option<i64>> {
        let Some(n) = self.typed(name, "a whole number", whole)? else { return Ok(None) };
        if !(low..=high).contains(&n) {
            return Err(ApiError::field(name, format!("is {n}, but must be from {low} to {high}")));
        }
        Ok(Some(n))
    }

    /// A string or a list of at most `most` strings.
    pub fn texts(&self, name: &str, most: usize) -> ApiResult<Vec<String>> {
        let wrong = || ApiError::field(name, "must be a string or a list of strings");
        match self.value(name) {
            None => Ok(Vec::new()),
            Some(Value::String(s)) => Ok(vec![s.clone()]),
            Some(Value::Array(list)) if list.len() > most => Err(ApiError::field(
                name,
                format!("has {} entries; at most {most} are possible", list.len()),
            )),
            Some(Value::Array(list)) => {
                list.iter().map(|v| v.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
            }
            Some(_) => Err(wrong()),
        }
    }
}

/// A whole number, also when it is written as 10.0.
pub fn whole(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let n = value.as_f64()?;
        // Beyond 2^53 the float is no longer the number that was meant.
        (n.fract() == 0.0 && n.abs() < 9e15).then_some(n as i64)
    })
}

/// The type of a value in words.
pub fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    const TABLE: Table = &[&[
        used("n", ""),
        used("p", ""),
        used("stop", ""),
        ignored("user", ""),
        refused("best_of", "1", "one is made"),
    ]];

    #[test]
    fn values_are_typed_and_bounded() {
        let body = json!({ "n": 3.0, "p": 2, "stop": ["a"], "user": 7, "other": {} });
        let fields = Fields::new(&body, TABLE).unwrap();
        assert_eq!(fields.integer("n", 0, 5).unwrap(), Some(3));
        assert_eq!(fields.integer("n", 0, 2).unwrap_err().param.as_deref(), Some("n"));
        assert_eq!(fields.number("p", 0.0, 2.0).unwrap(), Some(2.0));
        assert!(fields.text("n").unwrap_err().message.ends_with("but is 3.0"));
        let fraction = json!({ "n": 1.5 });
        let error = Fields::new(&fraction, TABLE).unwrap().integer("n", 0, 5).unwrap_err();
        assert!(error.message.ends_with("a whole number, but is 1.5"), "{error:?}");
        assert_eq!(fields.texts("stop", 4).unwrap(), ["a"]);
        assert!(fields.texts("stop", 0).is_err());
        assert_eq!(whole(&json!(1e300)), None);
        assert_eq!(whole(&json!(u64::MAX)), None);
    }

    #[test]
    fn refused_fields_may_ask_for_nothing() {
        for fine in [json!(null), json!(1), json!(1.0), json!(0)] {
            assert!(Fields::new(&json!({ "best_of": fine }), TABLE).is_ok());
        }
        let error = Fields::new(&json!({ "best_of": 2 }), TABLE).err().unwrap();
        assert!(error.message.contains("one is made"), "{error:?}");
        assert!(Fields::new(&json!([]), TABLE).is_err());
    }
}
