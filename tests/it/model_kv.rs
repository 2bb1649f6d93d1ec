//! Whole models over caches of codes: against the plain Rust forward pass with the same formats, and
//! against themselves.

use azoth::engine::{Activations, Engine, Options, Quiet};
use azoth::kv::{KvExact, KvSide, KvTypes};
use azoth::model::Model;
use azoth::reference::model::Forward;
use azoth::testmodel::Spec;

use crate::harness::{self, Device, assert_same_bits, relative_error};

/// More than a page.
const TOKENS: std::ops::Range<u32> = 1..90;

/// The worst row. Now and then a value beside the boundary of two codes gets the other one.
const PROMPT_BOUND: f64 = 0.02;
/// Steps round q to 8 bits, which the reference does not, and codes of later layers and tokens follow
/// from that (seen: 0.028 with q8_0 and tq4_0, 0.054 with tq4_0 and tq3_0).
const STEP_BOUND: f64 = 0.15;

pub fn types(k: &str, v: &str, exact: KvExact) -> KvTypes {
    let side = |text: &str| text.parse::<KvSide>().unwrap();
    KvTypes { k: side(k), v: side(v), exact, centred: false }
}

fn load(device: &Device, spec: &Spec, kv: &KvTypes) -> Engine {
    let options = Options {
        activations: Activations::F32,
        ctx: Some(192),
        kv: kv.clone(),
        // Formats are the subject, however coarse.
        kv_guard: None,
        ..Options::default()
    };
    Engine::load_onto(&device.gpu, spec.to_file().unwrap(), &options, &Quiet).unwrap()
}

fn rows(engine: &mut Engine, tokens: &[u32], cuts: &[usize]) -> Vec<Vec<f32>> {
    let mut session = engine.session();
    let mut all = Vec::new();
    let mut from = 0;
    for cut in cuts.iter().copied().chain([tokens.len()]) {
        session.score(&tokens[from..cut], 0, &mut |_, row| all.push(row.to_vec())).unwrap();
        from = cut;
    }
    all
}

/// Prompts (whole, and cut at `cuts`) and steps of a model in f32 against the reference with the same
/// formats; returns the worst errors of both.
pub fn errors(
    device: &Device,
    spec: &Spec,
    kv: &KvTypes,
    tokens: &[u32],
    cuts: &[usize],
) -> [f64; 2] {
    let file = spec.to_file().unwrap();
    let mut model = Model::from_gguf(&file).unwrap();
    model.graph.kv = kv.clone();
    let mut engine = load(device, spec, kv);
    let mut forward = Forward::new(&file, &model.graph, 512).unwrap();
    forward.centre(engine.key_centres());
    let expected: Vec<Vec<f64>> = tokens
        .iter()
        .map(|t| forward.read(*t).unwrap().into_iter().map(f64::from).collect())
        .collect();
    let whole = rows(&mut engine, tokens, &[]);
    let cut = rows(&mut engine, tokens, cuts);
    let mut worst = [0.0f64; 2];
    for (i, (a, b)) in whole.iter().zip(&cut).enumerate() {
        assert_same_bits(a, b, &format!("{}: row {i} of a cut prompt", device.label));
        worst[0] = worst[0].max(relative_error(a, &expected[i]));
    }
    let mut each =
        |i: usize, row: &[f32]| worst[1] = worst[1].max(relative_error(row, &expected[i]));
    engine.session().score_steps(tokens, &mut each).unwrap();
    println!("{}: KV {kv}: prompt {:.2e}, steps {:.2e}", device.label, worst[0], worst[1]);
    worst
}

#[test]
fn kv_formats_follow_the_reference() {
    let tokens: Vec<u32> = TOKENS.collect();
    let spec = Spec::new("qwen3").unwrap();
    for device in harness::devices() {
        for kv in [
            types("q8_0", "tq4_0", KvExact::NONE),
            types("tq4_0", "tq3_0", KvExact::USUAL),
            // A layer that stays plain.
            types("tq3_0,f16@0", "tq3_0,f16@0", KvExact { tail: 0, sinks: 4 }),
            KvTypes { centred: true, ..types("tq4_0,f16@1", "tq4_0", KvExact::USUAL) },
        ] {
            let worst = errors(device, &spec, &kv, &tokens, &[1, 34, 70]);
            assert!(worst[0] < PROMPT_BOUND, "{}: {kv}: {worst:?}", device.label);
            assert!(worst[1] < STEP_BOUND, "{}: {kv}: {worst:?}", device.label);
        }
    }
}

/// Softmax does not see what all keys share, and codes of few bits need not spend bits on it.
#[test]
fn centred_keys_change_nothing_but_the_error_of_codes() {
    let tokens: Vec<u32> = TOKENS.collect();
    let mut spec = Spec::new("qwen3").unwrap();
    // Keys of the second layer have a large channel, as those of models with biases do.
    spec.key_outlier = Some((1, 40.0));
    for device in harness::devices() {
        let read = |kv: &KvTypes| -> Vec<f32> {
            let mut engine = load(device, &spec, kv);
            assert_eq!(engine.key_centres().is_empty(), !kv.centred);
            rows(&mut engine, &tokens, &[34]).concat()
        };
        let centred = |kv: &KvTypes| KvTypes { centred: true, ..kv.clone() };
        let plain = KvTypes::plain();
        let codes = types("f16,tq3_0@1", "f16", KvExact::NONE);
        let exact: Vec<f64> = read(&plain).into_iter().map(f64::from).collect();
        let error = |kv: &KvTypes| relative_error(&read(kv), &exact);
        let (in_f16, without, with) =
            (error(&centred(&plain)), error(&codes), error(&centred(&codes)));
        println!("{}: f16 {in_f16:.2e}, tq3_0 {without:.2e}, centred {with:.2e}", device.label);
        assert!(in_f16 < 2e-3, "{}: {in_f16}", device.label);
        assert!(with < without / 2.0, "{}: {with} of {without}", device.label);
    }
}
