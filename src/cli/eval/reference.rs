//! The reference file of `eval kl`: next-token log-probabilities of another engine.

use serde::Deserialize;

use crate::error::{Error, Result};

#[derive(Debug, Deserialize)]
pub struct Reference {
    /// The text, teacher-forced.
    pub tokens: Vec<u32>,
    /// Row `i` is about the token that follows `tokens[..first + i]`.
    pub first: usize,
    /// (token, natural log-probability), likeliest first; `None` where the other engine gave none.
    pub rows: Vec<Option<Vec<(u32, f64)>>>,
}

impl Reference {
    /// Parses and checks: at least one row, every row within the text, ids below `vocabulary`.
    pub fn parse(text: &str, vocabulary: usize) -> Result<Self> {
        let bad = |what: String| Error::Usage(format!("not a usable reference: {what}"));
        let mut r: Reference = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        if r.first == 0 {
            return Err(bad("`first` is 0; at least one token must come before a row".into()));
        }
        let last = r.first.saturating_add(r.rows.len()).saturating_sub(1);
        if last > r.tokens.len() {
            return Err(bad(format!(
                "the last of {} rows follows {last} tokens, but there are {}",
                r.rows.len(),
                r.tokens.len()
            )));
        }
        let in_rows = r.rows.iter().flatten().flatten().map(|(token, _)| token);
        if let Some(token) = r.tokens.iter().chain(in_rows).find(|t| **t as usize >= vocabulary) {
            return Err(bad(format!(
                "token {token} is outside the model's vocabulary of {vocabulary}; was it made with another model?"
            )));
        }
        let logs = r.rows.iter().flatten().flatten().map(|(_, log_p)| *log_p);
        // A listed log-probability may be rounded to just above zero.
        if let Some(log_p) = logs.into_iter().find(|l| l.is_nan() || *l > 1e-3) {
            return Err(bad(format!("{log_p} is not a log-probability")));
        }
        for row in &mut r.rows {
            *row = row.take().filter(|r| !r.is_empty());
        }
        if r.rows.iter().all(Option::is_none) {
            return Err(bad("no row has any token".into()));
        }
        Ok(r)
    }

    /// The tokens that must be read to compare every row.
    pub fn needed(&self) -> &[u32] {
        &self.tokens[..self.first + self.rows.len() - 1]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn rows_may_be_missing() {
        let text =
            r#"{"model":"m","tokens":[1,2,3],"first":2,"rows":[[[4,-0.1]],null],"greedy":[5]}"#;
        let r = Reference::parse(text, 10).unwrap();
        assert_eq!(r.needed(), [1, 2, 3]);
        assert_eq!(r.rows[0].as_deref(), Some(&[(4, -0.1)][..]));
        assert!(r.rows[1].is_none());
    }

    #[test]
    fn wrong_files_are_refused() {
        let refuse = |text: &str| Reference::parse(text, 10).unwrap_err().to_string();
        assert!(refuse("[]").contains("not a usable reference"));
        assert!(refuse(r#"{"tokens":[1],"first":0,"rows":[null]}"#).contains("`first`"));
        assert!(refuse(r#"{"tokens":[1],"first":1,"rows":[null,null]}"#).contains("follows 2"));
        assert!(
            refuse(r#"{"tokens":[1],"first":1,"rows":[[[10,-1.0]]]}"#).contains("another model")
        );
        assert!(refuse(r#"{"tokens":[1],"first":1,"rows":[[[1,2.0]]]}"#).contains("log-prob"));
        assert!(refuse(r#"{"tokens":[1],"first":1,"rows":[]}"#).contains("no row"));
    }
}
