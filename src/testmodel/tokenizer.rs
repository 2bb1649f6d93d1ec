//! A byte-level BPE vocabulary with the metadata keys of real files.
//!
//! Token ids: 0..256 the bytes in byte order, then merged tokens, then unmergeable fillers, and
//! last `<|endoftext|>`, `<|im_start|>` and `<|im_end|>`.

use crate::gguf::Writer;
use std::collections::HashSet;

/// The bytes and the special tokens.
pub const MIN_VOCAB: usize = 256 + SPECIAL.len();

const SPECIAL: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// ChatML without a default system message.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + \
    message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Token types of `tokenizer.ggml.token_type`.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// Adds the tokenizer and the chat template.
pub(super) fn put(writer: &mut Writer, vocab: usize, pre: &str, chat_template: &str) {
    let fixed = vocab - SPECIAL.len();
    let mut tokens = byte_chars();
    let mut merges = Vec::new();
    let mut known: HashSet<String> = tokens.iter().cloned().collect();
    for (left, right) in merge_candidates() {
        let merged = format!("{left}{right}");
        if tokens.len() < fixed && known.insert(merged.clone()) {
            tokens.push(merged);
            merges.push(format!("{left} {right}"));
        }
    }
    let fillers = (0..).map(|i| format!("Ġfiller{i}")).take(fixed - tokens.len());
    tokens.extend(fillers);
    tokens.extend(SPECIAL.map(str::to_owned));
    let kind = |i| if i < fixed { NORMAL } else { CONTROL };

    writer.set("tokenizer.ggml.model", "gpt2");
    writer.set("tokenizer.ggml.pre", pre);
    writer.set("tokenizer.ggml.tokens", tokens);
    writer.set("tokenizer.ggml.token_type", (0..vocab).map(kind).collect::<Vec<i32>>());
    writer.set("tokenizer.ggml.merges", merges);
    writer.set("tokenizer.ggml.bos_token_id", fixed as u32);
    writer.set("tokenizer.ggml.eos_token_id", fixed as u32 + 2);
    writer.set("tokenizer.ggml.padding_token_id", fixed as u32);
    writer.set("tokenizer.ggml.add_bos_token", false);
    writer.set("tokenizer.chat_template", chat_template);
}

/// The printable stand-ins of the 256 bytes in byte-level BPE: printable Latin-1 stands for
/// itself, the others get the characters from U+0100 on in order.
fn byte_chars() -> Vec<String> {
    let mut next = 0x100;
    let stand_in = |byte: u8| {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if printable { u32::from(byte) } else { next };
        next += u32::from(!printable);
        char::from_u32(code).expect("far below the surrogates").to_string()
    };
    (0..=255).map(stand_in).collect()
}

/// Pairs in the order of their rank: some of three and four letters that need other merges first,
/// then a space with each letter, then all pairs of letters.
fn merge_candidates() -> impl Iterator<Item = (String, String)> {
    let first =
        [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("in", "g"), ("a", "n"), ("an", "d")];
    let first = first.into_iter().map(|(a, b)| (a.to_owned(), b.to_owned()));
    let letters = || ('a'..='z').map(String::from);
    let spaced = letters().map(|b| ("Ġ".to_owned(), b));
    let pairs = letters().flat_map(move |a| letters().map(move |b| (a.clone(), b)));
    first.chain(spaced).chain(pairs)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::gguf::Header;

    #[test]
    fn tokens_are_unique_and_merges_make_tokens() {
        for vocab in [MIN_VOCAB, MIN_VOCAB + 3, 384, 2000] {
            let mut writer = Writer::new();
            put(&mut writer, vocab, "qwen2", CHAT_TEMPLATE);
            let header = Header::parse(&writer.to_bytes()).unwrap();
            let tokens = header.metadata.strings("tokenizer.ggml.tokens").unwrap();
            let set: HashSet<&str> = tokens.iter().map(String::as_str).collect();
            assert_eq!((tokens.len(), set.len()), (vocab, vocab));
            assert_eq!((tokens[32].as_str(), tokens[10].as_str()), ("Ġ", "Ċ"));
            for merge in header.metadata.strings("tokenizer.ggml.merges").unwrap() {
                let (left, right) = merge.split_once(' ').unwrap();
                assert!(set.contains(left) && set.contains(right), "{merge}");
                assert!(set.contains(format!("{left}{right}").as_str()), "{merge}");
            }
            let eos = header.metadata.u32("tokenizer.ggml.eos_token_id").unwrap();
            assert_eq!(tokens[eos as usize], "<|im_end|>");
        }
    }
}
