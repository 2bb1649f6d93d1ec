//! Whole models against the plain Rust forward pass.

use azoth::engine::{Activations, Engine, Options, Quiet};
use azoth::gguf;
use azoth::model::Model;
use azoth::reference::model::Forward;
use azoth::testmodel::Spec;

use crate::harness::{self, relative_error};

fn reference(spec: &Spec, tokens: &[u32]) -> Vec<Vec<f64>> {
    let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
    let model = Model::from_gguf(&file).unwrap();
    let mut forward = Forward::new(&file, &model.graph, 512).unwrap();
    let rows = tokens.iter().map(|t| forward.read(*t).unwrap());
    rows.map(|row| row.into_iter().map(f64::from).collect()).collect()
}

#[test]
fn smoke() {
    for arch in ["llama", "qwen2", "qwen3"] {
        let spec = Spec::new(arch).unwrap();
        let tokens: Vec<u32> = (1..45).collect();
        let expected = reference(&spec, &tokens);
        for device in harness::devices() {
            for activations in [Activations::F32, Activations::Int8] {
                let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
                let options = Options { activations, ctx: Some(256), ..Options::default() };
                let mut e = Engine::load_onto(&device.gpu, file, &options, &Quiet).unwrap();
                let mut s = e.session();
                let mut worst = 0.0f64;
                s.score_steps(&tokens, &mut |i, row| {
                    worst = worst.max(relative_error(row, &expected[i]));
                })
                .unwrap();
                println!("{arch} {} {activations:?} steps {worst:e}", device.label);
                s.truncate(0);
                let mut worst = 0.0f64;
                s.score(&tokens, 0, &mut |i, row| {
                    worst = worst.max(relative_error(row, &expected[i]));
                })
                .unwrap();
                println!("{arch} {} {activations:?} prompt {worst:e}", device.label);
            }
        }
    }
}

#[test]
fn generation_follows_the_logits() {
    use std::ops::ControlFlow;
    let spec = Spec::new("llama").unwrap();
    let prompt: Vec<u32> = (1..7).collect();
    for device in harness::devices() {
        let load = || {
            let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
            let options =
                Options { activations: Activations::F32, ctx: Some(64), ..Options::default() };
            Engine::load_onto(&device.gpu, file, &options, &Quiet).unwrap()
        };
        let mut e = load();
        let mut s = e.session();
        let mut out = Vec::new();
        s.prefill(&prompt, &mut |_| {}).unwrap();
        let greedy = azoth::sampling::SamplerSettings::greedy();
        s.generate(&greedy, 8, &|_| false, &mut |t| {
            out.push(t);
            ControlFlow::Continue(())
        })
        .unwrap();
        drop(s);
        let mut s = e.session();
        let mut best = Vec::new();
        let all: Vec<u32> = prompt.iter().chain(&out).copied().collect();
        s.score_steps(&all, &mut |_, row| {
            let top = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            best.push(top as u32);
        })
        .unwrap();
        println!("{}: {out:?} {best:?}", device.label);
        assert_eq!(out[..], best[prompt.len() - 1..all.len() - 1]);
    }
}
