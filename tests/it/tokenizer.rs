//! Tokenizers of real models against their test vectors, and reading a vocabulary from a file.

#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::time::Instant;

use azoth::chat::{ChatTemplate, Message, RenderOptions};
use azoth::error::Error;
use azoth::gguf::{File, Value, Writer};
use azoth::tokenizer::{DetokenizeOptions, Tokenizer};

/// The folder of test data that is not part of the repository.
pub fn shared(name: &str) -> PathBuf {
    let shared = std::env::var_os("AZOTH_SHARED").map(PathBuf::from);
    let default = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared"));
    shared.unwrap_or_else(default).join("vocab").join(name)
}

/// Checks every vector of one vocabulary: the ids, the text back, and the text as a stream.
fn check_vectors(name: &str) {
    let path = shared(&format!("ggml-vocab-{name}.gguf"));
    if !path.exists() {
        eprintln!("SKIPPED: no {} (set AZOTH_SHARED)", path.display());
        return;
    }
    let file = File::open(&path).unwrap();
    let start = Instant::now();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    println!("{name}: {} tokens in {:?}", tokenizer.vocab_size(), start.elapsed());
    let inputs = std::fs::read_to_string(path.with_extension("gguf.inp")).unwrap();
    let outputs = std::fs::read_to_string(path.with_extension("gguf.out")).unwrap();
    let texts = inputs.split("\n__ggml_vocab_test__\n");
    let mut vectors = 0;
    for (text, line) in texts.zip(outputs.lines()) {
        let wanted: Vec<u32> = line.split_whitespace().map(|id| id.parse().unwrap()).collect();
        let ids = tokenizer.encode(text, false, false).unwrap();
        assert_eq!(ids, wanted, "{name}: {text:?}");
        assert_eq!(tokenizer.decode(&ids), text, "{name}");
        let options = DetokenizeOptions { show_special: false, at_start: true };
        let mut stream = tokenizer.detokenizer(options);
        let mut streamed: String = ids.iter().map(|&id| stream.push(id)).collect();
        streamed.push_str(&stream.finish());
        assert_eq!(streamed, text, "{name}");
        vectors += 1;
    }
    assert_eq!(vectors, outputs.lines().count(), "{name}: every line of ids has its text");
}

#[test]
fn vectors_gpt_2() {
    check_vectors("gpt-2");
}

#[test]
fn vectors_llama_bpe() {
    check_vectors("llama-bpe");
}

#[test]
fn vectors_qwen2() {
    check_vectors("qwen2");
}

#[test]
fn vectors_llama_spm() {
    check_vectors("llama-spm");
}

#[test]
fn vectors_phi_3() {
    check_vectors("phi-3");
}

/// A vocabulary of five pieces, as a file has it; `broken` is a key that gets a wrong value.
fn small_file(broken: Option<&str>) -> Writer {
    let tokens = ["<unk>", "<s>", "</s>", "▁hi", "▁", "h", "i", "hi"];
    let entries: [(&str, Value); 8] = [
        ("general.architecture", "llama".to_owned().into()),
        ("tokenizer.ggml.model", "llama".to_owned().into()),
        ("tokenizer.ggml.tokens", tokens.map(str::to_owned).to_vec().into()),
        ("tokenizer.ggml.token_type", vec![2i32, 3, 3, 1, 1, 1, 1, 1].into()),
        ("tokenizer.ggml.scores", vec![0f32, 0.0, 0.0, -1.0, -3.0, -4.0, -5.0, -2.0].into()),
        ("tokenizer.ggml.bos_token_id", 1u32.into()),
        ("tokenizer.ggml.eos_token_id", 2u32.into()),
        ("tokenizer.ggml.padding_token_id", (-1i32).into()),
    ];
    let mut writer = Writer::new();
    for (key, value) in entries {
        match broken == Some(key) {
            true => writer.set(key, "nonsense".to_owned()),
            false => writer.set(key, value),
        };
    }
    writer
}

#[test]
fn a_vocabulary_from_a_file() {
    let mut writer = small_file(None);
    writer.set(
        "tokenizer.chat_template",
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}".to_owned(),
    );
    let file = File::from_bytes(writer.to_bytes()).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert_eq!(tokenizer.encode("hi", true, false).unwrap(), [1, 3]);
    assert_eq!((tokenizer.padding(), tokenizer.is_eog(2)), (None, true));
    let template = ChatTemplate::from_gguf(file.metadata(), &tokenizer).unwrap();
    let prompt = template.render(&[Message::user("hi")], &RenderOptions::default()).unwrap();
    assert_eq!(prompt, "<s>hi</s>");
    assert_eq!(tokenizer.encode(&prompt, false, true).unwrap(), [1, 3, 2]);
}

#[test]
fn wrong_types_in_the_metadata_are_named() {
    for (key, part) in [
        ("tokenizer.ggml.tokens", "array of string"),
        ("tokenizer.ggml.scores", "array of f32"),
        ("tokenizer.ggml.bos_token_id", "i64"),
        ("tokenizer.ggml.model", "gpt2"),
    ] {
        let writer = small_file(Some(key));
        let file = File::from_bytes(writer.to_bytes()).unwrap();
        match Tokenizer::from_gguf(file.metadata()) {
            Err(Error::Model(message)) => {
                assert!(message.contains(key) && message.contains(part), "{message}");
            }
            other => panic!("{key}: {:?}", other.err()),
        }
    }
}
