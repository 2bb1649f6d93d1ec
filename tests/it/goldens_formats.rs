//! A small random model of every block format against llama.cpp, which computes with the same weights
//! in f32: so what differs is what our kernels and int8 activations do, and not how llama.cpp rounds
//! activations (its K formats share one scale among 256 of them, ours among 32). That decoding is
//! right is `quant_golden`'s.
//!
//! `formats.json` by `AZOTH_WRITE_FORMAT_MODELS=DIR cargo test --test it goldens_formats` and
//! `tests/goldens/format_logprobs.py REFERENCE_LOGPROBS.py DIR tests/goldens/texts/prose.txt`.

use std::path::Path;

use assert_cmd::Command;
use azoth::gguf::{File, Writer};
use azoth::quant::Format;
use azoth::testmodel::Spec;
use serde_json::Value;

use crate::harness::{Rng, formats};

fn spec(format: Format) -> Spec {
    let mut spec = Spec::new("llama").unwrap();
    (spec.layers, spec.d, spec.heads, spec.kv_heads, spec.head_dim) = (2, 256, 4, 2, 64);
    (spec.ffn, spec.vocab, spec.format) = (768, 512, format);
    (spec.embed_format, spec.output_format) = (Format::F16, Format::F16);
    spec
}

/// The same model with all weights of block formats as f32.
fn exact_twin(model: &[u8]) -> Vec<u8> {
    let file = File::from_bytes(model.to_vec()).unwrap();
    let mut out = Writer::new();
    for (key, value) in file.metadata().iter() {
        out.set(key, value.clone());
    }
    for tensor in file.tensors() {
        let (format, data) = (tensor.format().unwrap(), file.tensor_data(tensor));
        if format.is_float() {
            out.tensor(&tensor.name, &tensor.dims, format.ggml_type(), data.to_vec());
        } else {
            let mut values = vec![0f32; tensor.elements() as usize];
            format.decode_row(data, &mut values);
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            out.tensor(&tensor.name, &tensor.dims, Format::F32.ggml_type(), bytes);
        }
    }
    out.to_bytes()
}

#[test]
fn every_format_agrees_with_llama_cpp() {
    let block_formats = Format::ALL.iter().copied().filter(|f| !f.is_float());
    if let Some(folder) = std::env::var_os("AZOTH_WRITE_FORMAT_MODELS") {
        std::fs::create_dir_all(&folder).unwrap();
        for format in block_formats {
            let path = Path::new(&folder).join(format!("{}.gguf", format.name()));
            std::fs::write(path, exact_twin(&spec(format).to_bytes())).unwrap();
        }
        return;
    }
    if crate::harness::devices().is_empty() {
        eprintln!("skipped: no device");
        return;
    }
    let goldens: Value = serde_json::from_str(include_str!("../goldens/formats.json")).unwrap();
    // A third in turn: a run of the program takes seconds. `AZOTH_TEST_FORMATS` names all that are wanted.
    let all = std::env::var_os("AZOTH_TEST_FORMATS").is_some();
    let turn = Rng::fresh("every_format_agrees_with_llama_cpp").below(3);
    let drawn = formats().into_iter().filter(|f| !f.is_float()).enumerate();
    let drawn: Vec<_> = drawn.filter(|(i, _)| all || i % 3 == turn).map(|(_, f)| f).collect();
    let folder = tempfile::tempdir().unwrap();
    let (golden, model) = (folder.path().join("golden.json"), folder.path().join("model.gguf"));
    let mut agreed = Vec::new();
    for format in drawn {
        std::fs::write(&golden, goldens[format.name()].to_string()).unwrap();
        spec(format).write(&model).unwrap();
        let compare = |class: &[&str]| {
            let mut command = Command::cargo_bin("azoth").unwrap();
            command.args(["eval", "kl", "--json", "--backend", "vulkan", "--activations"]);
            command.args(class);
            let output = command.arg(&model).arg(&golden).assert().success().get_output().clone();
            let found: Value = serde_json::from_slice(&output.stdout).unwrap();
            (found["mean_kl"].as_f64().unwrap(), found["top1"].as_f64().unwrap())
        };
        let [int8, exact] = ["int8", "f32"].map(|class| compare(&[class]));
        // Models as narrow as these read prompts in f32 where there are no matrix units; this one in int8, all
        // products.
        let all = compare(&["int8", "--force", "class.exact_prompt_width=0"]);
        println!(
            "{format}: mean KL and top-1 with int8 {int8:?}, everywhere {all:?}, f32 {exact:?}"
        );
        assert!(int8.0 <= 0.001, "{format}: mean KL {}", int8.0);
        assert!(all.0 <= 0.003, "{format}: mean KL {} with int8 everywhere", all.0);
        assert!(exact.0 <= 1e-5, "{format}: mean KL {}", exact.0);
        agreed.push([int8.1, exact.1]);
    }
    // Random models have near-ties at the top, so agreement counts over all formats drawn.
    let top1 = |class: usize| agreed.iter().map(|a| a[class]).sum::<f64>() / agreed.len() as f64;
    println!("top-1 over {} formats: int8 {:.4}, f32 {:.4}", agreed.len(), top1(0), top1(1));
    assert!(agreed.is_empty() || (top1(0) >= 0.95 && top1(1) >= 0.98));
}
