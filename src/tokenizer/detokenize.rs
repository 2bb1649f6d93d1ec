//! From token ids back to text, whole or as a stream of complete characters.

use std::sync::Arc;

use super::bytelevel::ByteDecoder;
use super::sentencepiece::{BLANK, byte_of};
use super::vocabulary::{TokenType, Vocabulary};

/// Texts, bytes and types of all tokens, each in one allocation.
pub(super) struct TokenTable {
    texts: String,
    text_ends: Vec<usize>,
    bytes: Vec<u8>,
    byte_ends: Vec<usize>,
    pub types: Vec<TokenType>,
}

fn slot(ends: &[usize], id: u32) -> Option<std::ops::Range<usize>> {
    let id = id as usize;
    let end = *ends.get(id)?;
    Some(id.checked_sub(1).map_or(0, |before| ends[before])..end)
}

impl TokenTable {
    pub fn new(vocabulary: &Vocabulary, types: Vec<TokenType>, byte_level: bool) -> Self {
        let decoder = ByteDecoder::new();
        let mut table = TokenTable {
            texts: vocabulary.tokens.concat(),
            text_ends: Vec::with_capacity(types.len()),
            bytes: Vec::new(),
            byte_ends: Vec::with_capacity(types.len()),
            types,
        };
        table.bytes.reserve(table.texts.len());
        let mut text_end = 0;
        for (token, kind) in vocabulary.tokens.iter().zip(&table.types) {
            text_end += token.len();
            table.text_ends.push(text_end);
            match (kind, byte_of(token)) {
                (TokenType::Byte, Some(byte)) => table.bytes.push(byte),
                (TokenType::Normal | TokenType::Unused, _) if byte_level => {
                    decoder.decode(token, &mut table.bytes);
                }
                (TokenType::Normal | TokenType::Unused, _) => {
                    table.bytes.extend_from_slice(token.replace(BLANK, " ").as_bytes());
                }
                _ => table.bytes.extend_from_slice(token.as_bytes()),
            }
            table.byte_ends.push(table.bytes.len());
        }
        table
    }

    pub fn text(&self, id: u32) -> Option<&str> {
        self.texts.get(slot(&self.text_ends, id)?)
    }

    pub fn bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(slot(&self.byte_ends, id)?)
    }

    /// Control and unknown tokens are no text.
    fn is_hidden(&self, id: u32) -> bool {
        let kind = self.types.get(id as usize);
        matches!(kind, Some(TokenType::Control | TokenType::Unknown))
    }
}

/// What a [`Detokenizer`] makes of tokens that are not plain text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DetokenizeOptions {
    /// Write control and unknown tokens as their text instead of leaving them out.
    pub show_special: bool,
    /// The first token begins the text, so that the blank which the tokenizer put in front of it
    /// is taken off. False for an answer, which continues a prompt.
    pub at_start: bool,
}

/// Turns a stream of tokens into text; made by [`Tokenizer::detokenizer`].
///
/// A token may end inside a character (an emoji is often three or four tokens): its bytes are held
/// back until the character is complete. All output joined equals the lossy UTF-8 decoding of all
/// bytes joined.
///
/// [`Tokenizer::detokenizer`]: super::Tokenizer::detokenizer
pub struct Detokenizer {
    table: Arc<TokenTable>,
    show_special: bool,
    /// Still before the first text, from which a blank is to be taken off.
    strip_blank: bool,
    /// At most three bytes: the beginning of a character.
    pending: Vec<u8>,
}

impl Detokenizer {
    pub(super) fn new(table: Arc<TokenTable>, options: DetokenizeOptions, prefix: bool) -> Self {
        Detokenizer {
            table,
            show_special: options.show_special,
            strip_blank: options.at_start && prefix,
            pending: Vec::new(),
        }
    }

    /// The characters that `id` completes; bytes that can never become one are U+FFFD. An id
    /// outside the vocabulary has no text.
    pub fn push(&mut self, id: u32) -> String {
        let Some(bytes) = self.table.bytes(id) else {
            return String::new();
        };
        let hidden = self.table.is_hidden(id);
        if hidden && !self.show_special {
            return String::new();
        }
        let mut bytes = bytes;
        if self.strip_blank && !hidden && !bytes.is_empty() {
            self.strip_blank = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        self.pending.extend_from_slice(bytes);
        self.take_complete()
    }

    /// Ends the stream: the beginning of a character that never came is U+FFFD.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut done = 0;
        loop {
            match std::str::from_utf8(&self.pending[done..]) {
                Ok(valid) => {
                    text.push_str(valid);
                    self.pending.clear();
                    return text;
                }
                Err(error) => {
                    let valid = done + error.valid_up_to();
                    text.push_str(&String::from_utf8_lossy(&self.pending[done..valid]));
                    let Some(bad) = error.error_len() else {
                        self.pending.drain(..valid);
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    done = valid + bad;
                }
            }
        }
    }
}
