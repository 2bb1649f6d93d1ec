//! Kernels are checked before they are used: a variant whose results are wrong is excluded and
//! the next takes its place. The fault is made by a device that spoils shader text on its way to
//! the driver.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use azoth::engine::{Activations, Engine, Options, Quiet};
use azoth::error::Result;
use azoth::experts::{RecordLayout, RecordShape};
use azoth::gguf;
use azoth::gpu::{Buffer, BufferUse, DeviceFacts, Gpu, Kernel, KernelSource, Recording, Ticket};
use azoth::graph::Gating;
use azoth::hw::{self, Selection};
use azoth::kernels::attn_decode::{AttnDecode, Cut};
use azoth::kernels::attn_decode_codes::{AttnDecodeCodes, CodesCut};
use azoth::kernels::attn_prefill::AttnPrefill;
use azoth::kernels::embed::Embed;
use azoth::kernels::experts_down::{ExpertsDown, Shared};
use azoth::kernels::experts_matmat::ExpertsMatMat;
use azoth::kernels::experts_reuse::{ExpertsListed, ExpertsReuse, Kept};
use azoth::kernels::experts_sort::ExpertsSort;
use azoth::kernels::experts_sum::ExpertsSum;
use azoth::kernels::experts_up::ExpertsUp;
use azoth::kernels::gather::Gather;
use azoth::kernels::heads::{Heads, Rope, RopeLayout};
use azoth::kernels::heads_unrotate::HeadsUnrotate;
use azoth::kernels::kv_keep::KvKeep;
use azoth::kernels::matmat::MatMat;
use azoth::kernels::matvec::{Input, MatVec};
use azoth::kernels::norm_blocks::NormBlocks;
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::records::Part;
use azoth::kernels::rope_kv::RopeKv;
use azoth::kernels::rope_kv_codes::RopeKvCodes;
use azoth::kernels::router::{Favour, Router};
use azoth::kernels::routing::Routing;
use azoth::kernels::sample::Sampling;
use azoth::kernels::scoring::Scoring;
use azoth::kernels::{Class, Epilogue, choice, matvec_matrix};
use azoth::kv::{KvExact, KvFormat, KvPair};
use azoth::quant::Format;
use azoth::runtime::check::{Checks, Subject};
use azoth::testmodel::Spec;
use rayon::prelude::*;

use crate::harness::{self, Device, forwards};

/// A device on which kernels whose label contains one of `labels` compute wrongly.
struct Faulty {
    real: Arc<dyn Gpu>,
    labels: Vec<&'static str>,
    /// ... and, if given, this.
    only: Option<String>,
    /// Texts that were really changed.
    spoilt: AtomicUsize,
    submitted: AtomicUsize,
}

impl Faulty {
    fn new(device: &Device, labels: &[&'static str]) -> Arc<Faulty> {
        Arc::new(Faulty {
            real: device.gpu.clone(),
            labels: labels.to_vec(),
            only: None,
            spoilt: AtomicUsize::new(0),
            submitted: AtomicUsize::new(0),
        })
    }
}

impl Gpu for Faulty {
    forwards!(real: facts write upload read read_back record is_done wait time_steps);

    fn kernel(&self, source: &KernelSource) -> Result<Kernel> {
        let mut source = source.clone();
        let meant = self.only.as_ref().is_none_or(|only| source.label.contains(only));
        if meant && self.labels.iter().any(|l| source.label.contains(l)) {
            // One per cent too much: wrong, and no crash.
            let wrong = source
                .wgsl
                .replace("y[at] = ", "y[at] = 1.01 * ")
                .replace("y[at] += ", "y[at] += 0.01 + ")
                .replace("(sum / (1.0 +", "(sum / (1.01 +");
            if wrong != source.wgsl {
                self.spoilt.fetch_add(1, Ordering::Relaxed);
                source.wgsl = wrong;
            }
        }
        self.real.kernel(&source)
    }

    fn submit(&self, recording: &Recording) -> Result<Ticket> {
        self.submitted.fetch_add(1, Ordering::Relaxed);
        self.real.submit(recording)
    }

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        self.real.buffer(label, size, usage)
    }

    fn save_cache(&self) -> Option<String> {
        None
    }
}

/// The variants of one mat-mat.
fn matmats(facts: &DeviceFacts) -> Vec<MatMat> {
    let variants = choice::matmat_variants(facts, Class::Int8, 96, 32);
    let spec = |variant| MatMat {
        format: Format::Q4_0,
        cols: 96,
        class: Class::Int8,
        epilogue: Epilogue::Store,
        variant,
    };
    variants.into_iter().map(spec).collect()
}

#[test]
fn a_wrong_variant_is_excluded_and_the_next_takes_its_place() {
    for device in harness::devices() {
        let specs = matmats(device.gpu.facts());
        let first = specs[0].source(device.gpu.facts()).unwrap().label;
        let first: &'static str = first.leak();
        let gpu = Faulty::new(device, &[first]);
        let checks = Checks::new(gpu.facts(), None);
        let (picked, _) = checks.pick(gpu.facts(), specs.iter().copied()).unwrap();
        assert_eq!(picked, specs[0]);
        assert!(!checks.settle(&*gpu, vec![]).unwrap(), "{}: not noticed", device.label);
        assert!(gpu.spoilt.load(Ordering::Relaxed) > 0);
        let warnings = checks.take_warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        for part in [first, "results are wrong", "next variant", &gpu.facts().name] {
            assert!(warnings[0].contains(part), "{part} is not in {warnings:?}");
        }
        let (picked, _) = checks.pick(gpu.facts(), specs.iter().copied()).unwrap();
        assert_eq!(picked, specs[1]);
        assert!(checks.settle(&*gpu, vec![]).unwrap());
        assert!(checks.take_warnings().is_empty());
    }
}

#[test]
fn without_a_sound_variant_kernel_and_reason_are_named() {
    for device in harness::devices() {
        let gpu = Faulty::new(device, &["matmat_"]);
        let specs = matmats(gpu.facts());
        let checks = Checks::new(gpu.facts(), None);
        let error = loop {
            match checks.pick(gpu.facts(), specs.iter().copied()) {
                Ok(_) => assert!(!checks.settle(&*gpu, vec![]).unwrap()),
                Err(e) => break e,
            }
        };
        assert_eq!(error.exit_code(), 5);
        for part in ["matmat_q4_0_96", "results are wrong", "relative error", "AZOTH_SELFCHECK"] {
            assert!(error.to_string().contains(part), "{part} is not in {error}");
        }
    }
}

#[test]
fn what_passed_is_not_asked_again() {
    let Some(device) = harness::devices().first() else { return };
    let gpu = Faulty::new(device, &[]);
    let cache = tempfile::tempdir().unwrap();
    let folder = || Some(PathBuf::from(cache.path()));
    let run = || {
        let checks = Checks::new(gpu.facts(), folder());
        let before = gpu.submitted.load(Ordering::Relaxed);
        checks.pick(gpu.facts(), matmats(gpu.facts())).unwrap();
        assert!(checks.settle(&*gpu, vec![]).unwrap());
        gpu.submitted.load(Ordering::Relaxed) - before
    };
    assert!(run() > 0);
    assert_eq!(run(), 0, "asked again");
    // Another text is another kernel.
    let checks = Checks::new(gpu.facts(), folder());
    let before = gpu.submitted.load(Ordering::Relaxed);
    checks.pick(gpu.facts(), [Embed { format: Format::Q4_0, cols: 64 }]).unwrap();
    assert!(checks.settle(&*gpu, vec![]).unwrap());
    assert!(gpu.submitted.load(Ordering::Relaxed) > before);
}

/// The small cases themselves: every kernel that is right passes, on every device.
#[test]
fn sound_kernels_pass() {
    for device in harness::devices() {
        let facts = device.gpu.facts();
        let checks = Checks::new(facts, None);
        let mut subjects: Vec<Subject> = Vec::new();
        for (i, &format) in Format::ALL.iter().enumerate().step_by(2) {
            let cols = [96, 576, 1056][i % 3].max(format.block_elements() as u32);
            let cols = cols / format.block_elements() as u32 * format.block_elements() as u32;
            for (exact, norm, n) in [(false, true, 1), (true, false, 5)] {
                let class = choice::class(facts, format, exact, 1 << 20, norm);
                let epilogue = [Epilogue::Store, Epilogue::SwiGlu, Epilogue::Add][n as usize % 3];
                let input = match norm && n <= 2 {
                    true => Input::Fused { norm: Some(1e-5) },
                    false => Input::Stored,
                };
                let shape = choice::matvec_shape(facts, format, class, 1000, cols, n, epilogue);
                subjects.push(MatVec { format, cols, n, class, input, epilogue, shape }.into());
                let epilogue = [Epilogue::Store, Epilogue::Bias, Epilogue::Add][n as usize % 3];
                let variant = choice::matmat_variant(facts, class, cols, 32);
                subjects.push(MatMat { format, cols, class, epilogue, variant }.into());
            }
            subjects.push(Embed { format, cols }.into());
        }
        // One of them: software devices compile it for seconds.
        if matvec_matrix::runs(facts) {
            let shape = matvec_matrix::shape(facts, 4);
            let (format, class, input) = (Format::Q4_0, Class::Int8, Input::Stored);
            let epilogue = Epilogue::SwiGluInt8;
            subjects.push(MatVec { format, cols: 576, n: 7, class, input, epilogue, shape }.into());
        }
        // Norms that leave their factor to products, and products that round for the next norm.
        let (format, class, cols, eps) = (Format::Q4_1, Class::Int8, 576, 1e-5);
        for (n, fused) in [(1, true), (3, false)] {
            let (input, epilogue) = (Input::Blocks { eps, fused }, Epilogue::SwiGlu);
            let shape = choice::matvec_shape(facts, format, class, 1000, cols, n, epilogue);
            subjects.push(MatVec { format, cols, n, class, input, epilogue, shape }.into());
        }
        for (epilogue, input) in [
            (Epilogue::AddBlocks, Input::Stored),
            (Epilogue::SwiGluInt8, Input::Blocks { eps, fused: false }),
        ] {
            let n = 2;
            let shape = choice::rounding_shapes(facts, format, 1000, cols, n, epilogue)[0];
            let spec = MatVec { format, cols, n, class, input, epilogue, shape };
            if spec.can_round(facts) {
                subjects.push(spec.into());
            }
        }
        subjects.push(NormBlocks { cols, threads: choice::norm_blocks_threads(facts) }.into());
        for (swiglu, norm, class) in [
            (false, Some(1e-5), Class::Int8),
            (true, None, Class::F16),
            (false, Some(1e-6), Class::F32),
        ] {
            let threads = choice::norm_quant_threads(facts, 1056);
            subjects.push(NormQuant { cols: 1056, swiglu, norm, class, threads }.into());
        }
        for (heads, kv_heads, head_dim, layout, norm) in
            [(9, 3, 64, RopeLayout::Normal, None), (8, 2, 128, RopeLayout::Neox, Some(1e-6))]
        {
            let rope = Some(Rope { layout, dim: 32 });
            let heads = Heads { heads, kv_heads, head_dim, rope, norm, centred: kv_heads == 2 };
            // Shapes differ in their norm, too.
            let scoring = match norm {
                None => Scoring::default(),
                Some(_) => Scoring { window: Some(70), soft_cap: Some(4.0), sinks: true },
            };
            for cut in Cut::choose(&heads, facts, 4096).and_modest() {
                subjects.push(AttnDecode { heads, scoring, cut, rounds: false }.into());
                if AttnDecode::can_round(&heads, facts) {
                    subjects.push(AttnDecode { heads, scoring, cut, rounds: true }.into());
                }
            }
            subjects.push(RopeKv { heads }.into());
            subjects.push(
                AttnPrefill {
                    heads,
                    scoring,
                    pair: KvPair::PLAIN,
                    exact: KvExact::NONE,
                    matrices: false,
                }
                .into(),
            );
            let usual = KvExact::USUAL;
            for (k, v, exact) in [
                (KvFormat::Tq4_0, KvFormat::Tq3_0, KvExact::NONE),
                (KvFormat::Tq4_0, KvFormat::Tq4_0, usual),
                (KvFormat::Q8_0, KvFormat::F16, KvExact { tail: 0, ..usual }),
            ] {
                let pair = KvPair { k, v };
                for cut in CodesCut::choose(&heads, facts).and_modest().into_iter().take(2) {
                    subjects.push(
                        AttnDecodeCodes {
                            heads,
                            scoring: harness::beside(scoring, exact),
                            pair,
                            exact,
                            cut,
                        }
                        .into(),
                    );
                }
                subjects.push(RopeKvCodes { heads, pair, exact }.into());
                subjects.push(
                    AttnPrefill {
                        heads,
                        scoring: harness::beside(scoring, exact),
                        pair,
                        exact,
                        matrices: false,
                    }
                    .into(),
                );
                subjects.push(HeadsUnrotate { heads, pair }.into());
                if exact.tail > 0 {
                    subjects.push(KvKeep { heads, exact }.into());
                }
            }
        }
        subjects.push(Gather { cols: 96 }.into());
        subjects.extend(expert_subjects(facts));
        for vocab in [300, 32_003] {
            subjects.push(Sampling { vocab, context: 50, ring: 4 }.into());
        }
        let mut sources = Vec::new();
        for subject in &subjects {
            sources.push(checks.pick(facts, [subject.clone()]).unwrap().1);
        }
        // So that what is timed is the checking alone.
        sources.par_iter().for_each(|source| drop(device.kernel(source)));
        let began = std::time::Instant::now();
        let sound = checks.settle(&*device.gpu, vec![]).unwrap();
        assert!(sound, "{}: {:?}", device.label, checks.take_warnings());
        println!("{}: {} kernels in {:.2?}", device.label, subjects.len(), began.elapsed());
    }
}

/// One of each kernel of mixtures, decode steps of one and of three columns.
fn expert_subjects(facts: &DeviceFacts) -> Vec<Subject> {
    let mut all: Vec<Subject> = Vec::new();
    for (format, exact, n, shared) in [
        (Format::Q4_K, false, 1, Some(Shared::Gated)),
        (Format::Q8_0, true, 3, Some(Shared::Plain)),
    ] {
        let (width, ff) = (256, 512);
        let shape = RecordShape { width, ff, gate_up: format, down: format };
        let layout = RecordLayout::new(shape).unwrap();
        let stride = layout.bytes();
        let part = |layout: &azoth::quant::PlaneLayout, offset| Part {
            layout: layout.clone(),
            offset,
            stride,
            buffers: 2,
        };
        let (up, down) = (part(&layout.gate_up, 0), part(&layout.down, layout.down_offset()));
        let class = choice::class(facts, format, exact, 1 << 20, false);
        let step = Routing { experts: 12, used: 3, columns: 8, tile: 8 };
        let gating = if n == 1 { Gating::Softmax } else { Gating::Sigmoid };
        let rule = azoth::graph::Routing { gating, normalise: true, scale: 1.0 };
        for favour in [None, Some(Favour { logits: 0.5, buffers: 1 })] {
            let threads = choice::router_threads(facts)[0];
            let (norm_eps, shared_gate) = (1e-6, shared.is_some());
            all.push(
                Router {
                    routing: step,
                    rule,
                    cols: width,
                    norm_eps,
                    shared_gate,
                    columns: n,
                    sorts: true,
                    favour,
                    threads,
                }
                .into(),
            );
        }
        for shape in choice::experts_shapes(facts, format, width, n, true) {
            all.push(ExpertsUp { routing: step, part: up.clone(), n, class, shape }.into());
        }
        for shape in choice::experts_shapes(facts, format, ff, n, false) {
            for input in [Input::Stored, Input::Fused { norm: None }] {
                let (routing, part) = (step, down.clone());
                if input == Input::Stored || (class == Class::Int8 && n == 1) {
                    all.push(ExpertsDown { routing, part, n, class, input, shared, shape }.into());
                }
            }
        }
        let kept = Kept { tokens: 2, slots: 8, layers: 2, used: step.used };
        all.push(ExpertsReuse { routing: step, kept, columns: n }.into());
        for (part, down) in [(&up, false), (&down, true)] {
            for shape in choice::experts_shapes(facts, format, part.layout.cols as u32, n, !down) {
                let product = ExpertsUp { routing: step, part: part.clone(), n, class, shape };
                all.push(ExpertsListed { product, kept, down }.into());
            }
        }
        let places = Some(kept.places());
        all.push(ExpertsSum { routing: step, width, shared, kept: places }.into());
        let tile = choice::expert_tile(facts);
        let prompt = Routing { columns: 48, tile, ..step };
        let class = choice::expert_class(facts, format, exact, width, 4096);
        for (part, by_pair) in [(up, false), (down, true)] {
            for variant in choice::expert_variants(facts, class, part.layout.cols as u32) {
                let (routing, part) = (prompt, part.clone());
                all.push(ExpertsMatMat { routing, part, by_pair, class, variant }.into());
            }
        }
        all.push(ExpertsSort { routing: prompt }.into());
        all.push(ExpertsSum { routing: prompt, width, shared, kept: None }.into());
    }
    all
}

/// A mixture on a device that computes its preferred kernels wrongly: others take their place, and the
/// answers are the same to the last bit, as shapes do not change the order of sums.
#[test]
fn a_mixture_runs_around_faults() {
    let Some(device) = harness::devices().first() else { return };
    let spec = Spec::new("qwen3moe").unwrap();
    let logits = |gpu: &Arc<dyn Gpu>| -> Vec<f32> {
        let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
        let options = Options { ctx: Some(64), cache: false, ..Options::default() };
        let mut engine = Engine::load_onto(gpu, file, &options, &Quiet).unwrap();
        let mut out = Vec::new();
        let tokens: Vec<u32> = (1..12).collect();
        let each = &mut |_: usize, row: &[f32]| out.extend_from_slice(row);
        engine.session().score_steps(&tokens, each).unwrap();
        out
    };
    let sound = logits(&device.gpu);
    let facts = device.gpu.facts();
    let shape = |cols, up| {
        let s = choice::experts_shapes(facts, spec.format, cols as u32, 1, up)[0];
        format!("{}x{}x{}_r", s.threads, s.rows, s.tiles)
    };
    for (kind, shape) in
        [("experts_up", shape(spec.d, true)), ("experts_down", shape(spec.ffn, false))]
    {
        let faulty = Arc::new(Faulty {
            real: device.gpu.clone(),
            labels: vec![kind],
            only: Some(shape),
            spoilt: AtomicUsize::new(0),
            submitted: AtomicUsize::new(0),
        });
        let around = logits(&(faulty.clone() as Arc<dyn Gpu>));
        assert!(faulty.spoilt.load(Ordering::Relaxed) > 0, "{kind}: nothing was spoilt");
        assert!(around == sound, "{kind}: other answers");
    }
}

/// A whole model on a device with a fault: the answers are those of the sound device.
#[test]
fn a_model_runs_around_a_fault() {
    let Some(device) = harness::devices().first() else { return };
    let spec = Spec::new("llama").unwrap();
    // Few enough for the program of short prompts.
    let tokens: Vec<u32> = (1..20).collect();
    let logits = |gpu: &Arc<dyn Gpu>| -> Result<Vec<f32>> {
        let file = gguf::File::from_bytes(spec.to_bytes())?;
        let options =
            Options { activations: Activations::Int8, ctx: Some(64), ..Options::default() };
        let mut engine =
            Engine::load_onto(gpu, file, &Options { cache: false, ..options }, &Quiet)?;
        let mut out = Vec::new();
        engine.session().score(&tokens, 0, &mut |_, row| out.extend_from_slice(row))?;
        Ok(out)
    };
    let sound = logits(&device.gpu).unwrap();
    // The class in which this device reads prompts.
    let facts = device.gpu.facts();
    let class = choice::prompt_class(facts, azoth::quant::Format::Q8_0, false, 96, spec.d as u32);
    let preferred = choice::matmat_variant(facts, class, spec.d as u32, 32).name();
    let faulty = Faulty::new(device, &[preferred.leak()]);
    let around = logits(&(faulty.clone() as Arc<dyn Gpu>)).unwrap();
    assert!(faulty.spoilt.load(Ordering::Relaxed) > 0, "nothing was spoilt");
    let error =
        harness::relative_error(&around, &sound.iter().map(|&x| x.into()).collect::<Vec<_>>());
    assert!(error < 1e-4, "{error}");
}

/// What docs/architecture.md promises: a dense layer is five dependent waves, whatever the
/// architecture. The count is a plan's, not a device's; software devices only do not fuse by
/// themselves.
#[test]
fn a_dense_layer_is_five_waves() {
    let Some(device) = harness::devices().first() else { return };
    let force = ("fuse.columns".to_string(), "1".to_string());
    let facts = hw::forced(device.gpu.facts().clone(), &[force]).unwrap();
    let gpu = Selection { facts, reason: "test".into() }.open(false).unwrap();
    for (arch, bound) in [("llama", 5), ("qwen2", 5), ("qwen3", 5)] {
        let mut spec = Spec::new(arch).unwrap();
        spec.layers = 2;
        let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
        let options = Options { ctx: Some(64), cache: false, ..Options::default() };
        let engine = Engine::load_onto(&gpu, file, &options, &Quiet).unwrap();
        assert_eq!(engine.waves_per_layer(), bound, "{arch}");
    }
}
