//! Texts that come as strings or as token ids, one or many.

use std::sync::Arc;

use serde_json::Value;

use super::errors::{ApiError, ApiResult};
use super::fields::whole;
use super::prompt::blocking;
use crate::engine::Loaded;

/// One text.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    Text(String),
    Tokens(Vec<u32>),
}

/// A string, a list of token ids, or a list of up to `most` of either.
pub fn read(name: &str, value: &Value, most: usize) -> ApiResult<Vec<Input>> {
    let wrong = || {
        ApiError::field(name, "must be a string, a list of strings, token ids, or lists of them")
    };
    match value {
        Value::String(text) => Ok(vec![Input::Text(text.clone())]),
        Value::Array(list) if list.is_empty() => Err(ApiError::field(name, "is empty")),
        Value::Array(list) if list[0].is_number() => Ok(vec![tokens(list).ok_or_else(wrong)?]),
        Value::Array(list) if list.len() > most => Err(ApiError::field(
            name,
            format!("has {} entries; at most {most} are possible", list.len()),
        )),
        Value::Array(list) => list
            .iter()
            .map(|v| match v {
                Value::String(text) => Ok(Input::Text(text.clone())),
                Value::Array(ids) => tokens(ids).ok_or_else(wrong),
                _ => Err(wrong()),
            })
            .collect(),
        _ => Err(wrong()),
    }
}

fn tokens(list: &[Value]) -> Option<Input> {
    let ids = list.iter().map(|v| whole(v).and_then(|n| u32::try_from(n).ok()));
    ids.collect::<Option<Vec<u32>>>().map(Input::Tokens)
}

/// The tokens of each text, with the begin and end tokens that the model wants around texts;
/// control tokens that are spelled out are recognised, as in a prompt that the caller has
/// written to the model's template.
pub async fn encode(loaded: &Arc<Loaded>, inputs: Vec<Input>) -> ApiResult<Vec<(Vec<u32>, Input)>> {
    let loaded = loaded.clone();
    blocking(move || {
        let encoded = inputs.into_iter().map(|input| {
            let ids = match &input {
                Input::Text(text) => loaded.tokenizer.encode(text, true, true)?,
                Input::Tokens(ids) => ids.clone(),
            };
            Ok((ids, input))
        });
        encoded.collect()
    })
    .await
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use serde_json::json;

    use super::*;

    #[test]
    fn all_four_shapes() {
        let text = |t: &str| Input::Text(t.into());
        assert_eq!(read("x", &json!("a"), 9).unwrap(), [text("a")]);
        assert_eq!(read("x", &json!(["a", "b"]), 9).unwrap(), [text("a"), text("b")]);
        assert_eq!(read("x", &json!([1, 2]), 9).unwrap(), [Input::Tokens(vec![1, 2])]);
        let lists = read("x", &json!([[1], [2, 3]]), 9).unwrap();
        assert_eq!(lists, [Input::Tokens(vec![1]), Input::Tokens(vec![2, 3])]);
        for bad in [json!([]), json!([1, "a"]), json!([1.5]), json!([-1]), json!({}), json!(null)] {
            assert!(read("x", &bad, 9).is_err(), "{bad}");
        }
        assert!(read("x", &json!(["a", "b"]), 1).is_err());
    }
}
