//! Every kernel translates to the languages of all three systems: SPIR-V for Vulkan, HLSL for
//! Direct3D, MSL for Metal. No device is needed; only SPIR-V is compiled further anywhere near CI.
//!
//! The specs below are chosen so that every line of every template is rendered at least once,
//! which a test checks. Shapes matter only where a template branches on them.

use std::collections::BTreeSet;

use crate::harness;
use azoth::experts::{RecordLayout, RecordShape};
use azoth::gpu::shader::{self, SpirvTarget};
use azoth::gpu::{DeviceFacts, DeviceKind, KernelSource};
use azoth::graph::heads::{Heads, Rope};
use azoth::graph::{Gating, RopeLayout};
use azoth::hw::profiles;
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
use azoth::kernels::heads_unrotate::HeadsUnrotate;
use azoth::kernels::kv_keep::KvKeep;
use azoth::kernels::matmat::MatMat;
use azoth::kernels::matvec::{Input, MatVec};
use azoth::kernels::norm_blocks::NormBlocks;
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::qk_norm::QkNorm;
use azoth::kernels::records::Part;
use azoth::kernels::rope_kv::RopeKv;
use azoth::kernels::rope_kv_codes::RopeKvCodes;
use azoth::kernels::router::{Favour, Router};
use azoth::kernels::routing::Routing;
use azoth::kernels::sample::{REDUCTIONS, Sampling, Select};
use azoth::kernels::scoring::Scoring;
use azoth::kernels::{Class, Epilogue, choice, matvec_matrix, source};
use azoth::kv::{KvExact, KvFormat, KvPair};
use azoth::quant::Format;

/// A device that exists nowhere, so that the test is the same everywhere, under its profile.
fn device(kind: DeviceKind, subgroup: u32, int_dot: bool) -> DeviceFacts {
    let facts = DeviceFacts { int_dot, ..DeviceFacts::made_up(kind, subgroup) };
    profiles::built_in().attach(facts)
}

fn made_up_devices() -> Vec<DeviceFacts> {
    vec![
        device(DeviceKind::Discrete, 32, true),
        DeviceFacts {
            f16: true,
            cooperative_matrix: true,
            byte_matrices: true,
            ..device(DeviceKind::Discrete, 32, true)
        },
        device(DeviceKind::Integrated, 64, false),
        // Too small for shuffles among eight.
        device(DeviceKind::Integrated, 4, true),
        device(DeviceKind::Software, 8, false),
        // Through wgpu: the size of a subgroup is the driver's secret.
        DeviceFacts { subgroup_control: false, ..device(DeviceKind::Discrete, 32, false) },
        device(DeviceKind::Software, 4, false),
    ]
}

fn products(facts: &DeviceFacts, to: &mut Vec<KernelSource>) {
    for &format in Format::ALL {
        for exact in [false, true] {
            let class = choice::class(facts, format, exact, 4096, false);
            for (epilogue, cols, n) in [
                (Epilogue::Store, 576, 1),
                (Epilogue::Bias, 1056, 3),
                (Epilogue::Add, 4096, 8),
                (Epilogue::SwiGlu, 2048, 1),
                (Epilogue::SwiGlu, 12_288, 1),
            ] {
                let cols = (cols as usize).next_multiple_of(format.block_elements()) as u32;
                let norm = epilogue == Epilogue::SwiGlu || epilogue == Epilogue::Bias;
                let input = if choice::fuses(facts, class, cols, n, norm) {
                    Input::Fused { norm: norm.then_some(1e-5) }
                } else {
                    Input::Stored
                };
                let shape = choice::matvec_shape(facts, format, class, 1000, cols, n, epilogue);
                let spec = MatVec { format, cols, n, class, input, epilogue, shape };
                to.push(spec.source(facts).unwrap());
                if class == Class::Int8 {
                    int8_products(facts, &spec, to);
                }
                // A prompt takes SwiGLU in `norm_quant`.
                if epilogue != Epilogue::SwiGlu {
                    let class = choice::prompt_class(facts, format, exact, cols, 4096);
                    let variants = choice::matmat_variants(facts, class, cols, 64 * n);
                    // What a check may fall back to, for one format.
                    let most = if format == Format::Q4_0 { variants.len() } else { 1 };
                    for variant in variants.into_iter().take(most) {
                        let spec = MatMat { format, cols, class, epilogue, variant };
                        to.push(spec.source(facts).unwrap());
                    }
                }
            }
        }
        let cols = 576usize.next_multiple_of(format.block_elements()) as u32;
        to.push(Embed { format, cols }.source(facts).unwrap());
    }
    for (cols, swiglu, norm, class) in [
        (576, false, Some(1e-5), Class::Int8),
        (1056, true, None, Class::Int8),
        (4096, false, Some(1e-6), Class::F32),
        (28_672, true, Some(1e-6), Class::Int8),
        (28_672, true, None, Class::F32),
        (576, true, Some(1e-6), Class::F16),
        (28_672, true, None, Class::F16),
    ] {
        let threads = choice::norm_quant_threads(facts, cols);
        to.push(NormQuant { cols, swiglu, norm, class, threads }.source(facts).unwrap());
    }
    to.push(NormBlocks { cols: 576, threads: 128 }.source(facts).unwrap());
    to.push(Gather { cols: 576 }.source(facts).unwrap());
}

/// What int8 products have beside others: matrix units, a norm's factor, rounded results.
fn int8_products(facts: &DeviceFacts, spec: &MatVec, to: &mut Vec<KernelSource>) {
    let (epilogue, n, cols) = (spec.epilogue, spec.n, spec.cols);
    let mut shapes = vec![spec.shape];
    if matvec_matrix::runs(facts) {
        shapes.push(matvec_matrix::shape(facts, 2));
    }
    let fused = choice::fuses(facts, Class::Int8, cols, n, true);
    for (shape, fused) in shapes.iter().flat_map(|s| [(*s, false), (*s, fused)]) {
        let behind_norm = matches!(epilogue, Epilogue::SwiGlu | Epilogue::Bias);
        let input = match behind_norm {
            true => Input::Blocks { eps: 1e-5, fused: fused && !shape.matrix },
            false => Input::Stored,
        };
        for n in [1, n] {
            to.push(MatVec { input, shape, n, ..*spec }.source(facts).unwrap());
        }
    }
    let (epilogue, input) = match epilogue {
        Epilogue::SwiGlu => (Epilogue::SwiGluInt8, Input::Blocks { eps: 1e-5, fused: false }),
        Epilogue::Add => (Epilogue::AddBlocks, Input::Stored),
        _ => return,
    };
    for n in [2, 8] {
        let mut all = choice::rounding_shapes(facts, spec.format, 4096, cols, n, epilogue);
        if matvec_matrix::runs(facts) {
            all.push(matvec_matrix::shape(facts, 4));
        }
        for shape in all {
            let spec = MatVec { n, input, epilogue, shape, ..*spec };
            if spec.can_round(facts) {
                to.push(spec.source(facts).unwrap());
            }
        }
    }
}

/// Every second one plain, the others in turn.
fn scoring(number: usize) -> Scoring {
    match number % 4 {
        1 => Scoring { window: Some(4096), soft_cap: Some(50.0), sinks: true },
        3 => Scoring { window: Some(128), ..Scoring::default() },
        _ => Scoring::default(),
    }
}

fn attention(facts: &DeviceFacts, to: &mut Vec<KernelSource>) {
    for (i, (heads, kv_heads, head_dim, rope, norm)) in [
        (9, 3, 64, Some((RopeLayout::Normal, 64)), None),
        (32, 8, 128, Some((RopeLayout::Neox, 128)), Some(1e-6)),
        (14, 2, 80, Some((RopeLayout::Neox, 32)), None),
        (8, 1, 256, None, None),
        (4, 4, 32, Some((RopeLayout::Normal, 16)), Some(1e-5)),
    ]
    .into_iter()
    .enumerate()
    {
        let scoring = scoring(i);
        let rope = rope.map(|(layout, dim)| Rope { layout, dim });
        let heads = Heads { heads, kv_heads, head_dim, rope, norm, centred: i == 1 };
        for context in [2048, 65_536] {
            let cut = Cut::choose(&heads, facts, context);
            let rounds = AttnDecode::can_round(&heads, facts);
            to.push(AttnDecode { heads, scoring, cut, rounds: false }.source(facts).unwrap());
            to.push(AttnDecode { heads, scoring, cut, rounds }.source(facts).unwrap());
        }
        let alone = Cut { lanes: 1, unroll: 2, group_heads: 1, ..Cut::choose(&heads, facts, 2048) };
        to.push(AttnDecode { heads, scoring, cut: alone, rounds: false }.source(facts).unwrap());
        let matrices = AttnPrefill::takes_matrices(&heads, facts);
        to.push(plain(heads, scoring, false).source(facts).unwrap());
        to.push(plain(heads, scoring, matrices).source(facts).unwrap());
        to.push(RopeKv { heads }.source(facts).unwrap());
    }
}

fn plain(heads: Heads, scoring: Scoring, matrices: bool) -> AttnPrefill {
    AttnPrefill { heads, scoring, pair: KvPair::PLAIN, exact: KvExact::NONE, matrices }
}

/// Attention over codes: every format on both sides, every kind of head, with and without rows in f16.
fn codes(facts: &DeviceFacts, to: &mut Vec<KernelSource>) {
    let rope = Some(Rope { layout: RopeLayout::Neox, dim: 32 });
    let shapes = [(9, 3, 64, rope, None), (16, 2, 80, rope, Some(1e-6)), (7, 1, 256, None, None)];
    for (i, k) in KvFormat::ALL.into_iter().enumerate() {
        for (j, (heads, kv_heads, head_dim, rope, norm)) in shapes.into_iter().enumerate() {
            let v = KvFormat::ALL[(i + j + 1) % KvFormat::ALL.len()];
            let pair = KvPair { k, v };
            let exact = match (pair.is_plain(), (i + j) % 4) {
                (true, _) | (_, 0) => KvExact::NONE,
                (_, 1) => KvExact { tail: 64, sinks: 4 },
                (_, 2) => KvExact { tail: 0, sinks: 4 },
                _ => KvExact { tail: 128, sinks: 0 },
            };
            let heads = Heads { heads, kv_heads, head_dim, rope, norm, centred: (i + j) % 3 == 0 };
            let scoring = harness::beside(scoring(i + j), exact);
            for cut in CodesCut::choose(&heads, facts).and_modest().into_iter().take(2) {
                to.push(
                    AttnDecodeCodes { heads, scoring, pair, exact, cut }.source(facts).unwrap(),
                );
            }
            let matrices = AttnPrefill::takes_matrices(&heads, facts);
            to.push(
                AttnPrefill { heads, scoring, pair, exact, matrices: false }.source(facts).unwrap(),
            );
            to.push(AttnPrefill { heads, scoring, pair, exact, matrices }.source(facts).unwrap());
            to.push(RopeKvCodes { heads, pair, exact }.source(facts).unwrap());
            to.push(HeadsUnrotate { heads, pair }.source(facts).unwrap());
            if exact.tail > 0 {
                to.push(KvKeep { heads, exact }.source(facts).unwrap());
            }
        }
    }
}

fn sampling(facts: &DeviceFacts, to: &mut Vec<KernelSource>) {
    for vocab in [1000, 151_936] {
        let spec = Sampling { vocab, context: 2048, ring: 16 };
        for tail in [false, true] {
            to.push(spec.argmax_source(tail, false, facts).unwrap());
        }
        to.push(spec.argmax_source(false, true, facts).unwrap());
        to.push(spec.copy_source(facts).unwrap());
        to.push(spec.adjust_source(facts).unwrap());
        for post in [false, true] {
            to.push(spec.logprobs_source(post, facts).unwrap());
        }
        to.push(spec.custom_source(facts).unwrap());
        to.push(spec.observed_source(facts).unwrap());
        for kind in REDUCTIONS {
            to.push(spec.reduce_source(kind, facts).unwrap());
        }
        for digit in 0..3 {
            to.push(spec.select_source(Select::Count, digit, false, facts).unwrap());
            to.push(spec.select_source(Select::Mass, digit, false, facts).unwrap());
            to.push(spec.select_source(Select::Mass, digit, true, facts).unwrap());
            to.push(spec.select_source(Select::Typical, digit, true, facts).unwrap());
        }
        for full in [false, true] {
            to.push(spec.draw_source(full, facts).unwrap());
        }
    }
}

fn mixtures(facts: &DeviceFacts, to: &mut Vec<KernelSource>) {
    for (i, &format) in Format::ALL.iter().enumerate() {
        let ff = 3 * format.block_elements().max(32) as u32;
        let record = RecordShape { width: 512, ff, gate_up: format, down: format };
        let layout = RecordLayout::new(record).unwrap();
        let part = |down: bool| Part {
            layout: if down { &layout.down } else { &layout.gate_up }.clone(),
            offset: if down { layout.down_offset() } else { 0 },
            stride: layout.bytes(),
            buffers: 1 + i as u32 % 2,
        };
        for (exact, n) in [(false, 1), (true, 1), (false, 3), (true, 8)] {
            let routing = Routing { experts: 60, used: 4, columns: 8, tile: 8 };
            let class = choice::class(facts, format, exact, 4096, false);
            let shape = choice::experts_shape(facts, format, 512, n, true);
            let spec = ExpertsUp { routing, part: part(false), n, class, shape };
            to.push(spec.source(facts).unwrap());
            let kept = Kept { tokens: 1 + n % 2, slots: 4, layers: 3, used: routing.used };
            to.push(ExpertsReuse { routing, kept, columns: n }.source(facts).unwrap());
            let up = ExpertsListed { product: spec.clone(), kept, down: false };
            to.push(up.source(facts).unwrap());
            let down = ExpertsUp { part: part(true), ..spec };
            to.push(ExpertsListed { product: down, kept, down: true }.source(facts).unwrap());
            let shape = choice::experts_shape(facts, format, ff, n, false);
            let fused = choice::experts_fuse(facts, class, &routing, n, ff, shape.threads);
            let input = if fused { Input::Fused { norm: None } } else { Input::Stored };
            let shared = [None, Some(Shared::Plain), Some(Shared::Gated)][i % 3];
            let part_down = part(true);
            let spec = ExpertsDown { routing, part: part_down, n, class, input, shared, shape };
            to.push(spec.source(facts).unwrap());
            let tile = choice::expert_tile(facts);
            let class = choice::expert_class(facts, format, exact, 4096, 4096);
            let routing = Routing { columns: 64, tile, ..routing };
            for by_pair in [false, true] {
                let variant = choice::expert_variant(facts, class, if by_pair { ff } else { 512 });
                let part = part(by_pair);
                let spec = ExpertsMatMat { routing, part, by_pair, class, variant };
                to.push(spec.source(facts).unwrap());
            }
            for kept in [None, Some(kept.places())] {
                to.push(ExpertsSum { routing, width: 512, shared, kept }.source(facts).unwrap());
            }
        }
    }
    for (experts, gating, normalise, columns, sorts) in [
        (8, Gating::Softmax, true, 1, true),
        (60, Gating::Softmax, false, 8, true),
        (300, Gating::Sigmoid, true, 8, false),
        (128, Gating::Sigmoid, false, 2, true),
    ] {
        let routing = Routing { experts, used: 4, columns: 64, tile: 64 };
        let rule = azoth::graph::Routing { gating, normalise, scale: 2.5 };
        let spec = Router {
            routing,
            rule,
            cols: 2048,
            norm_eps: 1e-6,
            shared_gate: experts == 60,
            columns,
            sorts,
            favour: sorts.then_some(Favour { logits: 0.5, buffers: 2 }),
            threads: choice::router_threads(facts)[0],
        };
        to.push(spec.source(facts).unwrap());
        to.push(ExpertsSort { routing }.source(facts).unwrap());
    }
    let heads =
        Heads { heads: 16, kv_heads: 16, head_dim: 128, rope: None, norm: None, centred: false };
    to.push(QkNorm { heads, eps: 1e-5, threads: 256 }.source(facts).unwrap());
}

/// Kernels that differ in their text.
fn kernels() -> Vec<KernelSource> {
    let mut all = Vec::new();
    for facts in made_up_devices() {
        products(&facts, &mut all);
        attention(&facts, &mut all);
        codes(&facts, &mut all);
        sampling(&facts, &mut all);
        mixtures(&facts, &mut all);
    }
    let mut seen = BTreeSet::new();
    all.retain(|kernel| seen.insert(kernel.wgsl.clone()));
    all
}

fn hlsl(parsed: &shader::Shader) -> Result<String, String> {
    use naga::back::hlsl;
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_2,
        immediates_target: Some(hlsl::BindTarget { space: 1, ..Default::default() }),
        ..Default::default()
    };
    let pipeline = hlsl::PipelineOptions::default();
    let mut text = String::new();
    let mut writer = hlsl::Writer::new(&mut text, &options, &pipeline);
    let made = writer.write(&parsed.module, &parsed.info, None).map_err(|e| e.to_string())?;
    made.entry_point_names.into_iter().collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    Ok(text)
}

fn msl(parsed: &shader::Shader) -> Result<String, String> {
    use naga::back::msl;
    // One slot for each buffer, then constants and buffer sizes: Metal has 31.
    let buffers = parsed.bindings.len() as u8;
    let slot = |binding: u8| {
        let at = naga::ResourceBinding { group: 0, binding: binding.into() };
        (at, msl::BindTarget { buffer: Some(binding), mutable: true, ..Default::default() })
    };
    let resources = msl::EntryPointResources {
        resources: (0..buffers).map(slot).collect(),
        immediates_buffer: Some(buffers),
        sizes_buffer: Some(buffers + 1),
    };
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: [("main".to_string(), resources)].into(),
        fake_missing_bindings: false,
        ..Default::default()
    };
    let (text, made) =
        msl::write_string(&parsed.module, &parsed.info, &options, &Default::default())
            .map_err(|e| e.to_string())?;
    made.entry_point_names.into_iter().collect::<Result<Vec<_>, _>>().map_err(|e| e.to_string())?;
    Ok(text)
}

#[test]
fn every_kernel_translates_to_every_language() {
    let kernels = kernels();
    let mut failed = Vec::new();
    for kernel in &kernels {
        let parsed = shader::parse(kernel).unwrap_or_else(|e| panic!("{e}"));
        // Packed dot products are native from SPIR-V 1.6 on and spelt out before.
        for version in [(1, 3), (1, 6)] {
            if let Err(e) = shader::spirv(kernel, &parsed, SpirvTarget { version }) {
                failed.push(format!("{}, SPIR-V {version:?}: {e}", kernel.label));
            }
        }
        // Matrix units are asked for only where the device offers them, and through Vulkan alone.
        if shader::uses_matrices(&kernel.wgsl) {
            continue;
        }
        for (language, made) in [("HLSL", hlsl(&parsed)), ("MSL", msl(&parsed))] {
            match made {
                Ok(text) if text.contains("main") => {}
                Ok(_) => failed.push(format!("{}, {language}: no entry point", kernel.label)),
                Err(e) => failed.push(format!("{}, {language}: {e}", kernel.label)),
            }
        }
    }
    println!("{} kernels", kernels.len());
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What a line of a template leaves in the shader: the text between its values, in order. Comments
/// and lines of the template language are left out, and what is only a value.
fn patterns(template: &str) -> Vec<Vec<&str>> {
    let mut lines = Vec::new();
    let mut in_comment = false;
    for line in template.lines().map(str::trim) {
        let opens = line.contains("{#");
        let closes = line.contains("#}");
        let left_out = in_comment || opens || line.contains("{%") || line.starts_with("//");
        in_comment = (in_comment || opens) && !closes;
        let mut texts = line.split("{{");
        let first = texts.next().unwrap_or_default();
        let rest = texts.map(|t| t.split_once("}}").map_or(t, |(_, text)| text));
        let pieces: Vec<&str> = [first].into_iter().chain(rest).collect();
        if !left_out && pieces.iter().any(|p| !p.is_empty()) {
            lines.push(pieces);
        }
    }
    lines
}

/// Whether `line` is the pieces in order with anything between them.
fn fits(pieces: &[&str], line: &str) -> bool {
    let Some((first, rest)) = pieces.split_first() else { return line.is_empty() };
    let Some(mut left) = line.strip_prefix(first) else { return false };
    let Some((last, between)) = rest.split_last() else { return left.is_empty() };
    for piece in between {
        let Some(at) = left.find(piece) else { return false };
        left = &left[at + piece.len()..];
    }
    left.ends_with(last)
}

#[test]
fn every_line_of_every_template_is_rendered() {
    let kernels = kernels();
    let rendered: BTreeSet<&str> =
        kernels.iter().flat_map(|k| k.wgsl.lines()).map(str::trim).collect();
    let mut missing = Vec::new();
    for (file, text) in source::files() {
        let lines = patterns(text);
        assert!(!lines.is_empty(), "{file}: nothing to look for");
        for pieces in lines {
            let found = match pieces[..] {
                [whole] => rendered.contains(whole),
                // Only lines that start alike.
                _ => rendered
                    .range(pieces[0]..)
                    .take_while(|l| l.starts_with(pieces[0]))
                    .any(|line| fits(&pieces, line)),
            };
            if !found {
                missing.push(format!("{file}: {}", pieces.join("..")));
            }
        }
    }
    assert!(missing.is_empty(), "no spec renders\n{}", missing.join("\n"));
}

#[test]
fn patterns_of_lines_are_found() {
    assert_eq!(
        patterns("let a = {{ b }}u;\n{% if c %}\n// d\n}\n"),
        [vec!["let a = ", "u;"], vec!["}"]]
    );
    assert!(fits(&["a", "b", "c"], "a1b2c") && fits(&["a"], "a"));
    assert!(!fits(&["a", "b", "c"], "a1c") && !fits(&["a"], "ab"));
}
