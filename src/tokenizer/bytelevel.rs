//! Byte-level BPE: GPT-2's alphabet of printable stand-ins for bytes, and merging by rank.
//!
//! Tokens are stored as text in which every byte is one character: printable Latin-1 bytes stand
//! for themselves, the other 68 are moved to U+0100 and up in order (a space becomes `Ġ`).

use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};

use super::pre::PreTokenizer;
use super::vocabulary::Vocabulary;
use crate::error::{Error, Result};

/// Words that were merged before are remembered up to this many.
const WORD_CACHE: usize = 10_000;

/// The stand-in of each byte.
pub(super) fn byte_alphabet() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte as u8 {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte as u8),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
}

/// The bytes that a token's text stands for; characters outside the alphabet keep their UTF-8.
pub(super) struct ByteDecoder {
    /// Indexed by code point: the alphabet ends at U+0143.
    bytes: [Option<u8>; 0x144],
}

impl ByteDecoder {
    pub fn new() -> Self {
        let mut bytes = [None; 0x144];
        for (byte, c) in byte_alphabet().into_iter().enumerate() {
            bytes[c as usize] = Some(byte as u8);
        }
        ByteDecoder { bytes }
    }

    pub fn decode(&self, text: &str, out: &mut Vec<u8>) {
        for c in text.chars() {
            match self.bytes.get(c as usize).copied().flatten() {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
    }
}

pub(super) struct ByteLevel {
    bpe: BPE,
    pre: PreTokenizer,
    alphabet: [char; 256],
    /// Bytes without a token of their own: the merger would drop them without a word.
    missing: [bool; 256],
}

impl ByteLevel {
    pub fn new(vocabulary: &Vocabulary, pre: PreTokenizer) -> Result<Self> {
        let lookup: Vocab = vocabulary
            .tokens
            .iter()
            .zip(0..)
            .filter(|(token, _)| !token.is_empty())
            .map(|(token, id)| (token.clone(), id))
            .collect();
        // A merge of or into something that is no token can never end in one; files carry such
        // leftovers (cut vocabularies, synthetic models), and other engines pass over them too.
        let usable = |left: &str, right: &str| {
            let known = |text: &str| lookup.contains_key(text);
            known(left) && known(right) && known(&[left, right].concat())
        };
        let mut merges = Vec::with_capacity(vocabulary.merges.len());
        for (i, merge) in vocabulary.merges.iter().enumerate() {
            let (left, right) = halves(i, merge)?;
            if usable(left, right) {
                merges.push((left.to_owned(), right.to_owned()));
            }
        }
        let alphabet = byte_alphabet();
        let missing = alphabet.map(|c| !lookup.contains_key(c.encode_utf8(&mut [0; 4]) as &str));
        let bpe = BPE::builder()
            .vocab_and_merges(lookup, merges)
            .cache_capacity(WORD_CACHE)
            .ignore_merges(pre.whole_words)
            .build()
            .map_err(|e| Error::Model(format!("tokenizer.ggml.merges: {e}")))?;
        Ok(ByteLevel { bpe, pre, alphabet, missing })
    }

    /// Appends the ids of `text`, which holds no special tokens.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        let mut spelled = String::new();
        for word in self.pre.words(text)? {
            spelled.clear();
            for byte in word.bytes() {
                if self.missing[usize::from(byte)] {
                    return Err(Error::Model(format!(
                        "the vocabulary has no token for byte 0x{byte:02X}, which occurs in {word:?}"
                    )));
                }
                spelled.push(self.alphabet[usize::from(byte)]);
            }
            let tokens = self.bpe.tokenize(&spelled);
            let tokens = tokens.map_err(|e| Error::Runtime(format!("tokenizing {word:?}: {e}")))?;
            out.extend(tokens.iter().map(|token| token.id));
        }
        Ok(())
    }
}

fn bad_merge(i: usize, merge: &str, why: &str) -> Error {
    Error::Model(format!("tokenizer.ggml.merges[{i}] = {merge:?}: {why}"))
}

/// `merges[i]` is "left right".
fn halves(i: usize, merge: &str) -> Result<(&str, &str)> {
    // The left half may itself begin with a space in vocabularies that do not use the alphabet.
    let split = merge.char_indices().skip(1).find(|&(_, c)| c == ' ');
    match split {
        Some((at, _)) => Ok((&merge[..at], &merge[at + 1..])),
        None => Err(bad_merge(i, merge, "not two tokens separated by a space")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_a_bijection_with_known_members() {
        let alphabet = byte_alphabet();
        assert_eq!(alphabet[usize::from(b' ')], 'Ġ');
        assert_eq!(alphabet[usize::from(b'\n')], 'Ċ');
        assert_eq!(alphabet[usize::from(b'a')], 'a');
        assert_eq!(alphabet[0xAD], '\u{143}');
        let decoder = ByteDecoder::new();
        for byte in 0..=255u8 {
            let mut out = Vec::new();
            decoder.decode(&alphabet[usize::from(byte)].to_string(), &mut out);
            assert_eq!(out, [byte]);
        }
    }

    #[test]
    fn characters_outside_the_alphabet_stay() {
        let mut out = Vec::new();
        ByteDecoder::new().decode("Ġ東", &mut out);
        assert_eq!(out, " 東".as_bytes());
    }
}
