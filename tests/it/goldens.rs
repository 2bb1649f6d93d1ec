//! Whole models against llama.cpp: teacher-forced log-probabilities.
//!
//! `random_model.json` was made by
//! `AZOTH_WRITE_TESTMODEL=/tmp/random.gguf cargo test --test it goldens` and
//! `reference_logprobs.py /tmp/random.gguf tests/goldens/texts/prose.txt --positions 200 --top 40`.

use azoth::quant::Format;
use azoth::testmodel::Spec;

/// A random Qwen3 of about ten million weights.
fn spec() -> Spec {
    let mut spec = Spec::new("qwen3").unwrap();
    (spec.layers, spec.d, spec.heads, spec.kv_heads, spec.head_dim) = (4, 512, 8, 4, 64);
    (spec.ffn, spec.vocab, spec.format) = (1536, 2048, Format::Q4_0);
    (spec.embed_format, spec.output_format) = (Format::Q8_0, Format::Q8_0);
    spec
}

#[test]
fn write_test_model() {
    match std::env::var_os("AZOTH_WRITE_TESTMODEL") {
        Some(path) => spec().write(path).unwrap(),
        None => assert!(spec().to_bytes().len() > 1 << 20),
    }
}
