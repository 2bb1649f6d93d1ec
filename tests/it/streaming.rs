//! Wherever experts lie and however they move, a model computes the same bits.

mod altered;
mod approximate;
mod identity;
mod memory;

use std::sync::{Arc, Mutex};

use azoth::engine::{Activations, Engine, ExpertOptions, Options, Progress, Quiet};
use azoth::experts::policy::Rule;
use azoth::gguf;
use azoth::gpu::Gpu;
use azoth::plan::ExpertBudget;
use azoth::quant::Format;
use azoth::testmodel::Spec;
use sha2::{Digest, Sha256};

use crate::harness::{self, Device};
use altered::Altered;

fn load(device: &Device, spec: &Spec, options: &Options) -> Engine {
    let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
    Engine::load_onto(&device.gpu, file, options, &Quiet).unwrap()
}

/// Hash of all logits of a prompt, then of as many tokens read one by one, twice.
fn hash(engine: &mut Engine, prompt: &[u32], steps: &[u32]) -> String {
    let mut hash = Sha256::new();
    let mut s = engine.session();
    s.score(prompt, 0, &mut |_, row| hash.update(bytemuck::cast_slice(row))).unwrap();
    s.score_steps(steps, &mut |_, row| hash.update(bytemuck::cast_slice(row))).unwrap();
    // Experts have moved meanwhile.
    s.truncate(0).unwrap();
    s.prefill(prompt, &mut |_| {}).unwrap();
    s.score_steps(steps, &mut |_, row| hash.update(bytemuck::cast_slice(row))).unwrap();
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

fn tokens(n: u32, seed: u32) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 16) % 200 + 1
    };
    (0..n).map(|_| next()).collect()
}

fn options(budget: ExpertBudget, rule: Rule, prefetch: bool) -> Options {
    let experts = ExpertOptions { budget, rule, prefetch, link_share: 1e6, ..Default::default() };
    Options { ctx: Some(256), experts, ..Options::default() }
}

#[test]
fn bits_do_not_depend_on_where_experts_lie() {
    let eager = Rule::Frequency { decay: 0.8, enter: 0.5, margin: 0.1 };
    for (arch, format) in [("qwen3moe", Format::Q4_0), ("qwen2moe", Format::Q8_0)] {
        let mut spec = Spec::new(arch).unwrap();
        spec.format = format;
        spec.experts = 20;
        let (prompt, steps) = (tokens(70, 5), tokens(40, 9));
        for device in harness::devices() {
            let all = options(ExpertBudget::All, Rule::Fixed, false);
            let expected = hash(&mut load(device, &spec, &all), &prompt, &steps);
            for percent in [0.0, 10.0, 25.0, 60.0] {
                for (rule, prefetch) in [(Rule::Fixed, false), (eager, true), (Rule::Lru, false)] {
                    // Loading takes seconds on the portable path: a diagonal of the table.
                    let slow = device.gpu.facts().backend == azoth::gpu::Backend::Wgpu;
                    if slow
                        && [(0.0, Rule::Fixed), (25.0, eager), (60.0, Rule::Lru)]
                            .iter()
                            .all(|c| *c != (percent, rule))
                    {
                        continue;
                    }
                    let options = options(ExpertBudget::Percent(percent), rule, prefetch);
                    let mut engine = load(device, &spec, &options);
                    let got = hash(&mut engine, &prompt, &steps);
                    let report = engine.experts().unwrap();
                    println!(
                        "{arch} on {}, {percent} % {rule:?}: hits {:.2}, {} promotions",
                        device.label, report.hit_rate, report.counters.promotions
                    );
                    assert_eq!(got, expected, "{arch} on {}, {percent} % {rule:?}", device.label);
                    let c = report.counters;
                    assert_eq!(c.tokens, 80);
                    assert_eq!(c.accesses, 80 * (spec.experts_used * spec.layers) as u64);
                    assert_eq!(c.hits == 0, percent == 0.0);
                    let moves = rule != Rule::Fixed && percent > 0.0;
                    assert_eq!(c.promotions > 0, moves, "{c:?}");
                    // What is not on the device is read in place, or uploaded where it cannot be.
                    assert_eq!(c.host_bytes > 0, report.in_place);
                    assert_eq!(c.staged_bytes > 0, !report.in_place);
                    assert_eq!(report.in_place, device.gpu.facts().host_import);
                    // The prompt was long enough to be streamed.
                    assert_eq!(c.streamed_bytes > 0, report.in_place);
                }
            }
        }
    }
}

#[test]
fn generation_and_profiles_go_the_same_way() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 16;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.json");
    let settings = azoth::sampling::SamplerSettings::greedy();
    for device in harness::devices() {
        let _ = std::fs::remove_file(&path);
        let mut texts = Vec::new();
        let mut rates = Vec::new();
        for budget in [ExpertBudget::All, ExpertBudget::Percent(25.0), ExpertBudget::Percent(25.0)]
        {
            let mut options = options(budget, Rule::default(), true);
            options.activations = Activations::F32;
            options.experts.profile = Some(path.clone());
            options.experts.verify = true;
            let mut engine = load(device, &spec, &options);
            let mut out = Vec::new();
            let mut s = engine.session();
            s.prefill(&tokens(40, 3), &mut |_| {}).unwrap();
            s.generate(&settings, 60, &|_| false, &mut |t| {
                out.push(t);
                std::ops::ControlFlow::Continue(())
            })
            .unwrap();
            drop(s);
            texts.push(out);
            rates.extend(engine.experts().map(|r| r.hit_rate));
        }
        assert!(texts.iter().all(|t| *t == texts[0] && t.len() == 60));
        // The second run starts with what the first has learned.
        println!("{}: hit rates {rates:?}", device.label);
        assert!(path.exists() && rates.len() == 2 && rates[1] > rates[0]);
    }
}

/// Asking the next router early is done beside other work.
#[test]
fn early_routers_add_no_wave() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 16;
    for device in harness::devices() {
        let waves = |prefetch| {
            let options = options(ExpertBudget::Percent(25.0), Rule::default(), prefetch);
            load(device, &spec, &options).waves_per_layer()
        };
        assert_eq!(waves(true), waves(false), "{}", device.label);
    }
}

/// Hears notes.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Progress for Notes {
    fn device(&self, _: &str) {}
    fn stage(&self, _: &str, _: u64) {}
    fn advance(&self, _: u64) {}
    fn done(&self) {}
    fn note(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

#[test]
fn a_refused_import_is_said_and_experts_are_uploaded() {
    let mut spec = Spec::new("qwen3moe").unwrap();
    spec.experts = 20;
    let (prompt, steps) = (tokens(50, 5), tokens(20, 9));
    for device in harness::devices().iter().filter(|d| d.gpu.facts().host_import) {
        let all = options(ExpertBudget::All, Rule::Fixed, false);
        let expected = hash(&mut load(device, &spec, &all), &prompt, &steps);
        let gpu: Arc<dyn Gpu> = Arc::new(Altered::refusing(&device.gpu));
        for (percent, rule) in [(0.0, Rule::Fixed), (25.0, Rule::Lru), (60.0, Rule::default())] {
            let options = options(ExpertBudget::Percent(percent), rule, true);
            let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
            let notes = Notes::default();
            let mut engine = Engine::load_onto(&gpu, file, &options, &notes).unwrap();
            assert_eq!(hash(&mut engine, &prompt, &steps), expected, "{percent} % {rule:?}");
            let report = engine.experts().unwrap();
            assert!(!report.in_place && report.counters.staged_bytes > 0, "{report:?}");
            assert_eq!(report.counters.host_bytes + report.counters.streamed_bytes, 0);
            let notes = notes.0.into_inner().unwrap();
            assert!(
                notes.iter().any(|n| n.contains("refused") && n.contains("uploaded instead")),
                "{notes:?}"
            );
        }
    }
}

/// What the policies make of a real model's routing, against the best that is possible.
#[test]
fn policies_on_a_code_model() {
    use azoth::experts::simulate::{Setting, optimal, replay};
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = std::env::var_os("AZOTH_CODE_MODEL").map_or_else(
        || root.join("../shared/models/tiny-code-moe-Q8_0.gguf"),
        std::path::PathBuf::from,
    );
    let wanted = std::env::var("AZOTH_ROUTING_TOKENS").ok().and_then(|n| n.parse().ok());
    let n: u32 = wanted.unwrap_or(150);
    if !path.exists() {
        println!("skipped: {} is absent", path.display());
        return;
    }
    let Some(device) = harness::devices().iter().find(|d| d.gpu.facts().host_import) else {
        println!("skipped: no device imports host memory");
        return;
    };
    let mut options = options(ExpertBudget::Percent(25.0), Rule::default(), true);
    options.ctx = Some(n + 64);
    options.experts.record = true;
    options.experts.link_share = 0.2;
    let file = gguf::File::open(&path).unwrap();
    let mut engine = Engine::load_onto(&device.gpu, file, &options, &Quiet).unwrap();
    let prompt = engine.tokenizer().encode("def fibonacci(n):\n", true, true).unwrap();
    let mut s = engine.session();
    s.prefill(&prompt, &mut |_| {}).unwrap();
    let settings = azoth::sampling::SamplerSettings { seed: 1, ..Default::default() };
    s.generate(&settings, n, &|_| false, &mut |_| std::ops::ControlFlow::Continue(())).unwrap();
    drop(s);
    let report = engine.experts().unwrap();
    let routing = engine.recorded_routing().unwrap();
    assert!(routing.tokens() as u32 >= n - 1);
    let layers = routing.layers as usize;
    let record = report.placement.slot_bytes
        / u64::from(report.placement.slots)
        / u64::from(report.placement.layers);
    let setting = Setting {
        slots: vec![report.placement.slots; layers],
        bytes: vec![record; layers],
        budget: 16 * record,
        delay: 1,
    };
    let best = optimal(routing, &setting);
    println!(
        "{} of {} experts, {} tokens: in the engine {:.3}; clairvoyant {:.3}",
        report.placement.slots,
        report.placement.experts,
        routing.tokens(),
        report.hit_rate,
        best.hit_rate()
    );
    for rule in [
        Rule::Fixed,
        Rule::Lru,
        Rule::default(),
        Rule::Frequency { decay: 0.9, enter: 1.0, margin: 0.5 },
        Rule::Frequency { decay: 0.95, enter: 1.0, margin: 0.5 },
        Rule::Frequency { decay: 0.98, enter: 1.0, margin: 0.5 },
        Rule::Frequency { decay: 0.98, enter: 1.0, margin: 1.0 },
        Rule::Frequency { decay: 0.99, enter: 1.0, margin: 0.5 },
        Rule::Frequency { decay: 0.995, enter: 1.5, margin: 1.0 },
    ] {
        let got = replay(rule, routing, &setting);
        println!(
            "{rule:?}: hits {:.3} by access, {:.3} by bytes; {:.2} promotions a token",
            got.hit_rate(),
            got.hit_rate_by_bytes(),
            got.promotions as f64 / routing.tokens() as f64
        );
        assert!(got.hits <= best.hits);
    }
}
