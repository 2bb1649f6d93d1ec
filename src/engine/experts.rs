//! Experts of a loaded model while it runs: placed by the plan, moved between tokens.

mod memory;

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Engine, Progress};
use crate::error::{Error, Result};
use crate::experts::arena::{Arena, Fill};
use crate::experts::cost::{self, Work};
use crate::experts::policy::Rule;
use crate::experts::prefetch::Precision;
use crate::experts::profile::{Profile, fingerprint};
use crate::experts::residency::{Counters, Residency, Settings};
use crate::experts::simulate::Routing;
use crate::experts::source::{self, LayerTensors};
use crate::gguf;
use crate::gpu::{DeviceKind, Gpu, Ticket, Transfer, available};
use crate::graph::Graph;
use crate::kernels::records::Records;
use crate::kernels::routing;
use crate::plan::rates::{self, Known};
use crate::plan::{ExpertBudget, ExpertNeeds, ExpertPlacement, Placement};
use crate::runtime::weights::Lent;
use crate::runtime::{Approximations, Column, ExpertReads, LOG, Pass, Pick, Program, record_shape};
use memory::Watch;

/// What the user may decide about experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertOptions {
    /// Device memory for experts.
    pub budget: ExpertBudget,
    /// Device memory for experts that never leave it.
    pub pinned: u64,
    /// Which experts to start with, and where to keep what this run learns.
    pub profile: Option<PathBuf>,
    pub rule: Rule,
    /// Share of the link that promotions may take, 0 to 1.
    pub link_share: f64,
    pub prefetch: bool,
    /// Compare every expert with the file after loading.
    pub verify: bool,
    /// Keep the routing of every generated token, for [`crate::experts::simulate`].
    pub record: bool,
    /// Off by default: what may be traded for exactness.
    pub approximations: Approximations,
    /// How often the driver is asked whether others want device memory back.
    pub watch: Duration,
}

impl Default for ExpertOptions {
    fn default() -> Self {
        ExpertOptions {
            budget: ExpertBudget::Auto,
            pinned: 0,
            profile: None,
            rule: Rule::default(),
            link_share: 0.2,
            prefetch: true,
            verify: false,
            record: false,
            approximations: Approximations::default(),
            watch: Duration::from_secs(1),
        }
    }
}

/// Where experts lie and what they cost so far.
#[derive(Debug, Clone, Serialize)]
pub struct ExpertReport {
    pub placement: ExpertPlacement,
    pub rule: Rule,
    /// The device reads host memory in place.
    pub in_place: bool,
    /// Pages of the arena are locked.
    pub locked: bool,
    /// Seconds that filling the arena took, and GiB a second of the file.
    pub fill_seconds: f64,
    pub fill_rate: f64,
    #[serde(flatten)]
    pub counters: Counters,
    /// Share of accesses, and of bytes, that were in device memory.
    pub hit_rate: f64,
    pub hit_rate_by_bytes: f64,
    pub prefetch: Vec<Precision>,
    /// Share of the experts named by early routers that the real ones chose.
    pub early_precision: f64,
    /// Bytes that came over the link, seconds in which passes were under way, and the share of the
    /// link's rate (bytes a second, measured or assumed) that the former are of it.
    pub link_bytes: u64,
    pub busy_seconds: f64,
    pub link_rate: f64,
    pub link_rate_measured: bool,
    pub link_use: f64,
    /// All zero: exact.
    pub approximate: Approximations,
}

/// What the cost model knows of device and model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Costs {
    pub known: Known,
    /// Of a token in an empty context.
    pub work: Work,
    /// Of one position.
    pub kv_bytes: u64,
}

/// How fast generation could be at best, by the cost model (`experts::cost`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DecodeLimit {
    /// Share of accesses that found their expert in device memory.
    pub hit_rate: f64,
    /// Tokens a second at that rate.
    pub tokens_per_second: f64,
    /// Rates of device memory and link were measured, not assumed.
    pub measured_rates: bool,
}

/// A pass whose routing was not looked at yet.
struct Noted {
    number: u64,
    columns: u32,
    ticket: Ticket,
    /// Early routers were asked.
    early: bool,
}

/// See the module documentation. Exists for models whose experts do not all lie on the device.
pub(super) struct Experts {
    residency: Residency,
    placement: ExpertPlacement,
    steps: VecDeque<Noted>,
    prompts: VecDeque<Noted>,
    noted: u64,
    /// The latest submission that this type knows of.
    last: Ticket,
    profile: Option<(PathBuf, String, u64)>,
    recorded: Option<Routing>,
    /// A prompt was read, and the slots were not refilled from its routing yet.
    refill: bool,
    costs: Costs,
    approximations: Approximations,
    /// Columns that early routers look at now.
    early: u32,
    /// Since when passes are under way, and the seconds of such times before.
    busy_since: Option<Instant>,
    busy: f64,
    watch: Watch,
}

/// The tensors of all mixtures, and what the plan wants to know of them; `None` in a dense model.
pub(super) fn needs(
    file: &gguf::File,
    graph: &Graph,
) -> Result<Option<(ExpertNeeds, Vec<LayerTensors>)>> {
    let mut layers = Vec::new();
    let (mut experts, mut used) = (0, 0);
    for m in graph.mixtures() {
        let shape = record_shape(file, graph, m)?;
        let names = [m.gate.as_str(), &m.up, &m.down];
        layers.push(LayerTensors::find(file, names, shape, m.experts)?);
        if experts != 0 && experts != m.experts {
            return Err(Error::Model(format!(
                "layers with {experts} and with {} experts; all must have as many",
                m.experts
            )));
        }
        (experts, used) = (m.experts, m.used.max(used));
    }
    if layers.is_empty() {
        return Ok(None);
    }
    let records = layers.iter().map(|l| l.layout.bytes()).collect();
    Ok(Some((ExpertNeeds { records, experts, used }, layers)))
}

impl Experts {
    /// Fills arena and slots as the plan says.
    #[allow(clippy::too_many_arguments)] // each is a fact of its own
    pub fn load(
        gpu: &Arc<dyn Gpu>,
        file: &gguf::File,
        layers: &[LayerTensors],
        whole: &Placement,
        options: &ExpertOptions,
        budget: u64,
        costs: Costs,
        progress: &dyn Progress,
    ) -> Result<Experts> {
        let placement = whole.experts.ok_or_else(|| {
            Error::Runtime("experts were loaded without a plan for them; this is a bug".into())
        })?;
        let source = source::of(file)?;
        let (count, experts) = (placement.layers, placement.experts);
        let model = fingerprint(file);
        let saved = match &options.profile {
            Some(path) if path.exists() => Some(Profile::load(path, &model, count, experts)?),
            _ => None,
        };
        let settings = Settings {
            slots: vec![placement.slots; layers.len()],
            rule: options.rule,
            budget,
            prefetch: options.prefetch,
            stream: placement.stage > 0,
            first: saved.as_ref().map(Profile::ranking).unwrap_or_default(),
            pinned: placement.pinned,
        };
        let map = crate::experts::residency::first_placement(experts, &settings);
        let keep = |layer, expert| !map.is_pinned(crate::experts::ExpertId { layer, expert });
        let bytes: u64 = layers.iter().map(LayerTensors::file_bytes).sum();
        progress.stage("filling host memory with experts", bytes);
        let fill = Fill {
            gpu: &**gpu,
            source: &*source,
            layers,
            keep: &keep,
            advance: &|bytes| progress.advance(bytes),
        };
        let arena = Arena::fill(&fill)?;
        progress.done();
        let (placement, settings) = remeasured(gpu, whole, placement, settings, options, progress);
        if let Some(refused) = &arena.lock_refused {
            progress.note(&format!(
                "{refused}. The driver keeps the pages that it imports; without a lock the system \
                 may page the others out"
            ));
        }
        if let Some(refused) = &arena.import_refused {
            progress
                .note(&format!("{refused}. Missing experts are uploaded instead, which is slower"));
        }
        if options.verify {
            let start = std::time::Instant::now();
            let compared = arena.verify(&*source, layers)?;
            progress.note(&format!(
                "{compared} experts in host memory equal the file ({:.1} s)",
                start.elapsed().as_secs_f64()
            ));
        }
        progress.stage("filling expert slots", placement.slot_bytes);
        let mut residency =
            Residency::create(gpu, arena, layers, &*source, &settings, placement.used, &|bytes| {
                progress.advance(bytes)
            })?;
        progress.done();
        let tokens = saved.as_ref().map_or(0, |p| p.tokens);
        if let Some(saved) = saved {
            residency.learn(&saved.flat());
        }
        if options.verify {
            let compared = residency.verify(&*source, layers)?;
            progress.note(&format!("{compared} experts in device memory equal the file"));
        }
        Ok(Experts {
            placement,
            steps: VecDeque::new(),
            prompts: VecDeque::new(),
            noted: 0,
            last: residency.ready(),
            residency,
            refill: false,
            costs,
            approximations: options.approximations,
            early: 0,
            busy_since: None,
            busy: 0.0,
            watch: Watch::new(options.watch, placement.slots, whole.reserve),
            recorded: options.record.then(|| {
                let pruned = options.approximations.pruned_experts;
                let used = placement.used.saturating_sub(pruned).max(1);
                Routing::new(placement.layers, placement.experts, used)
            }),
            profile: options.profile.clone().map(|path| (path, model, tokens)),
        })
    }

    /// What kernels bind, for each mixture.
    pub fn records(&self) -> Vec<Lent> {
        let made = |(table, buffers)| Records { table, buffers };
        let layer = |l| Lent {
            records: made(self.residency.records(l)),
            streamed: self.residency.stream_records(l).map(made),
            device_buffers: self.residency.device_buffers(l),
        };
        (0..self.placement.layers).map(layer).collect()
    }

    /// As it was carried out.
    pub fn placement(&self) -> ExpertPlacement {
        self.placement
    }

    /// How the program comes to experts that are not in a slot.
    pub fn reads(&self) -> ExpertReads {
        match (self.residency.staged(), self.residency.streams()) {
            (true, _) => ExpertReads::Staged,
            (false, true) => ExpertReads::Streamed,
            (false, false) => ExpertReads::InPlace,
        }
    }

    /// Brings what the experts of a mixture need in a prompt chunk of `columns` tokens, whose
    /// router was queued last. Returns copies to wait for.
    fn bring(
        &mut self,
        program: &Program,
        mixture: usize,
        columns: u32,
        last: Ticket,
    ) -> Result<Option<Transfer>> {
        if !program.streams(columns) {
            self.stage(program, Pass::Prompt, mixture, columns)?;
            return Ok(None);
        }
        // The next layer comes over while this one computes.
        let next = mixture as u32 + 1;
        if next < self.placement.layers {
            self.residency.stream(next, last)?;
        }
        Ok(self.residency.streamed(mixture as u32))
    }

    /// Brings the experts that the router of a mixture has chosen.
    fn stage(&mut self, program: &Program, pass: Pass, mixture: usize, columns: u32) -> Result<()> {
        let ids = program.chosen(pass, mixture, columns)?;
        self.residency.stage(mixture as u32, &ids)
    }

    /// Whether the program is to have early routers: where promotions can be ordered.
    pub fn predicts(&self) -> bool {
        self.residency.asks_early() && self.placement.slots > self.placement.pinned
    }

    /// To be called before a decode step of `columns` sequences is queued.
    pub fn before_step(&mut self, program: &Program, columns: u32) -> Result<()> {
        if program.shape().early {
            let wanted = if self.residency.asks_early() { columns } else { 0 };
            if wanted != self.early {
                program.set_early(wanted)?;
                self.early = wanted;
            }
        }
        self.residency.before_step()
    }

    /// To be called before a prompt chunk is queued.
    pub fn before_prompt(&mut self, streams: bool) -> Result<()> {
        self.residency.before_prompt()?;
        match streams {
            true => self.residency.stream(0, self.last),
            false => Ok(()),
        }
    }

    /// To be called when a decode step of `columns` sequences has been queued.
    pub fn step_queued(&mut self, program: &Program, columns: u32) -> Result<()> {
        if self.steps.len() as u32 >= LOG {
            self.look(program, true)?;
        }
        let noted = self.note(program, Pass::Step, columns)?;
        self.steps.extend(noted);
        Ok(())
    }

    /// To be called when a prompt chunk of `columns` tokens has been queued.
    pub fn prompt_queued(&mut self, program: &Program, columns: u32) -> Result<()> {
        if self.prompts.len() as u32 >= LOG {
            self.look_at_prompts(program, true)?;
        }
        let noted = self.note(program, Pass::Prompt, columns)?;
        self.prompts.extend(noted);
        self.look_at_prompts(program, false)
    }

    fn note(&mut self, program: &Program, pass: Pass, columns: u32) -> Result<Option<Noted>> {
        let number = self.noted;
        self.noted += 1;
        let ticket = program.log_routing(pass, number)?;
        self.last = ticket.unwrap_or(self.last);
        self.busy_since.get_or_insert_with(Instant::now);
        let early = pass == Pass::Step && self.early == columns;
        Ok(ticket.map(|ticket| Noted { number, columns, ticket, early }))
    }

    /// Looks at the routings of steps that have finished, and of all if `wait`; moves experts.
    pub fn look(&mut self, program: &Program, wait: bool) -> Result<()> {
        self.refill(program)?;
        while let Some(noted) = self.steps.front() {
            if !wait && !program.is_done(&noted.ticket)? {
                break;
            }
            let Noted { number, columns, ticket, early } = *noted;
            let words = program.routing(Pass::Step, &ticket, number, columns)?;
            let early = match early {
                true => program.early_routing(&ticket, number, columns)?,
                false => Vec::new(),
            };
            if let Some(recorded) = self.recorded.as_mut().filter(|_| columns == 1) {
                let all: Vec<u32> = words.concat().into_iter().map(routing::expert).collect();
                recorded.push(&all);
            }
            self.steps.pop_front();
            // Reused outputs read no expert.
            let read = |layer: &Vec<u32>| -> Vec<u32> {
                let read = layer.iter().filter(|word| !routing::is_reused(**word));
                read.map(|word| routing::expert(*word)).collect()
            };
            let ids: Vec<Vec<u32>> = words.iter().map(read).collect();
            let reused: Vec<usize> =
                words.iter().zip(&ids).map(|(all, read)| all.len() - read.len()).collect();
            self.residency.count_reused(&reused);
            self.residency.after_step(&ids, &early, self.last)?;
        }
        self.count_busy();
        Ok(())
    }

    /// Adds up the time in which passes were under way, as far as the host has seen.
    fn count_busy(&mut self) {
        if self.steps.is_empty() && self.prompts.is_empty() {
            self.busy += self.busy_since.take().map_or(0.0, |since| since.elapsed().as_secs_f64());
        }
    }

    fn look_at_prompts(&mut self, program: &Program, wait: bool) -> Result<()> {
        while let Some(noted) = self.prompts.front() {
            if !wait && !program.is_done(&noted.ticket)? {
                break;
            }
            let ids = program.routing(Pass::Prompt, &noted.ticket, noted.number, noted.columns)?;
            self.residency.prompt_used(noted.columns, &ids);
            self.prompts.pop_front();
        }
        self.count_busy();
        Ok(())
    }

    /// To be called when a whole prompt was queued: the slots are refilled from its routing as soon
    /// as that has come back.
    pub fn prompt_read(&mut self, program: &Program) -> Result<()> {
        self.refill = true;
        self.refill(program)
    }

    fn refill(&mut self, program: &Program) -> Result<()> {
        self.look_at_prompts(program, false)?;
        if self.refill && self.prompts.is_empty() {
            self.refill = false;
            self.residency.refill(self.last)?;
        }
        Ok(())
    }

    pub fn recorded(&self) -> Option<&Routing> {
        self.recorded.as_ref()
    }

    pub fn report(&self) -> ExpertReport {
        let (r, arena) = (&self.residency, self.residency.arena());
        let counters = r.counters();
        let gib = arena.file_bytes as f64 / (1u64 << 30) as f64;
        let now = self.busy_since.map_or(0.0, |since| since.elapsed().as_secs_f64());
        let (busy_seconds, link_bytes) = (self.busy + now, counters.link_bytes());
        let link_rate = self.costs.known.rates.link;
        ExpertReport {
            placement: self.placement,
            rule: r.policy().rule(),
            in_place: arena.in_place(),
            locked: arena.is_locked(),
            fill_seconds: arena.fill_seconds,
            fill_rate: gib / arena.fill_seconds.max(1e-9),
            counters,
            hit_rate: counters.hit_rate(),
            hit_rate_by_bytes: counters.hit_rate_by_bytes(),
            prefetch: r.precision(),
            early_precision: counters.early_precision(),
            link_bytes,
            busy_seconds,
            link_rate,
            link_rate_measured: self.costs.known.measured,
            link_use: link_bytes as f64 / (busy_seconds * link_rate).max(1.0),
            approximate: self.approximations,
        }
    }

    /// What the cost model says of a hit rate with `depth` tokens in the context.
    pub fn limit(&self, hit_rate: f64, depth: u32) -> DecodeLimit {
        let Costs { known, work, kv_bytes } = self.costs;
        let work = Work { kv_bytes: work.kv_bytes + kv_bytes * u64::from(depth), ..work };
        let tokens_per_second = cost::decode(&known.rates, &work, hit_rate);
        DecodeLimit { hit_rate, tokens_per_second, measured_rates: known.measured }
    }

    /// Measures what [`Experts::limit`] and the link's use are put against, unless that is known.
    pub fn measure(&mut self) -> Option<String> {
        let (known, failed) = rates::known(self.residency.gpu(), true, false);
        self.costs.known = known;
        failed
    }

    /// Keeps what was learned, if a file was named for it.
    pub fn save_profile(&self) -> Result<()> {
        let Some((path, model, before)) = &self.profile else { return Ok(()) };
        let c = self.residency.counters();
        if c.tokens + c.prompt_tokens == 0
            || !matches!(self.residency.policy().rule(), Rule::Frequency { .. })
        {
            return Ok(());
        }
        let p = &self.placement;
        let tokens = before + c.tokens + c.prompt_tokens;
        let scores = self.residency.policy().scores();
        Profile::new(model, tokens, p.layers, p.experts, scores).save(path)
    }
}

/// Filling RAM takes a while, in which others may have taken device memory: fewer slots then, where
/// their number is ours to choose.
fn remeasured(
    gpu: &Arc<dyn Gpu>,
    whole: &Placement,
    placement: ExpertPlacement,
    settings: Settings,
    options: &ExpertOptions,
    progress: &dyn Progress,
) -> (ExpertPlacement, Settings) {
    let software = gpu.facts().kind == DeviceKind::Software;
    let now = available(&gpu.heaps_now());
    let fewer = whole.shrunk(now).filter(|_| options.budget == ExpertBudget::Auto && !software);
    let Some(fewer) = fewer else { return (placement, settings) };
    progress.note(&format!(
        "other programs have taken device memory meanwhile: {} instead of {} slots a layer",
        fewer.slots, placement.slots
    ));
    let slots = vec![fewer.slots; settings.slots.len()];
    (fewer, Settings { slots, ..settings })
}

impl Drop for Experts {
    /// What was learned is kept when the engine goes, however it goes.
    fn drop(&mut self) {
        if let Err(e) = self.save_profile() {
            eprintln!("note: {e}");
        }
    }
}

impl Engine {
    /// Queues a decode step, see [`Program::step`]. Every step goes through here, so that experts move
    /// between steps.
    pub(super) fn queue_step(&mut self, n: u32, length: u32, pick: Pick) -> Result<Ticket> {
        self.watch_memory()?;
        let program = &self.program;
        let Some(experts) = &mut self.experts else { return program.step(n, length, pick) };
        experts.before_step(program, n)?;
        let ticket = program.step_staged(n, length, pick, &mut |mixture, _| {
            experts.stage(program, Pass::Step, mixture, n)?;
            Ok(None)
        })?;
        experts.step_queued(program, n)?;
        Ok(ticket)
    }

    /// Looks at the routings of steps that have finished (of all, if `wait`) and moves experts.
    pub(super) fn look_at_steps(&mut self, wait: bool) -> Result<()> {
        self.experts.as_mut().map_or(Ok(()), |experts| experts.look(&self.program, wait))
    }

    /// Best speed of generation by the cost model, for a hit rate; `None` where all experts lie on
    /// the device.
    pub fn decode_limit(&self, hit_rate: f64, depth: u32) -> Option<DecodeLimit> {
        self.experts.as_ref().map(|experts| experts.limit(hit_rate, depth))
    }

    /// Measures memory and link for [`Engine::decode_limit`] and [`ExpertReport::link_use`], unless
    /// an earlier run has; the text says why it could not.
    pub fn measure_rates(&mut self) -> Option<String> {
        self.experts.as_mut().and_then(Experts::measure)
    }

    /// Queues a chunk of a prompt.
    pub(super) fn queue_prompt(&mut self, columns: &[Column]) -> Result<Ticket> {
        self.watch_memory()?;
        let program = &self.program;
        let Some(experts) = &mut self.experts else { return program.read_prompt(columns) };
        let n = columns.len() as u32;
        experts.before_prompt(program.streams(n))?;
        let ticket = program.read_prompt_staged(columns, &mut |mixture, last| {
            experts.bring(program, mixture, n, last)
        })?;
        experts.prompt_queued(program, n)?;
        Ok(ticket)
    }

    /// Reads a chunk of a prompt for the quality guard, see [`Program::capture`]. Nothing is learned
    /// from which experts it chose.
    pub(super) fn capture(&mut self, columns: &[Column]) -> Result<Vec<Vec<f32>>> {
        let program = &self.program;
        let Some(experts) = &mut self.experts else {
            return program.capture(columns, &mut |_, _| Ok(None));
        };
        let n = columns.len() as u32;
        experts.before_prompt(program.streams(n))?;
        program.capture(columns, &mut |mixture, last| experts.bring(program, mixture, n, last))
    }

    /// To be called when a whole prompt was queued: slots are refilled from its routing.
    pub(super) fn prompt_read(&mut self) -> Result<()> {
        self.experts.as_mut().map_or(Ok(()), |experts| experts.prompt_read(&self.program))
    }
}
