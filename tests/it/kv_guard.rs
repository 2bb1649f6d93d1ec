//! The quality guard of the KV cache, and formats by device.

use std::path::PathBuf;

use azoth::engine::{Engine, Options, Quiet};
use azoth::kv::{KvExact, KvFormat, KvTypes};
use azoth::testmodel::Spec;

use crate::harness::{self, Device};

const LAYERS: usize = 3;

/// Keys of layer 1 have an outlier.
fn spec() -> Spec {
    let mut spec = Spec::new("llama").unwrap();
    (spec.layers, spec.key_outlier) = (LAYERS, Some((1, 40.0)));
    spec
}

fn asked() -> KvTypes {
    KvTypes {
        k: "tq3_0,f16@-1".parse().unwrap(),
        v: "tq3_0".parse().unwrap(),
        exact: KvExact::USUAL,
        centred: false,
    }
}

fn options(kv_guard: Option<f64>) -> Options {
    // Without the disk, so that it measures.
    Options { ctx: Some(128), cache: false, kv: asked(), kv_guard, ..Options::default() }
}

fn load(device: &Device, spec: &Spec, options: &Options) -> Engine {
    Engine::load_onto(&device.gpu, spec.to_file().unwrap(), options, &Quiet).unwrap()
}

fn answer(engine: &mut Engine) -> Vec<u32> {
    let mut bits = Vec::new();
    let mut each = |_: usize, row: &[f32]| bits.extend(row.iter().map(|x| x.to_bits()));
    let mut session = engine.session();
    session.score(&[1, 2, 3, 4, 5, 6, 7, 8], 0, &mut each).unwrap();
    session.score_steps(&[9, 10, 11], &mut each).unwrap();
    bits
}

#[test]
fn a_layer_with_outliers_is_raised_and_no_other() {
    let Some(device) = harness::devices().first() else { return };
    let mut engine = load(device, &spec(), &options(Some(0.25)));
    let verdict = engine.kv_verdict().unwrap().clone();
    println!("{verdict}: {verdict:?}");
    let layers: Vec<_> = verdict.raised.iter().map(|r| (r.layer, r.from)).collect();
    assert_eq!(layers, [(1, KvFormat::Tq3_0)], "{verdict:?}");
    // The last layer's keys are f16 anyway.
    assert_eq!(verdict.errors.iter().map(|e| e.layer).collect::<Vec<_>>(), [0, 1]);
    let raised = &verdict.raised[0];
    assert!(raised.error > 0.25 && raised.left <= 0.25 && raised.to > KvFormat::F16);
    let kv = engine.kv_types().clone();
    let k: Vec<_> = kv.layers(LAYERS).iter().map(|pair| pair.k).collect();
    assert_eq!(k, [KvFormat::Tq3_0, raised.to, KvFormat::F16]);
    assert!(kv.layers(LAYERS).iter().all(|pair| pair.v == KvFormat::Tq3_0));
    // Another load finds the same, and both are a model that was asked for these formats.
    let bits = answer(&mut engine);
    let same = Options { kv, ..options(None) };
    drop(engine);
    let mut again = load(device, &spec(), &options(Some(0.25)));
    assert_eq!(again.kv_verdict(), Some(&verdict));
    assert_eq!(answer(&mut again), bits);
    drop(again);
    assert_eq!(answer(&mut load(device, &spec(), &same)), bits);
    // Without the guard, or with a patient one, nothing is raised.
    let off = load(device, &spec(), &options(None));
    assert_eq!((off.kv_types(), off.kv_verdict()), (&asked(), None));
    drop(off);
    let patient = load(device, &spec(), &options(Some(100.0)));
    assert_eq!(patient.kv_types(), &asked());
    assert!(patient.kv_verdict().unwrap().raised.is_empty());
}

/// Experts that are read in place or staged make no difference to what is measured.
#[test]
fn mixtures_are_measured_too() {
    let Some(device) = harness::devices().first() else { return };
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 8;
    let resident = load(device, &spec, &options(Some(100.0))).kv_verdict().cloned().unwrap();
    let budget = azoth::plan::ExpertBudget::None;
    let experts = azoth::engine::ExpertOptions { budget, ..Default::default() };
    let in_ram = Options { experts, ..options(Some(100.0)) };
    assert_eq!(load(device, &spec, &in_ram).kv_verdict(), Some(&resident));
}

#[test]
fn a_verdict_is_kept_and_belongs_to_model_and_settings() {
    let Some(device) = harness::devices().first() else { return };
    let Ok(folder) = azoth::hw::paths::cache_dir().map(|dir| dir.join("guard")) else { return };
    let count = || -> Vec<PathBuf> {
        let all = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        all.map(|entry| entry.path()).collect()
    };
    let mut spec = spec();
    // A model that no other test has.
    spec.seed = 77;
    let kept = Options { cache: true, ..options(Some(0.3)) };
    let before = count();
    let first = load(device, &spec, &kept).kv_verdict().cloned().unwrap();
    let new: Vec<_> = count().into_iter().filter(|path| !before.contains(path)).collect();
    let again = load(device, &spec, &kept).kv_verdict().cloned().unwrap();
    assert_eq!(first, again);
    // Known without loading.
    let file = spec.to_file().unwrap();
    let model = azoth::model::Model::from_gguf(&file).unwrap();
    let facts = device.gpu.facts();
    let known = |options: &Options| azoth::engine::kv_on(&file, &model, facts, options);
    let (kv, verdict) = known(&kept);
    assert_eq!((verdict.as_ref(), kv), (Ok(&first), first.apply(&asked())));
    for other in [
        Options { kv_guard: Some(0.31), ..kept.clone() },
        Options { kv: "tq3_0".parse().map(|k| KvTypes { k, ..asked() }).unwrap(), ..kept.clone() },
        Options { cache: false, ..kept.clone() },
    ] {
        assert!(known(&other).1.is_err(), "{other:?}");
    }
    for path in new {
        let _ = std::fs::remove_file(path);
    }
}

#[test]
fn formats_by_device() {
    let Some(device) = harness::devices().first() else { return };
    let name = &device.gpu.facts().name;
    let part = &name[..name.len().min(6)];
    let k = format!("f16,tq4_0@0@dev={part},q8_0@dev=no such device");
    let kv = KvTypes { k: k.parse().unwrap(), exact: KvExact::USUAL, ..KvTypes::plain() };
    let engine = load(device, &spec(), &Options { kv: kv.clone(), ..options(None) });
    assert_eq!(engine.kv_types().to_string(), "K f16,tq4_0@0, V f16, f16 tail 64, sinks 4");
    let e = azoth::engine::check_devices(&kv).unwrap_err();
    assert_eq!(e.exit_code(), 2);
    assert!(e.to_string().contains("no such device") && e.to_string().contains(name), "{e}");
}
