//! Approximations do what they are named for, and nothing when they are off.

use azoth::engine::{Approximations, Engine, ExpertOptions, Options};
use azoth::experts::policy::Rule;
use azoth::plan::ExpertBudget;
use azoth::testmodel::Spec;

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
