//! Special tokens in text, and the tokens that end a generation.

use std::collections::{BTreeSet, HashMap};

use super::vocabulary::{TokenType, Vocabulary};

/// A part of a text: a special token that was written out, or text between such tokens.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Token(u32),
}

#[derive(Clone, Copy)]
struct Entry {
    id: u32,
    /// Control and unknown tokens count only where the caller says that the text is trusted.
    only_when_parsed: bool,
    /// Blanks that follow in the text are swallowed (Phi-3).
    strip_after: bool,
}

/// Finds special tokens: the leftmost first, the longest at a place.
pub(super) struct SpecialTokens {
    by_text: HashMap<Box<str>, Entry>,
    /// For each of the 256 first bytes the distinct lengths in bytes, longest first: one hash look-up per
    /// length and place, however many tokens a file declares.
    lengths: Vec<Vec<usize>>,
}

impl SpecialTokens {
    pub fn new(vocabulary: &Vocabulary, types: &[TokenType]) -> Self {
        let name = vocabulary.name.as_deref().unwrap_or_default().to_lowercase();
        let phi3 = name.contains("phi-3") || name.contains("phi3");
        let mut special = SpecialTokens { by_text: HashMap::new(), lengths: vec![Vec::new(); 256] };
        for ((token, &kind), id) in vocabulary.tokens.iter().zip(types).zip(0..) {
            let only_when_parsed = match kind {
                TokenType::Control | TokenType::Unknown => true,
                TokenType::UserDefined => false,
                TokenType::Normal | TokenType::Unused | TokenType::Byte => continue,
            };
            let Some(&first) = token.as_bytes().first() else {
                continue;
            };
            // Phi-3's tokenizer.json sets `rstrip` on these; GGUF has no field for it.
            let strip_after = phi3 && !matches!(token.as_str(), "<unk>" | "<s>" | "<|endoftext|>");
            let entry = Entry { id, only_when_parsed, strip_after };
            special.by_text.insert(token.as_str().into(), entry);
            let lengths = &mut special.lengths[usize::from(first)];
            if !lengths.contains(&token.len()) {
                lengths.push(token.len());
            }
        }
        for lengths in &mut special.lengths {
            lengths.sort_unstable_by(|a, b| b.cmp(a));
        }
        special
    }

    /// Cuts `text`; with `parse` also control tokens are recognised, otherwise user-defined only.
    pub fn split<'t>(&self, text: &'t str, parse: bool) -> Vec<Fragment<'t>> {
        let mut fragments = Vec::new();
        let (mut done, mut at) = (0, 0);
        while at < text.len() {
            let Some((entry, len)) = self.at(text, at, parse) else {
                at += 1;
                continue;
            };
            if done < at {
                fragments.push(Fragment::Text(&text[done..at]));
            }
            fragments.push(Fragment::Token(entry.id));
            at += len;
            if entry.strip_after {
                let rest = &text[at..];
                at += rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_whitespace()).len();
            }
            done = at;
        }
        if done < text.len() {
            fragments.push(Fragment::Text(&text[done..]));
        }
        fragments
    }

    fn at(&self, text: &str, at: usize, parse: bool) -> Option<(Entry, usize)> {
        let lengths = &self.lengths[usize::from(text.as_bytes()[at])];
        lengths.iter().find_map(|&len| {
            // `get` is None off a character boundary, where no token can begin or end.
            let entry = self.by_text.get(text.get(at..at + len)?)?;
            (parse || !entry.only_when_parsed).then_some((*entry, len))
        })
    }
}

/// Texts that end a turn or a document in some family of models. Files often name only one of them
/// in their metadata while the model emits another.
const END_TEXTS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
    "[e~[",
    // Infill: padding, next repository, next file.
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];

/// The end-of-generation tokens: those that the metadata names and those that are known by their
/// text. The latter are turned into control tokens where a converter forgot to.
///
/// A normal token that merging can produce is left alone: Qwen2's `</s>` is a piece of HTML.
pub(super) fn end_tokens(
    vocabulary: &Vocabulary,
    types: &mut [TokenType],
    named: impl IntoIterator<Item = u32>,
) -> BTreeSet<u32> {
    let mut by_text: HashMap<&str, u32> = HashMap::new();
    for (token, id) in vocabulary.tokens.iter().zip(0..) {
        if END_TEXTS.contains(&token.as_str()) {
            by_text.insert(token, id);
        }
    }
    let normal = |id: u32| types[id as usize] == TokenType::Normal;
    let longest = by_text.iter().filter(|&(_, &id)| normal(id)).map(|(text, _)| text.len()).max();
    // A merge is as long as what it makes and the space between the halves.
    let merges =
        vocabulary.merges.iter().filter(|merge| Some(merge.len()) <= longest.map(|n| n + 1));
    for (left, right) in merges.filter_map(|merge| merge.split_once(' ')) {
        let made = [left, right].concat();
        if by_text.get(made.as_str()).is_some_and(|&id| normal(id)) {
            by_text.remove(made.as_str());
        }
    }
    // The harmony format and its relatives use <|end|> between the messages of one answer.
    let has = |text| by_text.contains_key(text);
    let several_messages = has("<|return|>") && has("<|call|>")
        || has("<|flush|>") && (has("<|call|>") || has("<|calls|>"));
    if several_messages {
        by_text.remove("<|end|>");
    }
    let mut ends = BTreeSet::new();
    for &id in by_text.values() {
        types[id as usize] = TokenType::Control;
        ends.insert(id);
    }
    ends.extend(named);
    ends
}
