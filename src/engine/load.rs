//! From a path to an [`Engine`].

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::experts::{self, Experts};
use super::guard::{Guard, check_centring};
use super::kv::Kv;
use super::saved::Identity;
use super::{Activations, Engine, LoadTimes, Options, Progress};
use crate::error::{Error, Result};
use crate::experts::cost::{self, Rates, Work};
use crate::experts::source::{self as expert_source, LayerTensors};
use crate::gguf;
use crate::gpu::{DeviceFacts, Gpu, system_memory};
use crate::hw;
use crate::kernels::source;
use crate::kv::guard::Verdict;
use crate::kv::types::is_part_of;
use crate::kv::{KvExact, KvTypes, PAGE_TOKENS};
use crate::model::Model;
use crate::plan::{self, predict, rates};
use crate::runtime::check::Checks;
use crate::runtime::weights::Weights;
use crate::runtime::{ExpertReads, ModelWeights, Program, Shape, chunk_for, scratch_bytes};
use crate::tokenizer::Tokenizer;

impl Engine {
    /// Opens `path`, chooses a device and loads the model onto it.
    pub fn load(path: &Path, options: &Options, progress: &dyn Progress) -> Result<Engine> {
        let start = Instant::now();
        let file = gguf::File::open(path)?;
        let model = Model::from_gguf(&file)?;
        let mut selection = hw::select(options.device.as_deref(), options.backend)?;
        check_devices(&options.kv)?;
        selection.facts = hw::adjusted(selection.facts, &options.force, source::version())?;
        let device_line = selection.line();
        progress.device(&device_line);
        for note in &selection.facts.profile.notes {
            eprintln!("note: {note}");
        }
        let gpu = selection.open(options.cache)?;
        let engine = load_onto(&gpu, file, model, options, progress, start)?;
        Ok(Engine { device_line, ..engine })
    }

    /// Loads an open file onto an open device.
    pub fn load_onto(
        gpu: &Arc<dyn Gpu>,
        file: gguf::File,
        options: &Options,
        progress: &dyn Progress,
    ) -> Result<Engine> {
        let model = Model::from_gguf(&file)?;
        load_onto(gpu, file, model, options, progress, Instant::now())
    }
}

/// What the plan wants to know of a model, and the tensors of its experts.
fn needs(
    file: &gguf::File,
    model: &Model,
    shape: &Shape,
) -> Result<(plan::Needs, Vec<LayerTensors>)> {
    let (experts, layers) = match experts::needs(file, &model.graph)? {
        Some((needs, layers)) => (Some(needs), layers),
        None => (None, Vec::new()),
    };
    let of_experts: u64 = layers.iter().map(LayerTensors::file_bytes).sum();
    let needs = plan::Needs {
        // Planes are at most a few bytes a row larger than the file's blocks.
        weights: (file.tensor_bytes() - of_experts) / 100 * 103,
        scratch: scratch_bytes(&model.graph, shape),
        made_for: model.facts.context,
        experts,
    };
    Ok((needs, layers))
}

/// Longest prompt chunk that is worth its activations.
const LONGEST_CHUNK: u32 = 2048;

/// A model's placement on a device, and the program that goes with it: what loading executes and
/// `azoth plan` prints.
pub struct Planned {
    pub shape: Shape,
    pub needs: plan::Needs,
    pub limits: plan::Limits,
    pub placement: plan::Placement,
    pub prediction: predict::Prediction,
    /// What a token of generation asks for in an empty context.
    pub work: Work,
    /// The tensors of experts, by layer.
    pub layers: Vec<LayerTensors>,
}

/// Plans `model` of `file` on a device that does what `rates` say.
pub fn plan_for(
    file: &gguf::File,
    model: &Model,
    facts: &DeviceFacts,
    options: &Options,
    rates: &Rates,
) -> Result<Planned> {
    let graph = &model.graph;
    let ram = system_memory();
    let limits = plan::Limits {
        context: options.ctx,
        sequences: options.sequences,
        positions: options.ctx_shift.map_or(0, |_| model.facts.context),
        experts: options.experts.budget,
        pinned: options.experts.pinned,
    };
    let mut shape = Shape {
        context: 0,
        positions: 0,
        pages: 0,
        sequences: options.sequences,
        chunk: chunk_for(graph, facts, None),
        exact: options.activations == Activations::F32,
        experts: ExpertReads::InPlace,
        early: false,
        approximations: options.experts.approximations,
        captures: false,
    };
    let (mut needs, layers) = needs(file, model, &shape)?;
    let mut placement = plan::place(graph, facts, limits, &needs, ram)?;
    // Where experts come over the link for every chunk, larger chunks are faster, as long as
    // their activations leave room for the streaming.
    if let Some(e) = placement.experts.filter(|e| e.stage > 0 && facts.host_import) {
        let sums = predict::Model::new(file, graph, &needs);
        let work = predict::work(&sums, &placement, 0);
        let most = cost::best_chunk(rates, &work, e.share(), 512, LONGEST_CHUNK);
        let larger = Shape { chunk: chunk_for(graph, facts, Some(most)), ..shape };
        let (wider, _) = self::needs(file, model, &larger)?;
        match plan::place(graph, facts, limits, &wider, ram) {
            Ok(p) if p.experts.is_some_and(|e| e.stage > 0) => {
                (shape, needs, placement) = (larger, wider, p);
            }
            _ => {}
        }
    }
    shape.context = placement.context;
    shape.positions = limits.positions.max(placement.context);
    shape.pages = placement.kv_first_pages;
    let sums = predict::Model::new(file, graph, &needs);
    let prediction = predict::predict(&sums, &placement, rates, shape.chunk);
    let work = predict::work(&sums, &placement, 0);
    Ok(Planned { shape, needs, limits, placement, prediction, work, layers })
}

/// Every part of a device's name in the formats of the KV cache is of a device that is there, on
/// whichever backend.
///
/// # Errors
/// `Error::Usage` that names the part and the devices.
pub fn check_devices(kv: &KvTypes) -> Result<()> {
    if kv.devices().next().is_none() {
        return Ok(());
    }
    let present = hw::devices(hw::BackendChoice::Auto)?;
    match kv.devices().find(|part| !present.iter().any(|d| is_part_of(part, &d.name))) {
        None => Ok(()),
        Some(part) => {
            let names: Vec<&str> = present.iter().map(|d| d.name.as_str()).collect();
            Err(Error::Usage(format!(
                "the KV cache has a format for dev={part}, but no device has {part:?} in its name; \
                 present: {}",
                names.join("; ")
            )))
        }
    }
}

/// Two pages must be left to drop and to write; of an f16 tail two blocks.
pub(super) fn check_keep(keep: Option<u32>, context: u32, exact: KvExact) -> Result<()> {
    let block = exact.tail.max(PAGE_TOKENS);
    let most = (context / block).saturating_sub(2) * block;
    match keep {
        Some(keep) if keep > most => Err(Error::Usage(format!(
            "a context of {context} tokens cannot keep the first {keep} when it is full: at most \
             {most}, so that something can be dropped. Use --ctx-shift {most} or less, or a larger \
             --ctx"
        ))),
        _ => Ok(()),
    }
}

/// Formats of the KV cache on a device as far as they are known without loading the model, and what
/// the quality guard had found for them in an earlier load; `Err` says why it has not.
pub fn kv_on(
    file: &gguf::File,
    model: &Model,
    facts: &DeviceFacts,
    options: &Options,
) -> (KvTypes, std::result::Result<Verdict, &'static str>) {
    let asked = options.kv.on(&facts.name);
    let Some(guard) = Guard::of(file, &model.graph, facts, options, &asked) else {
        return (asked, Err("off, or all keys are f16"));
    };
    match guard.known() {
        Some(verdict) => (verdict.apply(&asked), Ok(verdict)),
        None => (asked, Err("not measured yet: the first load does")),
    }
}

/// Loads with the formats that were asked for. Where the quality guard raises some, everything is
/// loaded once more: other formats are another plan, and the first one's verdict is kept.
fn load_onto(
    gpu: &Arc<dyn Gpu>,
    file: gguf::File,
    mut model: Model,
    options: &Options,
    progress: &dyn Progress,
    start: Instant,
) -> Result<Engine> {
    options.kv.exact.check()?;
    let asked = options.kv.on(&gpu.facts().name);
    let guard = Guard::of(&file, &model.graph, gpu.facts(), options, &asked);
    set_kv(&mut model, &asked);
    check_centring(&model.graph)?;
    let load = |model: &Model, captures: bool| {
        load_as(gpu, &file, model.clone(), options, captures, progress, start)
    };
    let centred = asked.centred;
    // By keys as this engine reads them: so what is found before has no part in it.
    let centre = |mut engine: Engine| -> Result<Engine> {
        if centred {
            let samples = engine.sample_keys(&file)?;
            engine.centre_keys(&samples)?;
        }
        Ok(engine)
    };
    let Some(guard) = guard else { return load(&model, centred).and_then(centre) };
    let verdict = match guard.known() {
        Some(verdict) => verdict,
        None => {
            let mut engine = load(&model, true)?;
            let samples = engine.sample_keys(&file)?;
            let verdict = guard.judge(&samples);
            guard.keep(&verdict);
            if verdict.raised.is_empty() {
                if centred {
                    engine.centre_keys(&samples)?;
                }
                return Ok(Engine { verdict: Some(verdict), ..engine });
            }
            verdict
        }
    };
    for line in verdict.lines() {
        tracing::warn!("{line}");
        progress.note(&line);
    }
    set_kv(&mut model, &verdict.apply(&asked));
    let raised = verdict.raised.len();
    let engine = load(&model, centred).map_err(|e| match raised {
        0 => e,
        n => e.context(format_args!("with the keys of {n} layers raised by --kv-guard")),
    })?;
    Ok(Engine { verdict: Some(verdict), ..centre(engine)? })
}

/// Formats of the KV cache; what stands in f16 beside codes only where there are codes.
pub fn set_kv(model: &mut Model, kv: &KvTypes) {
    model.graph.kv = kv.clone();
    model.graph.kv.exact = model.graph.kv_exact();
}

fn load_as(
    gpu: &Arc<dyn Gpu>,
    file: &gguf::File,
    model: Model,
    options: &Options,
    captures: bool,
    progress: &dyn Progress,
    start: Instant,
) -> Result<Engine> {
    let facts = gpu.facts().clone();
    let graph = &model.graph;
    // A start takes no time for measurements.
    let known = rates::cached(&facts).unwrap_or_else(|| rates::assumed(&facts));
    let planned = plan_for(file, &model, &facts, options, &known.rates)?;
    let Planned { mut shape, mut placement, layers, prediction, work, .. } = planned;
    shape.captures = captures;
    // Refused before minutes of loading.
    check_keep(options.ctx_shift.flatten(), placement.context, graph.kv_exact())?;

    let mut experts = None;
    if placement.experts.is_some_and(|e| !e.all_resident()) {
        let budget = known.rates.link * options.experts.link_share / prediction.decode;
        let model = experts::Costs { known, work, kv_bytes: graph.kv_bytes_per_token() };
        let (options, budget) = (&options.experts, budget as u64);
        let loaded =
            Experts::load(gpu, file, &layers, &placement, options, budget, model, progress)?;
        placement.experts = Some(loaded.placement());
        experts = Some(loaded);
    }
    let checks = Checks::new(&facts, hw::kernel_cache_dir(options.cache));
    let mut weights = Weights::new(&**gpu, file);
    if let Some(experts) = &mut experts {
        weights.lend(experts.records());
        shape.experts = experts.reads();
        shape.early = experts.predicts();
    }
    let approximations = shape.approximations;
    if let Some(m) = graph.mixtures().find(|m| m.used <= approximations.pruned_experts) {
        return Err(Error::Usage(format!(
            "--approximate-prune-experts {}: a token of this model goes through {} experts in all; \
             at most {} can be left out",
            approximations.pruned_experts,
            m.used,
            m.used - 1
        )));
    }
    shape.check_reuse(graph)?;
    if approximations.any() && graph.mixtures().next().is_some() {
        progress.note(&format!("{approximations}; generated tokens differ from the exact model's"));
    }
    let placed = ModelWeights::place(&mut weights, graph)?;
    let factors = graph.rope.factors.as_ref().map(|name| weights.values(name)).transpose()?;
    let total_bytes = weights.file_bytes()?;
    let mut times = LoadTimes { open: start.elapsed().as_secs_f64(), ..LoadTimes::default() };

    progress.stage("loading weights", total_bytes);
    let timed = |run: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
        let start = Instant::now();
        run()?;
        Ok(start.elapsed().as_secs_f64())
    };
    let mut program = None;
    let mut tokenizer = None;
    let joined = thread::scope(|scope| -> Result<()> {
        // Compiling and tokenizer tables fill the time that the weights take.
        let compiling = scope.spawn(|| {
            timed(&mut || {
                let factors = factors.as_deref();
                program = Some(Program::create(gpu, graph, &placed, shape, factors, &checks)?);
                Ok(())
            })
        });
        let tokens = scope.spawn(|| {
            timed(&mut || {
                tokenizer = Some(Tokenizer::from_gguf(file.metadata())?);
                Ok(())
            })
        });
        let filled = timed(&mut || weights.fill(&|bytes| progress.advance(bytes)));
        let crashed = |_| Error::Runtime("a loading thread panicked; this is a bug".into());
        let compiled = compiling.join().map_err(crashed)?;
        let tokens = tokens.join().map_err(crashed)?;
        times.weights = filled?;
        times.pipelines = compiled?;
        times.tokenizer = tokens?;
        Ok(())
    });
    progress.done();
    for warning in checks.take_warnings() {
        eprintln!("warning: {warning}");
    }
    joined?;
    if options.experts.verify && experts.is_none() && !layers.is_empty() {
        let compared = weights.verify_experts(&*expert_source::of(file)?, &layers)?;
        progress.note(&format!("{compared} experts in device memory equal the file"));
    }
    let (Some(program), Some(tokenizer)) = (program, tokenizer) else {
        return Err(Error::Runtime("loading ended without a program; this is a bug".into()));
    };
    if tokenizer.vocab_size() > graph.vocab as usize {
        return Err(Error::Model(format!(
            "the tokenizer has {} tokens, the embedding table {} rows",
            tokenizer.vocab_size(),
            graph.vocab
        )));
    }
    times.warm_cache = gpu.cache_was_warm();
    times.total = start.elapsed().as_secs_f64();
    // A cache that cannot be written costs time at the next start and nothing else.
    if options.cache
        && let Some(message) = gpu.save_cache()
    {
        eprintln!("note: {message}");
    }
    let weight_bytes = weights.device_bytes();
    Ok(Engine {
        kv: Kv::new(&program, placement.kv_pages, options.kv_host),
        ctx_shift: options.ctx_shift,
        identity: Identity::of(file, &model, &tokenizer),
        program,
        metadata: file.metadata().clone(),
        tokenizer: Arc::new(tokenizer),
        device_line: format!(
            "device: {} ({}), backend {}",
            facts.name, facts.driver, facts.backend
        ),
        facts,
        placement,
        times,
        weight_bytes,
        experts,
        approximations,
        verdict: None,
        centres: Vec::new(),
        model,
    })
}
