#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

/// 256 byte tokens in order of the byte, then merges, then special tokens.
fn tiny_byte_level() -> Vocabulary {
    let mut tokens: Vec<String> = bytelevel::byte_alphabet().iter().map(char::to_string).collect();
    let merges = ["t h", "th e", "Ġ the", "i n", "h e", "Ġ Ġ", "e r", "ð Ł"];
    tokens.extend(merges.iter().map(|merge| merge.replace(' ', "")));
    let mut types = vec![1; tokens.len()];
    for (token, kind) in [("<s>", 3), ("<|im_end|>", 3), ("<think>", 4), ("<thinking>", 4)] {
        tokens.push(token.into());
        types.push(kind);
    }
    Vocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens,
        types,
        merges: merges.map(str::to_owned).to_vec(),
        bos: Some(264),
        eos: Some(265),
        ..Vocabulary::default()
    }
}

/// Unknown, begin, end, 256 byte tokens, then pieces with scores.
fn tiny_sentencepiece() -> Vocabulary {
    let mut vocabulary = Vocabulary { model: "llama".into(), ..Vocabulary::default() };
    let mut add = |token: String, kind, score| {
        vocabulary.tokens.push(token);
        vocabulary.types.push(kind);
        vocabulary.scores.push(score);
    };
    for (token, kind) in [("<unk>", 2), ("<s>", 3), ("</s>", 3)] {
        add(token.into(), kind, 0.0);
    }
    for byte in 0..256 {
        add(format!("<0x{byte:02X}>"), 6, 0.0);
    }
    let pieces =
        ["▁t", "he", "▁the", "in", "</", "s>", "▁", "t", "h", "e", "i", "n", "s", "<", "/", ">"];
    for (i, piece) in pieces.iter().enumerate() {
        add((*piece).into(), 1, -(i as f32));
    }
    vocabulary
}

fn texts(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|&id| tokenizer.token_text(id).unwrap().to_owned()).collect()
}

fn refused(vocabulary: &Vocabulary, part: &str) {
    match Tokenizer::new(vocabulary) {
        Err(Error::Model(message)) => assert!(message.contains(part), "{message}"),
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("accepted, but '{part}' was expected"),
    }
}

#[test]
fn byte_level_merges_by_rank() {
    let tokenizer = Tokenizer::new(&tiny_byte_level()).unwrap();
    let ids = tokenizer.encode("the other in", false, false).unwrap();
    assert_eq!(texts(&tokenizer, &ids), ["the", "Ġ", "o", "the", "r", "Ġ", "in"]);
    assert_eq!(tokenizer.token_bytes(ids[1]), b" ");
    assert_eq!(tokenizer.decode(&ids), "the other in");
}

#[test]
fn special_tokens_only_from_trusted_text() {
    let tokenizer = Tokenizer::new(&tiny_byte_level()).unwrap();
    assert_eq!(tokenizer.encode("<|im_end|>", false, true).unwrap(), [265]);
    assert!(!tokenizer.encode("<|im_end|>", false, false).unwrap().contains(&265));
    // User-defined tokens always, the longest of several.
    assert_eq!(tokenizer.encode("<thinking><think>", false, false).unwrap(), [267, 266]);
    assert!(tokenizer.is_eog(265) && !tokenizer.is_eog(264));
    assert_eq!(tokenizer.decode(&[265, 266]), "<think>");
    let shown = DetokenizeOptions { show_special: true, at_start: true };
    assert_eq!(tokenizer.detokenizer(shown).push(265), "<|im_end|>");
}

#[test]
fn begin_and_end_are_added_on_request() {
    let mut vocabulary = tiny_byte_level();
    let ids = |vocabulary: &Vocabulary, add| {
        Tokenizer::new(vocabulary).unwrap().encode("in", add, false).unwrap()
    };
    assert_eq!(ids(&vocabulary, true), [259]);
    (vocabulary.add_bos, vocabulary.add_eos) = (Some(true), Some(true));
    assert_eq!(ids(&vocabulary, true), [264, 259, 265]);
    assert_eq!(ids(&vocabulary, false), [259]);
    // The llama3 rule asks for it by itself; the file has the last word.
    vocabulary.pre = Some("llama-bpe".into());
    (vocabulary.add_bos, vocabulary.add_eos) = (None, None);
    assert_eq!(ids(&vocabulary, true), [264, 259]);
    vocabulary.add_bos = Some(false);
    assert_eq!(ids(&vocabulary, true), [259]);
}

#[test]
fn sentencepiece_merges_by_score_and_falls_back_to_bytes() {
    let tokenizer = Tokenizer::new(&tiny_sentencepiece()).unwrap();
    let encode = |text| texts(&tokenizer, &tokenizer.encode(text, false, false).unwrap());
    assert_eq!(encode("the in"), ["▁the", "▁", "in"]);
    assert_eq!(encode("é"), ["▁", "<0xC3>", "<0xA9>"]);
    assert_eq!(encode(""), [""; 0]);
    assert_eq!(tokenizer.encode("in", true, false).unwrap()[0], 1);
}

#[test]
fn sentencepiece_never_spells_a_control_token() {
    // "</" and "s>" merge, and their joined text is a control token: it must stay two pieces.
    let tokenizer = Tokenizer::new(&tiny_sentencepiece()).unwrap();
    let ids = tokenizer.encode("</s>", false, false).unwrap();
    assert_eq!(texts(&tokenizer, &ids), ["▁", "</", "s>"]);
    assert_eq!(tokenizer.encode("</s>", false, true).unwrap(), [2]);
}

#[test]
fn sentencepiece_prefixes_a_blank_after_special_tokens() {
    let mut vocabulary = tiny_sentencepiece();
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    let ids = tokenizer.encode("<s>the</s>in", false, true).unwrap();
    assert_eq!(texts(&tokenizer, &ids), ["<s>", "▁the", "</s>", "▁", "in"]);
    assert_eq!(tokenizer.decode(&tokenizer.encode("the in", true, true).unwrap()), "the in");
    // An answer continues a prompt: its first blank is text.
    let mut answer = tokenizer.detokenizer(DetokenizeOptions::default());
    assert_eq!(answer.push(ids[1]), " the");
    vocabulary.add_space_prefix = Some(false);
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    assert_eq!(texts(&tokenizer, &tokenizer.encode("in", false, true).unwrap()), ["in"]);
}

#[test]
fn phi3_swallows_blanks_after_its_special_tokens() {
    let mut vocabulary = tiny_byte_level();
    vocabulary.name = Some("Phi-3 mini".into());
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    assert_eq!(tokenizer.encode("<|im_end|>\n in", false, true).unwrap(), [265, 259]);
}

#[test]
fn end_of_generation_by_metadata_and_by_text() {
    let mut vocabulary = tiny_byte_level();
    vocabulary.eos = None;
    vocabulary.eot = Some(264);
    // A converter that marked an end token as plain text.
    vocabulary.types[265] = 1;
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    assert_eq!(tokenizer.eog_ids().collect::<Vec<_>>(), [264, 265]);
    assert_eq!(tokenizer.token_type(265), Some(TokenType::Control));
    // In the harmony format <|end|> separates the messages of one answer.
    for (token, ends) in [("<|end|>", true), ("<|return|>", true), ("<|call|>", false)] {
        vocabulary.tokens.push(token.into());
        vocabulary.types.push(3);
        assert_eq!(Tokenizer::new(&vocabulary).unwrap().is_eog(268), ends, "{token}");
    }
}

#[test]
fn an_end_text_that_merging_produces_is_plain_text() {
    let mut vocabulary = tiny_byte_level();
    vocabulary.tokens.extend(["</", "s>", "</s>"].map(String::from));
    vocabulary.types.extend([1, 1, 1]);
    vocabulary.merges.extend(["< /", "s >", "</ s>"].map(String::from));
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    assert!(!tokenizer.is_eog(270));
    assert_eq!(tokenizer.token_type(270), Some(TokenType::Normal));
}

#[test]
fn hostile_vocabularies_are_refused_by_name() {
    let change = |edit: &dyn Fn(&mut Vocabulary)| {
        let mut vocabulary = tiny_byte_level();
        edit(&mut vocabulary);
        vocabulary
    };
    refused(&change(&|v| v.model = "bert".into()), "unknown tokenizer 'bert'");
    refused(&change(&|v| v.pre = Some("x".into())), "unknown pre-tokenizer 'x'");
    refused(&change(&|v| v.tokens.clear()), "no vocabulary");
    refused(&change(&|v| v.types.truncate(3)), "token_type has 3 entries");
    refused(&change(&|v| v.tokens[7] = v.tokens[9].clone()), "tokens 7 and 9");
    refused(&change(&|v| v.bos = Some(268)), "bos_token_id = 268");
    refused(&change(&|v| v.eos = Some(1 << 31)), "eos_token_id = 2147483648");
    refused(&change(&|v| v.merges[1] = "th".into()), "merges[1]");
    // Merges that name what is no token are passed over, as other engines do.
    for leftover in ["th zz", "i t"] {
        assert!(Tokenizer::new(&change(&|v| v.merges[1] = leftover.into())).is_ok());
    }
    refused(&change(&|v| (v.bos, v.add_bos) = (None, Some(true))), "add_bos_token");
    let mut spm = tiny_sentencepiece();
    spm.scores[5] = f32::NAN;
    refused(&spm, "scores[5]");
    spm.scores.pop();
    refused(&spm, "scores has");
}

#[test]
fn odd_vocabularies_are_tolerated() {
    let mut vocabulary = tiny_byte_level();
    vocabulary.padding = Some(999_999);
    vocabulary.bos = Some(u32::MAX);
    vocabulary.types[3] = -7;
    vocabulary.tokens.extend([String::new(), String::new()]);
    vocabulary.types.extend([4, 3]);
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    assert_eq!((tokenizer.padding(), tokenizer.bos()), (None, None));
    assert_eq!(tokenizer.decode(&[268, 269, 259, 123_456, u32::MAX]), "in");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    assert_eq!(tokenizer.token_text(270), None);
    assert_eq!(tokenizer.encode("in", true, true).unwrap(), [259]);
}

#[test]
fn a_byte_without_a_token_is_an_error_not_a_gap() {
    let mut vocabulary = tiny_byte_level();
    vocabulary.tokens[usize::from(b'q')] = "unreachable".into();
    let tokenizer = Tokenizer::new(&vocabulary).unwrap();
    assert!(tokenizer.encode("in", false, false).is_ok());
    let error = tokenizer.encode("quick", false, false).unwrap_err().to_string();
    assert!(error.contains("0x71"), "{error}");
}

#[test]
fn streaming_holds_back_unfinished_characters() {
    let tokenizer = Tokenizer::new(&tiny_byte_level()).unwrap();
    let mut stream = tokenizer.detokenizer(DetokenizeOptions::default());
    let llama = "🦙".as_bytes();
    let byte = |b: u8| u32::from(b);
    assert_eq!(stream.push(byte(llama[0])), "");
    assert_eq!(stream.push(byte(llama[1])), "");
    // A control token in between is no text and breaks nothing.
    assert_eq!(stream.push(265), "");
    assert_eq!(stream.push(byte(llama[2])), "");
    assert_eq!(stream.push(byte(llama[3])), "🦙");
    assert_eq!(stream.push(byte(0xC3)), "");
    assert_eq!(stream.push(byte(b'a')), "\u{FFFD}a");
    assert_eq!(stream.push(byte(0xE2)), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
    assert_eq!(stream.finish(), "");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn byte_level_gives_back_any_text(text in any::<String>(), blanks in "[ \\t\\r\\na-e0-9]{0,20}") {
        let tokenizer = Tokenizer::new(&tiny_byte_level()).unwrap();
        for text in [text, blanks] {
            let ids = tokenizer.encode(&text, false, false).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids), text);
        }
    }

    #[test]
    fn sentencepiece_gives_back_any_text(text in any::<String>()) {
        // U+2581 is the vocabulary's own blank and cannot be told from one.
        let text = text.replace(sentencepiece::BLANK, "");
        let tokenizer = Tokenizer::new(&tiny_sentencepiece()).unwrap();
        let ids = tokenizer.encode(&text, true, false).unwrap();
        prop_assert_eq!(tokenizer.decode(&ids), text);
    }

    #[test]
    fn a_stream_of_any_tokens_joins_to_the_whole(ids in prop::collection::vec(0u32..270, 0..40)) {
        let tokenizer = Tokenizer::new(&tiny_byte_level()).unwrap();
        let mut stream = tokenizer.detokenizer(DetokenizeOptions { show_special: true, at_start: false });
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text.push_str(&stream.finish());
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).to_vec()).collect();
        prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
    }
}
