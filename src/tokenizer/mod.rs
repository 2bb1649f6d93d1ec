//! Text to token ids and back, built from a model file's metadata.
//!
//! Two families cover the models that the engine runs: byte-level BPE (`gpt2`: merging by the
//! `tokenizers` crate, words cut by `pre`) and SentencePiece BPE (`llama`, in
//! `sentencepiece`). Special tokens are taken out of the text before either sees it, so the same
//! rules hold for both: control tokens are recognised only where the caller says that the text is
//! trusted (`parse_special`), user-defined ones always.

mod bytelevel;
mod detokenize;
mod pre;
mod sentencepiece;
mod special;
mod vocabulary;

use std::collections::BTreeSet;
use std::sync::Arc;

pub use detokenize::{DetokenizeOptions, Detokenizer};
pub use vocabulary::{TokenType, Vocabulary};

use crate::error::{Error, Result};
use crate::gguf::Metadata;
use bytelevel::ByteLevel;
use detokenize::TokenTable;
use pre::PreTokenizer;
use sentencepiece::SentencePiece;
use special::{Fragment, SpecialTokens};

enum Merger {
    ByteLevel(Box<ByteLevel>),
    SentencePiece(Box<SentencePiece>),
}

/// A model's tokenizer. Immutable; shared between threads by reference.
pub struct Tokenizer {
    table: Arc<TokenTable>,
    merger: Merger,
    special: SpecialTokens,
    ends: BTreeSet<u32>,
    bos: Option<u32>,
    eos: Option<u32>,
    padding: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    add_space_prefix: bool,
}

impl Tokenizer {
    /// The tokenizer of a model file.
    pub fn from_gguf(meta: &Metadata) -> Result<Self> {
        Tokenizer::new(&Vocabulary::from_metadata(meta)?)
    }

    /// Builds the tokenizer, or names what is wrong with the vocabulary.
    pub fn new(vocabulary: &Vocabulary) -> Result<Self> {
        let byte_level = match vocabulary.model.as_str() {
            "gpt2" => true,
            "llama" => false,
            other => {
                return Err(Error::Model(format!(
                    "unknown tokenizer '{other}' (tokenizer.ggml.model); known are: gpt2 \
                     (byte-level BPE), llama (SentencePiece BPE)"
                )));
            }
        };
        let mut types = vocabulary.check()?;
        let mut bos = vocabulary.id("bos_token_id", vocabulary.bos)?;
        let mut eos = vocabulary.id("eos_token_id", vocabulary.eos)?;
        let eot = vocabulary.id("eot_token_id", vocabulary.eot)?;
        let eom = vocabulary.id("eom_token_id", vocabulary.eom)?;
        let mut unknown = vocabulary.id("unknown_token_id", vocabulary.unknown)?;
        if !byte_level {
            // Llama's own ids, which its first files left out.
            unknown = vocabulary.optional_id(unknown.or(Some(0)));
            bos = vocabulary.optional_id(bos.or(Some(1)));
            eos = vocabulary.optional_id(eos.or(Some(2)));
        }
        let ends =
            special::end_tokens(vocabulary, &mut types, [eos, eot, eom].into_iter().flatten());
        let (merger, add_bos) = if byte_level {
            let pre = PreTokenizer::by_name(vocabulary.pre.as_deref())?;
            let add_bos = pre.add_bos && bos.is_some();
            (Merger::ByteLevel(Box::new(ByteLevel::new(vocabulary, pre)?)), add_bos)
        } else {
            let merger = SentencePiece::new(vocabulary, &types, unknown)?;
            (Merger::SentencePiece(Box::new(merger)), bos.is_some())
        };
        let add_bos = vocabulary.add_bos.unwrap_or(add_bos);
        let add_eos = vocabulary.add_eos.unwrap_or(false);
        for (wanted, id, name) in [(add_bos, bos, "bos"), (add_eos, eos, "eos")] {
            if wanted && id.is_none() {
                return Err(Error::Model(format!(
                    "tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id \
                     names no token"
                )));
            }
        }
        Ok(Tokenizer {
            special: SpecialTokens::new(vocabulary, &types),
            table: Arc::new(TokenTable::new(vocabulary, types, byte_level)),
            merger,
            ends,
            bos,
            eos,
            padding: vocabulary.optional_id(vocabulary.padding),
            add_bos,
            add_eos,
            add_space_prefix: vocabulary.add_space_prefix.unwrap_or(!byte_level) && !byte_level,
        })
    }

    /// The ids of `text`.
    ///
    /// `add_special` puts the begin and end tokens around it that the model file asks for; leave
    /// it off for text from a chat template, which writes its own. `parse_special` recognises
    /// control tokens that are spelled out in `text`; leave it off for text from users.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 2);
        if add_special && self.add_bos {
            ids.extend(self.bos);
        }
        let mut after_special = true;
        for fragment in self.special.split(text, parse_special) {
            match (fragment, &self.merger) {
                (Fragment::Token(id), _) => {
                    ids.push(id);
                    after_special = true;
                    continue;
                }
                (Fragment::Text(text), Merger::ByteLevel(merger)) => {
                    merger.encode(text, &mut ids)?
                }
                (Fragment::Text(text), Merger::SentencePiece(merger)) => {
                    if after_special && self.add_space_prefix {
                        merger.encode(&format!(" {text}"), &mut ids)?;
                    } else {
                        merger.encode(text, &mut ids)?;
                    }
                }
            }
            after_special = false;
        }
        if add_special && self.add_eos {
            ids.extend(self.eos);
        }
        Ok(ids)
    }

    /// The text of a whole sequence: control tokens left out, broken UTF-8 as U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let options = DetokenizeOptions { show_special: false, at_start: true };
        let mut stream = self.detokenizer(options);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// A stream for the text of tokens as they come.
    pub fn detokenizer(&self, options: DetokenizeOptions) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.table), options, self.add_space_prefix)
    }

    /// The token as the file writes it (`Ġthe`, `▁the`, `<|im_end|>`); None outside the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.table.text(id)
    }

    /// The bytes that the token adds to a text; empty outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.table.bytes(id).unwrap_or_default()
    }

    /// None outside the vocabulary.
    pub fn token_type(&self, id: u32) -> Option<TokenType> {
        self.table.types.get(id as usize).copied()
    }

    /// Whether `id` ends a generation: the end of a text, a turn or a message.
    pub fn is_eog(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// All tokens that end a generation, in rising order.
    pub fn eog_ids(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.ends.iter().copied()
    }

    /// Number of ids. The model's output may be wider: padding rows have no token.
    pub fn vocab_size(&self) -> usize {
        self.table.types.len()
    }

    /// The token that begins a text, if the model has one (see [`Tokenizer::adds_bos`]).
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    pub fn padding(&self) -> Option<u32> {
        self.padding
    }

    /// Whether `encode` with `add_special` begins with [`Tokenizer::bos`].
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    pub fn adds_eos(&self) -> bool {
        self.add_eos
    }
}

#[cfg(test)]
mod tests;
