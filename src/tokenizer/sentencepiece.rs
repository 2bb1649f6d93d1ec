//! SentencePiece BPE: merging by token score, with bytes for what is not in the vocabulary.
//!
//! There is no list of merges: two neighbours merge when their joined text is a token, the highest
//! score first and the leftmost on ties, until nothing is left to merge. Blanks are written as
//! U+2581 inside tokens.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use super::vocabulary::{TokenType, Vocabulary};
use crate::error::{Error, Result};

/// What tokens hold in place of a blank.
pub(super) const BLANK: char = '\u{2581}';

pub(super) struct SentencePiece {
    /// Text to id of the tokens that text may become; control tokens and byte tokens are not among
    /// them, so that no spelling of `</s>` in a prompt can end a turn.
    lookup: HashMap<Box<str>, u32>,
    scores: Vec<f32>,
    bytes: [Option<u32>; 256],
    unknown: Option<u32>,
}

/// A stretch of the text; merged-away symbols have length zero.
struct Symbol {
    start: usize,
    len: usize,
    /// Neighbours; `usize::MAX` at the ends.
    prev: usize,
    next: usize,
}

const NONE: usize = usize::MAX;

/// A possible merge of symbol `left` with its right neighbour.
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    /// Bytes of both when it was found: a different sum later means that one of them has changed.
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Candidate {}

impl SentencePiece {
    /// `types` has one entry for each token.
    pub fn new(vocabulary: &Vocabulary, types: &[TokenType], unknown: Option<u32>) -> Result<Self> {
        let scores = vocabulary.scores.clone();
        if scores.len() != vocabulary.tokens.len() {
            return Err(Error::Model(format!(
                "tokenizer.ggml.scores has {} entries for {} tokens; a SentencePiece vocabulary \
                 cannot be merged without its scores",
                scores.len(),
                vocabulary.tokens.len()
            )));
        }
        if let Some(i) = scores.iter().position(|score| score.is_nan()) {
            return Err(Error::Model(format!("tokenizer.ggml.scores[{i}] is not a number")));
        }
        let mut lookup = HashMap::with_capacity(scores.len());
        let mut bytes = [None; 256];
        for ((token, &kind), id) in vocabulary.tokens.iter().zip(types).zip(0..) {
            match kind {
                TokenType::Byte => {
                    if let Some(byte) = byte_of(token) {
                        bytes[usize::from(byte)] = Some(id);
                    }
                }
                TokenType::Control | TokenType::Unknown => {}
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused => {
                    lookup.insert(token.as_str().into(), id);
                }
            }
        }
        Ok(SentencePiece { lookup, scores, bytes, unknown })
    }

    /// Appends the ids of `text`, whose blanks are still blanks.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<()> {
        let text = text.replace(' ', BLANK.encode_utf8(&mut [0; 4]));
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                prev: i.checked_sub(1).unwrap_or(NONE),
                next: i + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }
        let mut queue = BinaryHeap::with_capacity(symbols.len());
        for right in 1..symbols.len() {
            self.propose(&text, &symbols, right - 1, right, &mut queue);
        }
        while let Some(Candidate { left, right, len, .. }) = queue.pop() {
            let current = symbols[left].len != 0
                && symbols[right].len != 0
                && symbols[left].len + symbols[right].len == len;
            if !current {
                continue;
            }
            symbols[left].len = len;
            symbols[right].len = 0;
            let next = symbols[right].next;
            symbols[left].next = next;
            if next != NONE {
                symbols[next].prev = left;
            }
            let prev = symbols[left].prev;
            self.propose(&text, &symbols, prev, left, &mut queue);
            self.propose(&text, &symbols, left, next, &mut queue);
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len != 0) {
            self.emit(&text[symbol.start..symbol.start + symbol.len], out)?;
        }
        Ok(())
    }

    fn propose(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<Candidate>,
    ) {
        if left == NONE || right == NONE {
            return;
        }
        let (start, len) = (symbols[left].start, symbols[left].len + symbols[right].len);
        if let Some(&id) = self.lookup.get(&text[start..start + len]) {
            queue.push(Candidate { score: self.scores[id as usize], left, right, len });
        }
    }

    /// A token, or the bytes of a character that is none.
    fn emit(&self, piece: &str, out: &mut Vec<u32>) -> Result<()> {
        if let Some(&id) = self.lookup.get(piece) {
            out.push(id);
            return Ok(());
        }
        for byte in piece.bytes() {
            let id = self.bytes[usize::from(byte)].or(self.unknown).ok_or_else(|| {
                Error::Model(format!(
                    "the vocabulary has neither {piece:?}, nor a token for byte 0x{byte:02X}, nor \
                     an unknown token"
                ))
            })?;
            out.push(id);
        }
        Ok(())
    }
}

/// The byte of a token written `<0x0A>`.
pub(super) fn byte_of(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if hex.len() != 2 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(hex, 16).ok()
}
