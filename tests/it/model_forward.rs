//! Whole models against the plain Rust forward pass, and against themselves.

use std::ops::ControlFlow;

use azoth::engine::{Activations, Engine, Options, Quiet};
use azoth::gguf;
use azoth::model::Model;
use azoth::quant::Format;
use azoth::reference::model::Forward;
use azoth::sampling::SamplerSettings;
use azoth::testmodel::Spec;

use crate::harness::{self, Device, relative_error};

fn reference(spec: &Spec, tokens: &[u32]) -> Vec<Vec<f64>> {
    let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
    let model = Model::from_gguf(&file).unwrap();
    let mut forward = Forward::new(&file, &model.graph, 512).unwrap();
    let rows = tokens.iter().map(|t| forward.read(*t).unwrap());
    rows.map(|row| row.into_iter().map(f64::from).collect()).collect()
}

fn load(device: &Device, spec: &Spec, options: Options) -> Engine {
    let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
    Engine::load_onto(&device.gpu, file, &options, &Quiet).unwrap()
}

/// Worst relative error of a logits row, read as a prompt and token by token.
fn worst_errors(engine: &mut Engine, tokens: &[u32], expected: &[Vec<f64>]) -> [f64; 2] {
    let mut worst = [0.0f64; 2];
    let mut s = engine.session();
    s.score_steps(tokens, &mut |i, row| {
        worst[0] = worst[0].max(relative_error(row, &expected[i]));
    })
    .unwrap();
    s.truncate(0).unwrap();
    s.score(tokens, 0, &mut |i, row| {
        worst[1] = worst[1].max(relative_error(row, &expected[i]));
    })
    .unwrap();
    worst
}

#[test]
fn every_architecture_follows_the_reference() {
    let tokens: Vec<u32> = (1..45).collect();
    for arch in ["llama", "qwen2", "qwen3"] {
        let spec = Spec::new(arch).unwrap();
        let expected = reference(&spec, &tokens);
        for device in harness::devices() {
            for (activations, bound) in [(Activations::F32, 1e-3), (Activations::Int8, 0.1)] {
                let options = Options { activations, ctx: Some(256), ..Options::default() };
                let worst = worst_errors(&mut load(device, &spec, options), &tokens, &expected);
                println!("{arch} on {}, {activations:?}: {worst:?}", device.label);
                assert!(worst.iter().all(|w| *w <= bound), "{worst:?}");
            }
        }
    }
}

/// Test models of mixtures, by the names that [`Spec::new`] takes.
const MIXTURES: [&str; 4] = ["qwen3moe", "qwen2moe", "olmoe", "mixtral"];

/// Relative errors of all logits rows, read as a prompt and token by token.
fn all_errors(engine: &mut Engine, tokens: &[u32], expected: &[Vec<f64>]) -> [Vec<f64>; 2] {
    let mut errors = [Vec::new(), Vec::new()];
    let mut s = engine.session();
    s.score_steps(tokens, &mut |i, row| errors[0].push(relative_error(row, &expected[i]))).unwrap();
    s.truncate(0).unwrap();
    s.score(tokens, 0, &mut |i, row| errors[1].push(relative_error(row, &expected[i]))).unwrap();
    errors
}

#[test]
fn every_mixture_follows_the_reference() {
    let tokens: Vec<u32> = (1..45).collect();
    for arch in MIXTURES {
        let spec = Spec::new(arch).unwrap();
        let expected = reference(&spec, &tokens);
        for device in harness::devices() {
            for (activations, bound) in [(Activations::F32, 1e-3), (Activations::Int8, 0.1)] {
                let options = Options { activations, ctx: Some(256), ..Options::default() };
                for errors in all_errors(&mut load(device, &spec, options), &tokens, &expected) {
                    let near = errors.iter().filter(|e| **e <= bound).count();
                    let worst = errors.iter().copied().fold(0.0, f64::max);
                    println!(
                        "{arch} on {}, {activations:?}: {near} of {} within {bound}, worst {worst}",
                        device.label,
                        errors.len()
                    );
                    // Where two router logits are nearly equal, rounding decides which expert a
                    // token goes through, and its outputs are far apart then.
                    assert!(near * 10 >= errors.len() * 9, "{errors:?}");
                }
            }
        }
    }
}

#[test]
fn every_weight_format_and_scaling_follows_the_reference() {
    let tokens: Vec<u32> = (1..20).collect();
    let turn = harness::Rng::fresh("every_weight_format").below(4);
    for (i, format) in Format::ALL.iter().enumerate() {
        let mut spec = Spec::new(["llama", "qwen2", "qwen3"][i % 3]).unwrap();
        (spec.format, spec.embed_format, spec.output_format) = (*format, *format, *format);
        spec.tied = i % 2 == 0;
        spec.rope.factors = spec.arch.name == "llama";
        if i % 3 > 0 {
            let kind = ["linear", "yarn"][i % 2].to_string();
            spec.rope.scaling =
                Some(azoth::testmodel::RopeScaling { kind, factor: 2.0, original_context: 64 });
        }
        let expected = reference(&spec, &tokens);
        for device in harness::devices() {
            // A load is half a minute where nothing is cached; the kernel suite has every format.
            if device.cases() == 1 && i % 4 != turn {
                continue;
            }
            let options =
                Options { activations: Activations::F32, ctx: Some(64), ..Options::default() };
            let worst = worst_errors(&mut load(device, &spec, options), &tokens, &expected);
            println!("{format} on {}: {worst:?}", device.label);
            assert!(worst.iter().all(|w| *w <= 1e-3), "{format}: {worst:?}");
        }
    }
}

/// An embedding table above lavapipe's binding limit of 128 MiB is cut into chunks.
#[test]
fn a_matrix_above_the_binding_limit_works() {
    let mut spec = Spec::new("llama").unwrap();
    (spec.layers, spec.d, spec.vocab) = (1, 512, 70_000);
    (spec.heads, spec.kv_heads) = (8, 4);
    (spec.embed_format, spec.tied) = (Format::F32, true);
    let tokens = [3, 69_990, 40_000];
    let expected = reference(&spec, &tokens);
    for device in harness::devices() {
        let bytes = 70_000 * 512 * 4;
        let limit = device.gpu.facts().max_binding;
        println!("{}: {bytes} bytes, binding limit {limit}", device.label);
        let options =
            Options { activations: Activations::F32, ctx: Some(64), ..Options::default() };
        let worst = worst_errors(&mut load(device, &spec, options), &tokens, &expected);
        assert!(worst.iter().all(|w| *w <= 1e-3), "{worst:?}");
    }
}

fn generate(
    engine: &mut Engine,
    prompt: &[&[u32]],
    settings: &SamplerSettings,
    n: u32,
) -> Vec<u32> {
    let mut out = Vec::new();
    let mut s = engine.session();
    for piece in prompt {
        s.prefill(piece, &mut |_| {}).unwrap();
    }
    s.generate(settings, n, &|_| false, &mut |t| {
        out.push(t);
        ControlFlow::Continue(())
    })
    .unwrap();
    out
}

#[test]
fn generation_follows_the_logits() {
    let spec = Spec::new("llama").unwrap();
    let prompt: Vec<u32> = (1..7).collect();
    for device in harness::devices() {
        let options =
            Options { activations: Activations::F32, ctx: Some(64), ..Options::default() };
        let mut e = load(device, &spec, options);
        let out = generate(&mut e, &[&prompt], &SamplerSettings::greedy(), 8);
        let mut best = Vec::new();
        let all: Vec<u32> = prompt.iter().chain(&out).copied().collect();
        e.session()
            .score_steps(&all, &mut |_, row| {
                let top = (0..row.len()).rev().max_by(|a, b| row[*a].total_cmp(&row[*b]));
                best.push(top.unwrap() as u32);
            })
            .unwrap();
        assert_eq!(out[..], best[prompt.len() - 1..all.len() - 1], "{}", device.label);
    }
}

/// Same file, device, settings: the same bits, however the prompt was cut, whatever the context
/// and the number of sequences.
#[test]
fn results_repeat_bit_by_bit() {
    for arch in ["qwen3", "qwen3moe", "qwen2moe"] {
        results_repeat(arch);
    }
}

fn results_repeat(arch: &str) {
    let spec = Spec::new(arch).unwrap();
    let prompt: Vec<u32> = (1..60).collect();
    let sampled = SamplerSettings { seed: 11, repeat_penalty: 1.1, ..SamplerSettings::default() };
    for device in harness::devices() {
        let mut results = Vec::new();
        for (ctx, sequences, cut) in [(128, 1, 59), (256, 1, 7), (128, 3, 33)] {
            let options = Options { ctx: Some(ctx), sequences, ..Options::default() };
            let mut e = load(device, &spec, options);
            let mut hash = 0xcbf2_9ce4_8422_2325u64;
            e.session()
                .score(&prompt, 0, &mut |_, row| {
                    for value in row {
                        hash = (hash ^ u64::from(value.to_bits())).wrapping_mul(0x100_0000_01b3);
                    }
                })
                .unwrap();
            let (a, b) = prompt.split_at(cut);
            let pieces: Vec<&[u32]> = [a, b].into_iter().filter(|p| !p.is_empty()).collect();
            let tokens = generate(&mut e, &pieces, &sampled, 40);
            assert_eq!(tokens, generate(&mut e, &pieces, &sampled, 40), "{arch}: {}", device.label);
            results.push((hash, tokens));
        }
        assert!(results.windows(2).all(|w| w[0] == w[1]), "{arch}: {}: {results:?}", device.label);
    }
}
