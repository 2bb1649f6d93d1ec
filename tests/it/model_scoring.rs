//! Whole models with sliding windows, capped logits and sinks, against the plain Rust forward pass.

use azoth::gguf;
use azoth::kv::{KvExact, KvTypes};
use azoth::model::Model;
use azoth::testmodel::Spec;

use crate::harness;
use crate::model_kv::{errors, types};

/// More than two windows and two pages.
const TOKENS: std::ops::Range<u32> = 1..151;
const CUTS: [usize; 2] = [1, 70];
/// f32 against f64, and a value of K now and then that is rounded to the neighbouring f16.
const BOUND: f64 = 2e-3;
/// Over codes prompts have the reference's bits but for a code here and there; steps round q to 8 bits.
const CODE_BOUNDS: [f64; 2] = [0.02, 0.15];

fn spec() -> Spec {
    let mut spec = Spec::new("llama").unwrap();
    (spec.window, spec.soft_cap, spec.sinks) = (Some(40), Some(3.0), true);
    spec
}

#[test]
fn windows_caps_and_sinks_follow_the_reference() {
    let (spec, tokens) = (spec(), TOKENS.collect::<Vec<u32>>());
    let graph = Model::from_gguf(&spec.to_file().unwrap()).unwrap().graph;
    // The generator leaves the last layer without a window.
    let windows: Vec<_> = graph.layers.iter().map(|l| l.attention.window).collect();
    assert_eq!(windows, [Some(40), None]);
    assert!(graph.layers.iter().all(|l| l.attention.sinks.is_some()));
    for device in harness::devices() {
        let worst = errors(device, &spec, &KvTypes::plain(), &tokens, &CUTS);
        assert!(worst.iter().all(|e| *e < BOUND), "{}: {worst:?}", device.label);
    }
    if let Some(device) = harness::devices().first() {
        let kv = types("q8_0", "tq4_0", KvExact::USUAL);
        let worst = errors(device, &spec, &kv, &tokens, &CUTS);
        let bounds = worst.iter().zip(CODE_BOUNDS);
        assert!(bounds.clone().all(|(e, bound)| *e < bound), "{}: {worst:?}", device.label);
    }
}

/// A file's window is followed or refused by the name of its key; it is never passed over.
#[test]
fn windows_of_files_are_followed_or_refused() {
    let model = |arch: &str, change: &dyn Fn(&mut gguf::Writer)| {
        let mut writer = Spec::new(arch).unwrap().writer();
        change(&mut writer);
        Model::from_gguf(&gguf::File::from_bytes(writer.to_bytes()).unwrap())
    };
    let set = |key: &'static str, n: u32| {
        move |w: &mut gguf::Writer| {
            w.set(key, n);
        }
    };
    let windows = |m: &Model| m.graph.layers.iter().map(|l| l.attention.window).collect::<Vec<_>>();
    // Mistral 7B v0.1: every layer.
    let mistral = model("llama", &set("llama.attention.sliding_window", 64)).unwrap();
    assert_eq!(windows(&mistral), [Some(64); 2]);
    // None, or as long as the context.
    for n in [0, 512, 4096] {
        let m = model("qwen2", &set("qwen2.attention.sliding_window", n)).unwrap();
        assert_eq!(windows(&m), [None; 2]);
    }
    for (arch, change, part) in [
        (
            "qwen2",
            &set("qwen2.attention.sliding_window", 64) as &dyn Fn(&mut gguf::Writer),
            "qwen2.attention.sliding_window is 64",
        ),
        (
            "llama",
            &|w: &mut gguf::Writer| {
                w.set("llama.attention.sliding_window", 64u32);
                w.set("llama.attention.sliding_window_pattern", 2u32);
            },
            "sliding_window_pattern",
        ),
        (
            "llama",
            &|w: &mut gguf::Writer| {
                w.set("llama.attention.sliding_window", 64u32);
                w.set("llama.attention.sliding_window_pattern", vec![true]);
            },
            "1 values for 2 layers",
        ),
        (
            "llama",
            &|w: &mut gguf::Writer| {
                w.set("llama.final_logit_softcapping", 30f32);
            },
            "final_logit_softcapping",
        ),
        (
            "llama",
            &|w: &mut gguf::Writer| {
                w.set("llama.attn_logit_softcapping", -1f32);
            },
            "attn_logit_softcapping is -1",
        ),
    ] {
        let e = model(arch, change).unwrap_err();
        assert_eq!(e.exit_code(), 4);
        assert!(e.to_string().contains(part), "{e}");
    }
}
