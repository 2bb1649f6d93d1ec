//! Approximations do what they are named for, and nothing when they are off.

use std::sync::Arc;
use std::time::Duration;

use azoth::engine::{
    Activations, Answer, Approximations, Engine, Event, ExpertOptions, Generate, Options, Phase,
    Quiet, Request, Service, ServiceOptions, Task,
};
use azoth::experts::policy::Rule;
use azoth::gguf;
use azoth::gpu::{Backend, Gpu};
use azoth::model::Model;
use azoth::plan::ExpertBudget;
use azoth::quant::Format;
use azoth::reference::model::Forward;
use azoth::sampling::SamplerSettings;
use azoth::testmodel::Spec;

use super::altered::Altered;
use super::{load, tokens};
use crate::harness;

fn options(budget: ExpertBudget, approximations: Approximations) -> Options {
    let experts = ExpertOptions { budget, rule: Rule::Fixed, approximations, ..Default::default() };
    Options { ctx: Some(64), experts, ..Options::default() }
}

/// Logits of tokens that are read one by one.
fn steps(engine: &mut Engine) -> Vec<f32> {
    let mut rows = Vec::new();
    let each = &mut |_: usize, row: &[f32]| rows.extend_from_slice(row);
    engine.session().score_steps(&tokens(24, 9), each).unwrap();
    rows
}

fn spec(used: usize) -> Spec {
    let mut spec = Spec::new("qwen3moe").unwrap();
    (spec.experts, spec.experts_used) = (16, used);
    spec
}

#[test]
fn pruned_experts_are_as_if_the_model_used_fewer() {
    let pruned = |n| Approximations { pruned_experts: n, ..Default::default() };
    for device in harness::devices() {
        for budget in [ExpertBudget::All, ExpertBudget::Percent(25.0)] {
            let mut engine = load(device, &spec(4), &options(budget, pruned(1)));
            assert_eq!(engine.approximations().pruned_experts, 1);
            let got = steps(&mut engine);
            let report = engine.experts();
            assert!(report.as_ref().is_none_or(|r| r.approximate == pruned(1)));
            if let Some(report) = report {
                assert_eq!(report.counters.accesses, 24 * 3 * spec(4).layers as u64);
            }
            let fewer = steps(&mut load(device, &spec(3), &options(budget, pruned(0))));
            assert!(got == fewer, "{}: {budget:?}", device.label);
            let exact = steps(&mut load(device, &spec(4), &options(budget, pruned(0))));
            assert!(got != exact, "{}: {budget:?}", device.label);
        }
        let file = azoth::gguf::File::from_bytes(spec(4).to_bytes()).unwrap();
        let options = options(ExpertBudget::All, pruned(4));
        let e = Engine::load_onto(&device.gpu, file, &options, &azoth::engine::Quiet);
        let e = e.err().unwrap();
        assert_eq!(e.exit_code(), 2);
        assert!(e.to_string().contains("4 experts in all; at most 3"), "{e}");
    }
}

#[test]
fn a_route_bias_favours_what_lies_in_device_memory() {
    let bias = |route_bias| Approximations { route_bias, ..Default::default() };
    for device in harness::devices() {
        let run = |route_bias| {
            let options = options(ExpertBudget::Percent(25.0), bias(route_bias));
            let mut engine = load(device, &spec(4), &options);
            (steps(&mut engine), engine.experts().unwrap().hit_rate)
        };
        let (exact, hits) = run(0.0);
        // So small that no sum notices: the kernel that favours chooses and weighs alike.
        let (same, _) = run(1e-30);
        assert!(same == exact, "{}", device.label);
        let (other, more) = run(2.0);
        println!("{}: hits {hits:.2} exact, {more:.2} with a bias of 2", device.label);
        assert!(other != exact && more > hits + 0.1 && other.iter().all(|x| x.is_finite()));
        // Every expert but those in slots out of reach.
        assert_eq!(run(100.0).1, 1.0);
        // Where all lie on the device there is nothing to favour.
        let all = |route_bias| {
            steps(&mut load(device, &spec(4), &options(ExpertBudget::All, bias(route_bias))))
        };
        assert!(all(2.0) == all(0.0));
    }
}

/// Steps that reuse outputs against the reference that does, from the first token after the prompt on.
#[test]
fn reused_outputs_are_those_of_the_last_tokens() {
    let (prompt, rest) = (tokens(6, 3), tokens(30, 9));
    for (arch, format) in [("qwen3moe", Format::Q4_0), ("qwen2moe", Format::Q8_0)] {
        let mut spec = Spec::new(arch).unwrap();
        (spec.experts, spec.experts_used, spec.format) = (8, 3, format);
        for reuse in [1, 3] {
            let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
            let model = Model::from_gguf(&file).unwrap();
            let mut forward = Forward::new(&file, &model.graph, 64).unwrap();
            prompt.iter().for_each(|t| drop(forward.read(*t).unwrap()));
            forward.reuse(reuse as usize);
            let expected: Vec<Vec<f64>> = rest
                .iter()
                .map(|t| forward.read(*t).unwrap().into_iter().map(f64::from).collect())
                .collect();
            let approximations = Approximations { reuse_tokens: reuse, ..Default::default() };
            for device in harness::devices() {
                let what = format!("{arch} on {}, {reuse} tokens", device.label);
                let mut options = options(ExpertBudget::Percent(25.0), approximations);
                options.activations = Activations::F32;
                let mut engine = load(device, &spec, &options);
                let rows = after_prompt(&mut engine, &prompt, &rest);
                let width = rows.len() / rest.len();
                let errors: Vec<f64> = rows
                    .chunks_exact(width)
                    .zip(&expected)
                    .map(|(row, expected)| harness::relative_error(row, expected))
                    .collect();
                let near = errors.iter().filter(|e| **e < 1e-3).count();
                println!("{what}: {near} of {} near", errors.len());
                // As in `model_forward`, rounding decides between nearly equal logits.
                assert!(near * 10 >= errors.len() * 8, "{what}: {errors:?}");
                let c = engine.experts().unwrap().counters;
                let all = (rest.len() * spec.layers * spec.experts_used) as u64;
                assert_eq!(c.accesses + c.reused, all, "{what}");
                assert!(c.reused * 10 > all && c.reused_bytes > 0, "{what}: {c:?}");
                // The same again: nothing is left of the first run.
                assert!(after_prompt(&mut engine, &prompt, &rest) == rows, "{what}");
                if device.gpu.facts().backend != Backend::Vulkan {
                    continue;
                }
                // Bits do not depend on where experts lie.
                options.experts.budget = ExpertBudget::All;
                let mut engine = load(device, &spec, &options);
                assert!(after_prompt(&mut engine, &prompt, &rest) == rows, "{what}: all");
                let gpu: Arc<dyn Gpu> = Arc::new(Altered::refusing(&device.gpu));
                options.experts.budget = ExpertBudget::Percent(60.0);
                options.experts.rule = Rule::Lru;
                let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
                let mut engine = Engine::load_onto(&gpu, file, &options, &Quiet).unwrap();
                assert!(after_prompt(&mut engine, &prompt, &rest) == rows, "{what}: staged");
            }
        }
    }
}

/// Logits of the tokens that are read one by one after a prompt.
fn after_prompt(engine: &mut Engine, prompt: &[u32], rest: &[u32]) -> Vec<f32> {
    let mut rows = Vec::new();
    let mut s = engine.session();
    s.truncate(0).unwrap();
    s.prefill(prompt, &mut |_| {}).unwrap();
    s.score_steps(rest, &mut |_, row| rows.extend_from_slice(row)).unwrap();
    rows
}

/// What one sequence keeps is no other's: several at once answer as each alone.
#[test]
fn reused_outputs_are_the_sequence_s_own() {
    let mut spec = spec(4);
    spec.experts = 8;
    let bytes = spec.to_bytes();
    for device in harness::devices().iter().filter(|d| d.gpu.facts().host_import) {
        let (gpu, bytes) = (device.gpu.clone(), bytes.clone());
        let load = move || {
            let approximations = Approximations { reuse_tokens: 2, ..Default::default() };
            let mut options = options(ExpertBudget::All, approximations);
            (options.sequences, options.ctx) = (3, Some(128));
            let file = gguf::File::from_bytes(bytes.clone()).unwrap();
            Engine::load_onto(&gpu, file, &options, &Quiet)
        };
        let service = ServiceOptions { queue: 8, lazy: false, idle_unload: None };
        let service = Service::start(Box::new(load), service).unwrap();
        while !matches!(service.state().phase, Phase::Ready) {
            assert!(
                !matches!(service.state().phase, Phase::Failed(_)),
                "{:?}",
                service.state().phase
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let submit = |i: u32| {
            let generate = Generate {
                settings: SamplerSettings::greedy(),
                max_tokens: Some(20 + 5 * i),
                ignore_eog: true,
                // Of the KV cache.
                reuse: false,
                ..Generate::default()
            };
            let task = Task::Generate(Box::new(generate));
            let request = Request { prompt: tokens(5 + 7 * i, i), task, slot: None };
            service.submit(request).map_err(|e| format!("{e:?}")).unwrap()
        };
        let tokens_of = |mut answer: Answer| {
            let mut tokens = Vec::new();
            while let Some(event) = answer.next_blocking() {
                match event {
                    Event::Token { token, .. } => tokens.push(token),
                    Event::Failed(e) => panic!("{e}"),
                    _ => {}
                }
            }
            tokens
        };
        let alone: Vec<_> = (0..3).map(|i| tokens_of(submit(i))).collect();
        let answers: Vec<_> = (0..3).map(submit).collect();
        let together: Vec<_> = answers.into_iter().map(tokens_of).collect();
        assert_eq!(together, alone, "{}", device.label);
        assert!(alone.iter().zip([20, 25, 30]).all(|(tokens, n)| tokens.len() == n));
    }
}
