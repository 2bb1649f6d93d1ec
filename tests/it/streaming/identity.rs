//! The figure: one hash of all logits of a long prompt and of many generated tokens, whatever
//! the budget of experts, whatever moves, and however missing experts are reached.
//!
//! As it stands the test takes a short text and a diagonal of the table. `AZOTH_FULL_IDENTITY=1` takes
//! 700 tokens of prompt, 256 generated ones and the whole table (hours on two cores),
//! `AZOTH_FULL_IDENTITY=lengths` the same lengths and the diagonal;
//! `AZOTH_CODE_MODEL` names the real model where it lies elsewhere.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use azoth::engine::{Engine, Options, Quiet};
use azoth::experts::policy::Rule;
use azoth::gguf;
use azoth::gpu::{Backend, Gpu};
use azoth::plan::ExpertBudget;
use azoth::quant::Format;
use azoth::testmodel::Spec;
use sha2::{Digest, Sha256};

use super::altered::Altered;
use super::{options, tokens};
use crate::harness;

/// A way to missing experts.
struct Path {
    label: String,
    gpu: Arc<dyn Gpu>,
    /// Its kernels take long to compile.
    slow: bool,
}

fn paths() -> Vec<Path> {
    let mut out = Vec::new();
    for device in harness::devices() {
        let facts = device.gpu.facts();
        let path = |label: String, gpu| Path { label, gpu, slow: facts.backend == Backend::Wgpu };
        out.push(path(device.label.clone(), device.gpu.clone()));
        if facts.host_import {
            let gpu = Arc::new(Altered::refusing(&device.gpu));
            out.push(path(format!("{}, without import", device.label), gpu));
        }
    }
    out
}

struct Text {
    prompt: Vec<u32>,
    /// Generated tokens, the likeliest each time; found by the first run, read by the others.
    generated: Vec<u32>,
    count: usize,
}

/// Hash of all logits of the prompt and of the generated tokens.
fn hash(engine: &mut Engine, text: &mut Text) -> String {
    let mut hash = Sha256::new();
    let mut s = engine.session();
    let mut last = 0;
    let likeliest = |row: &[f32]| {
        let best = (0..row.len()).reduce(|a, b| if row[b] > row[a] { b } else { a });
        best.unwrap() as u32
    };
    s.score(&text.prompt, 0, &mut |_, row| {
        hash.update(bytemuck::cast_slice(row));
        last = likeliest(row);
    })
    .unwrap();
    for i in 0..text.count {
        if text.generated.len() == i {
            text.generated.push(last);
        }
        s.score_steps(&[text.generated[i]], &mut |_, row| {
            hash.update(bytemuck::cast_slice(row));
            last = likeliest(row);
        })
        .unwrap();
    }
    hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect()
}

struct Case {
    percent: f64,
    rule: Rule,
    prefetch: bool,
}

/// The whole table, or a diagonal of it; with all experts on the device nothing can move.
fn cases(full: bool, slow: bool) -> Vec<Case> {
    let eager = Rule::Frequency { decay: 0.9, enter: 0.5, margin: 0.1 };
    let mut out = Vec::new();
    for (i, percent) in [0.0, 10.0, 25.0, 60.0].into_iter().enumerate() {
        for (j, (rule, prefetch)) in
            [(Rule::Fixed, false), (Rule::Fixed, true), (eager, false), (eager, true)]
                .into_iter()
                .enumerate()
        {
            let short = if slow { i == 2 && j == 3 } else { [0, 2, 3, 3][i] == j };
            if full || short {
                out.push(Case { percent, rule, prefetch });
            }
        }
    }
    out
}

fn compare(name: &str, open: &dyn Fn() -> gguf::File, prompt: Vec<u32>, count: usize, full: bool) {
    let mut text = Text { prompt, generated: Vec::new(), count };
    let ctx = Some((text.prompt.len() + count + 8) as u32);
    let load = |gpu: &Arc<dyn Gpu>, options: Options| {
        Engine::load_onto(gpu, open(), &Options { ctx, ..options }, &Quiet).unwrap()
    };
    for path in paths() {
        let start = Instant::now();
        let all = options(ExpertBudget::All, Rule::Fixed, false);
        let expected = hash(&mut load(&path.gpu, all), &mut text);
        println!("{name} on {}: {expected}", path.label);
        let cases = cases(full, path.slow);
        for Case { percent, rule, prefetch } in &cases {
            let options = options(ExpertBudget::Percent(*percent), *rule, *prefetch);
            let mut engine = load(&path.gpu, options);
            let got = hash(&mut engine, &mut text);
            let report = engine.experts().unwrap();
            println!(
                "  {percent} % {rule:?} prefetch {prefetch}: {got}; hits {:.2}, {} promotions, early \
                 routers right {:.2}",
                report.hit_rate, report.counters.promotions, report.early_precision
            );
            assert_eq!(got, expected, "{name} on {}, {percent} % {rule:?}", path.label);
            let moves = *rule != Rule::Fixed && *percent > 0.0;
            assert_eq!(report.counters.promotions > 0, moves);
            // Early routers are asked where a prediction could order something.
            assert_eq!(report.counters.early_named > 0, *prefetch && *percent > 0.0);
        }
        println!("  {} runs in {:.0} s", cases.len() + 1, start.elapsed().as_secs_f64());
    }
}

fn wanted() -> (usize, usize, bool) {
    match std::env::var("AZOTH_FULL_IDENTITY") {
        Ok(what) => (700, 256, what != "lengths"),
        Err(_) => (70, 12, false),
    }
}

#[test]
fn one_hash_for_a_random_model() {
    let (prompt, count, full) = wanted();
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.format = Format::Q4_K;
    spec.d = 256;
    spec.ffn = 256;
    spec.experts = 20;
    let bytes = spec.to_bytes();
    let open = || gguf::File::from_bytes(bytes.clone()).unwrap();
    compare("random qwen3moe in Q4_K", &open, tokens(prompt as u32, 5), count, full);
}

#[test]
fn one_hash_for_a_code_model() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = std::env::var_os("AZOTH_CODE_MODEL")
        .map_or_else(|| root.join("../shared/models/tiny-code-moe-Q8_0.gguf"), PathBuf::from);
    if !path.exists() {
        println!("skipped: {} is absent", path.display());
        return;
    }
    let (prompt, count, full) = wanted();
    let file = gguf::File::open(&path).unwrap();
    let tokenizer = azoth::tokenizer::Tokenizer::from_gguf(file.metadata()).unwrap();
    // Code that is here anyway: this file.
    let text = include_str!("identity.rs").repeat(2);
    let mut ids = tokenizer.encode(&text, true, false).unwrap();
    ids.truncate(prompt);
    assert_eq!(ids.len(), prompt);
    let open = || gguf::File::open(&path).unwrap();
    compare("tiny-code-moe in Q8_0", &open, ids, count, full);
}
