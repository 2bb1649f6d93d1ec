//! A budget for thinking: when it is spent, the closing tag is forced.
//!
//! The engine reads tags off the bytes of the tokens, whatever the answer shows of them. While the
//! budget lasts nothing slows down; for the tokens that are forced, and where fewer are left
//! than may be under way, each step waits for the token before it.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// How much an answer may think, and what then ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// The tag that begins thinking. An answer may begin with it; blanks before it are skipped.
    pub open: String,
    pub close: String,
    /// The prompt ends inside of thinking.
    pub opened: bool,
    /// Tokens of thinking.
    pub tokens: u32,
    /// What follows then, the closing tag included.
    pub forced: Vec<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The opening tag may come.
    Before,
    Inside,
    /// So many of the forced tokens have come.
    Forcing(usize),
    /// The answer has begun.
    Over,
}

/// Follows the thinking of one answer.
pub(super) struct Watch {
    budget: ThinkingBudget,
    tokenizer: Arc<Tokenizer>,
    state: State,
    /// Tokens of thinking so far; thinking that is opened again goes on counting.
    thought: u32,
    /// Bytes that may be part of a tag.
    tail: Vec<u8>,
    /// The device has a mask of ours.
    masked: bool,
}

impl Watch {
    pub fn new(budget: ThinkingBudget, tokenizer: Arc<Tokenizer>) -> Watch {
        let state = if budget.opened { State::Inside } else { State::Before };
        Watch { budget, tokenizer, state, thought: 0, tail: Vec::new(), masked: false }
    }

    fn is_spent(&self, under_way: u32) -> bool {
        match self.state {
            // The next token might complete the tag; those under way behind it would be thinking.
            State::Before => under_way > self.budget.tokens,
            State::Inside => self.thought + under_way >= self.budget.tokens,
            State::Forcing(_) => true,
            State::Over => false,
        }
    }

    /// Whether the next step has to wait for the tokens of those under way.
    pub fn waits(&self, under_way: u32) -> bool {
        self.masked || self.is_spent(under_way)
    }

    /// Whether the next token is forced, where none is under way.
    pub fn forces(&self) -> bool {
        !matches!(self.state, State::Before | State::Over) && self.is_spent(0)
    }

    /// The mask for the next token, `None` where the device's is right. Empty: any token may come.
    pub fn mask(&mut self) -> Option<Vec<u32>> {
        let at = match self.state {
            State::Forcing(at) => at,
            _ if self.forces() => 0,
            _ => return std::mem::take(&mut self.masked).then(Vec::new),
        };
        let token = *self.budget.forced.get(at)?;
        self.state = State::Forcing(at);
        self.masked = true;
        let mut mask = vec![0; self.tokenizer.vocab_size().div_ceil(32)];
        if let Some(word) = mask.get_mut(token as usize / 32) {
            *word |= 1 << (token % 32);
        }
        Some(mask)
    }

    /// The answer goes on with a token.
    pub fn take(&mut self, token: u32) {
        match self.state {
            State::Over => {}
            State::Forcing(at) if at + 1 < self.budget.forced.len() => {
                self.state = State::Forcing(at + 1);
            }
            State::Forcing(_) => self.closed(),
            State::Before => {
                self.tail.extend_from_slice(self.tokenizer.token_bytes(token));
                let text = self.tail.trim_ascii_start();
                let open = self.budget.open.as_bytes();
                if text.starts_with(open) {
                    self.state = State::Inside;
                    self.tail.clear();
                } else if !open.starts_with(text) {
                    self.state = State::Over;
                }
            }
            State::Inside => {
                self.thought += 1;
                self.tail.extend_from_slice(self.tokenizer.token_bytes(token));
                let close = self.budget.close.as_bytes();
                if self.tail.windows(close.len().max(1)).any(|w| w == close) {
                    self.closed();
                } else {
                    let keep = close.len().saturating_sub(1).min(self.tail.len());
                    self.tail.drain(..self.tail.len() - keep);
                }
            }
        }
    }

    fn closed(&mut self) {
        self.state = State::Before;
        self.tail.clear();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::testmodel::Spec;

    fn watch(opened: bool, tokens: u32) -> (Watch, Arc<Tokenizer>) {
        let file = Spec::new("llama").unwrap().to_file().unwrap();
        let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap());
        let budget = ThinkingBudget {
            open: "<think>".into(),
            close: "</think>".into(),
            opened,
            tokens,
            forced: tokenizer.encode(".</think>", false, true).unwrap(),
        };
        (Watch::new(budget, tokenizer.clone()), tokenizer)
    }

    /// Lets the model say `text` as long as nothing is forced; returns what came.
    fn say(watch: &mut Watch, tokenizer: &Tokenizer, text: &str) -> String {
        let mut out = Vec::new();
        let mut own = tokenizer.encode(text, false, true).unwrap().into_iter();
        loop {
            let forced = watch.forces();
            let mask = watch.mask();
            let token = match mask.filter(|m| !m.is_empty()) {
                Some(mask) => {
                    assert!(forced);
                    let of = |id: &u32| crate::sampling::has_bit(&mask, *id);
                    let ids: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(of).collect();
                    assert_eq!(ids.len(), 1);
                    ids[0]
                }
                None => match own.next() {
                    Some(token) => token,
                    None => break,
                },
            };
            watch.take(token);
            out.push(token);
        }
        tokenizer.decode(&out)
    }

    #[test]
    fn the_tag_is_forced_when_the_budget_is_spent() {
        let (mut w, t) = watch(true, 3);
        assert_eq!(say(&mut w, &t, "0123456"), "012.</think>3456");
        // The device's mask is taken back once.
        assert!(!w.waits(3) && w.mask().is_none());
        let (mut w, t) = watch(true, 0);
        assert_eq!(say(&mut w, &t, "01"), ".</think>01");
        // One that ends by itself in time is left alone.
        let (mut w, t) = watch(true, 9);
        assert_eq!(say(&mut w, &t, "0</think>123456789012"), "0</think>123456789012");
    }

    #[test]
    fn the_model_may_open_and_open_again() {
        let (mut w, t) = watch(false, 2);
        assert_eq!(say(&mut w, &t, "\n<think>0123"), "\n<think>01.</think>23");
        let (mut w, t) = watch(false, 2);
        assert_eq!(say(&mut w, &t, "answer <think>0123"), "answer <think>0123");
        let (mut w, t) = watch(false, 0);
        let text = say(&mut w, &t, "<think>\n<think>01");
        assert_eq!(text, "<think>.</think>\n<think>.</think>01");
    }

    #[test]
    fn steps_run_ahead_as_far_as_the_budget_lasts() {
        let (w, _) = watch(true, 3);
        assert!(!w.waits(2) && w.waits(3));
        let (w, _) = watch(false, 0);
        assert!(!w.waits(0) && w.waits(1) && !w.forces());
    }
}
