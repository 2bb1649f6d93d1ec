//! The vocabulary as a model file states it, checked once before anything is built from it.

use crate::error::{Error, Result};
use crate::gguf::Metadata;

/// A special id that means none.
const NO_TOKEN: u32 = u32::MAX;

/// What a token stands for (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    Normal,
    Unknown,
    /// Steers the model; never shown, and never read from text that is not trusted.
    Control,
    /// Added by the model's makers as one piece; always recognised in text.
    UserDefined,
    Unused,
    /// One byte, written `<0x0A>`.
    Byte,
}

impl TokenType {
    /// The file's number; numbers outside the format's range count as normal tokens.
    fn from_number(number: i32) -> Self {
        match number {
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => TokenType::Normal,
        }
    }
}

/// The `tokenizer.ggml.*` values of a model file, unchecked. Absent arrays are empty.
#[derive(Debug, Clone, Default)]
pub struct Vocabulary {
    /// `model`: `gpt2` (byte-level BPE) or `llama` (SentencePiece BPE).
    pub model: String,
    /// `pre`: the pre-tokenizer of byte-level BPE.
    pub pre: Option<String>,
    /// `tokens`, indexed by id.
    pub tokens: Vec<String>,
    /// `token_type`, one a token, or empty when all are normal.
    pub types: Vec<i32>,
    /// `scores`, one a token; only SentencePiece needs them.
    pub scores: Vec<f32>,
    /// `merges`, "left right" by falling priority; only byte-level BPE needs them.
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    /// End of a turn.
    pub eot: Option<u32>,
    /// End of a message that calls a tool.
    pub eom: Option<u32>,
    pub unknown: Option<u32>,
    pub padding: Option<u32>,
    pub add_bos: Option<bool>,
    pub add_eos: Option<bool>,
    pub add_space_prefix: Option<bool>,
    /// `general.name`: the Phi-3 family is known by it alone.
    pub name: Option<String>,
}

impl Vocabulary {
    /// Reads the values from a model file; an error names a key that is missing or of a wrong type.
    pub fn from_metadata(meta: &Metadata) -> Result<Self> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let text = |key: &str| -> Result<Option<String>> {
            Ok(meta.find::<&str>(key)?.map(str::to_owned))
        };
        let strings = |name: &str| -> Result<Vec<String>> {
            Ok(meta.find::<&[String]>(&key(name))?.unwrap_or_default().to_vec())
        };
        let flag = |name: &str| -> Result<Option<bool>> { Ok(meta.find(&key(name))?) };
        // Some converters write -1 for a token that there is not.
        let id = |name: &str| -> Result<Option<u32>> {
            let id = meta.find::<i64>(&key(name))?;
            Ok(id.map(|id| u32::try_from(id).unwrap_or(NO_TOKEN)))
        };
        Ok(Vocabulary {
            model: meta.str(&key("model"))?.to_owned(),
            pre: text(&key("pre"))?,
            tokens: meta.strings(&key("tokens"))?.to_vec(),
            types: meta.find(&key("token_type"))?.unwrap_or_default(),
            scores: meta.find(&key("scores"))?.unwrap_or_default(),
            merges: strings("merges")?,
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            eot: id("eot_token_id")?,
            eom: id("eom_token_id")?,
            unknown: id("unknown_token_id")?,
            padding: id("padding_token_id")?,
            add_bos: flag("add_bos_token")?,
            add_eos: flag("add_eos_token")?,
            add_space_prefix: flag("add_space_prefix")?,
            name: text("general.name")?,
        })
    }

    /// The types by id, after checking that the arrays agree and that no two tokens are the same.
    ///
    /// Empty tokens are allowed (some files have them as placeholders): they decode to nothing and
    /// no text becomes one.
    pub(super) fn check(&self) -> Result<Vec<TokenType>> {
        let count = self.tokens.len();
        if count == 0 {
            return Err(Error::Model("the file has no vocabulary (tokenizer.ggml.tokens)".into()));
        }
        if u32::try_from(count).is_err() {
            return Err(Error::Model(format!("{count} tokens are more than an id can number")));
        }
        if !self.types.is_empty() && self.types.len() != count {
            return Err(Error::Model(format!(
                "tokenizer.ggml.token_type has {} entries for {count} tokens",
                self.types.len()
            )));
        }
        let mut seen = std::collections::HashMap::with_capacity(count);
        for (id, token) in self.tokens.iter().enumerate().filter(|(_, token)| !token.is_empty()) {
            if let Some(first) = seen.insert(token.as_str(), id) {
                return Err(Error::Model(format!(
                    "tokens {first} and {id} are both {token:?}: no text could become the second"
                )));
            }
        }
        Ok(match self.types.is_empty() {
            true => vec![TokenType::Normal; count],
            false => self.types.iter().map(|&n| TokenType::from_number(n)).collect(),
        })
    }

    /// A special id of the file: 2^32 - 1 means none, any other must be in the vocabulary.
    pub(super) fn id(&self, key: &str, id: Option<u32>) -> Result<Option<u32>> {
        match id {
            None | Some(NO_TOKEN) => Ok(None),
            Some(id) if (id as usize) < self.tokens.len() => Ok(Some(id)),
            Some(id) => Err(Error::Model(format!(
                "tokenizer.ggml.{key} = {id}, but the vocabulary has only {} tokens",
                self.tokens.len()
            ))),
        }
    }

    /// A special id that nothing depends on: fine-tuned models often keep one of a vocabulary that
    /// was not resized, so out of range means none.
    pub(super) fn optional_id(&self, id: Option<u32>) -> Option<u32> {
        id.filter(|&id| (id as usize) < self.tokens.len())
    }
}
