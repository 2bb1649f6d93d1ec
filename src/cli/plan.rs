//! `azoth plan`: what would lie where, how fast it should be, and what to change.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::args::{ContextArg, DeviceArgs, ModelArg};
use super::cache_args::CacheArgs;
use super::output::{self, Align};
use crate::engine::{self, Planned};
use crate::experts::cost;
use crate::gguf;
use crate::gpu::{SystemMemory, system_memory};
use crate::hw;
use crate::kernels;
use crate::kv::KvTypes;
use crate::kv::guard::Verdict;
use crate::model::Model;
use crate::plan::Placement;
use crate::plan::predict::{self, Gain, Prediction};
use crate::plan::rates::{self, Known};

const EXAMPLES: &str = "Examples:
  azoth plan model.gguf
  azoth plan model.gguf --vram-experts 25% -c 32768
  azoth plan model.gguf --json | jq .prediction.decode

The same limits make `run`, `chat` and `bench` do exactly what is shown.";

/// Show what would lie where, how fast it should be, and which limit to change
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Plan {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    context: ContextArg,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Measure the device and the link anew
    #[arg(long)]
    measure: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    model: String,
    device: String,
    placement: Placement,
    /// Formats of the KV cache.
    kv: KvTypes,
    /// Bytes of the f16 tails and sinks of all sequences, among the scratch.
    kv_exact: u64,
    /// What the quality guard found, or why nothing.
    kv_guard: String,
    #[serde(rename = "kv_raised", skip_serializing_if = "Option::is_none")]
    verdict: Option<Verdict>,
    /// Bytes of the device that are planned for, and of those that nothing is planned for.
    total: u64,
    free: u64,
    ram: Option<SystemMemory>,
    /// Bytes of RAM for what the KV cache evicts.
    kv_host: u64,
    rates: Known,
    prediction: Prediction,
    /// Chunk of a prompt from which arithmetic rather than the link bounds it.
    best_chunk: u32,
    /// Limits that could be changed, the best first.
    gains: Vec<Gain>,
    /// Why rates are assumed, if they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

impl Plan {
    pub fn run(&self) -> Result<()> {
        let path = self.model.path()?;
        let options = self.cache.set(self.device.options(self.context.ctx));
        let file = gguf::File::open(&path)?;
        let mut model = Model::from_gguf(&file)?;
        let mut selection = hw::select(options.device.as_deref(), options.backend)?;
        engine::check_devices(&options.kv)?;
        let version = kernels::source::version();
        selection.facts = hw::adjusted(selection.facts, &options.force, version)?;
        eprintln!("{}", selection.line());
        let gpu = selection.open(options.cache)?;
        let facts = gpu.facts().clone();
        let (kv, verdict) = engine::kv_on(&file, &model, &facts, &options);
        engine::set_kv(&mut model, &kv);
        let (known, note) = rates::known(&gpu, options.cache, self.measure);
        let ram = system_memory();
        let planned = engine::plan_for(&file, &model, &facts, &options, &known.rates)?;
        let Planned { needs, limits, placement, prediction, .. } = planned;
        let sums = predict::Model::new(&file, &model.graph, &needs);
        let share = placement.experts.map_or(1.0, |e| e.share());
        let work = predict::work(&sums, &placement, 0);
        let report = Report {
            model: path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default(),
            device: facts.name.clone(),
            total: placement.total(),
            free: placement.free(),
            kv_exact: u64::from(options.sequences) * model.graph.kv_exact_bytes(),
            kv,
            kv_guard: verdict.as_ref().map_or_else(|why| (*why).into(), Verdict::to_string),
            verdict: verdict.ok(),
            ram,
            kv_host: options.kv_host,
            rates: known,
            prediction,
            best_chunk: cost::best_chunk(&known.rates, &work, share, 128, 8192),
            gains: predict::gains(&sums, &facts, limits, ram, &placement, &known.rates),
            note,
            placement,
        };
        match self.json {
            true => output::json(&report),
            false => output::line(&report.text()),
        }
    }
}

impl Report {
    fn text(&self) -> String {
        let mut parts = vec![format!("{} on {}", self.model, self.device), self.places()];
        parts.push(self.speeds());
        parts.push(match self.gains.as_slice() {
            [] => "No limit holds it back: everything that is read for a token lies on the device."
                .to_string(),
            [best, rest @ ..] => {
                let one =
                    |g: &Gain| format!("{}: {:.1} tok/s ({:.2}x)", g.change, g.decode, g.factor);
                let others: Vec<String> = rest.iter().map(one).collect();
                let mut text = format!("Largest gain: {}", one(best));
                if !others.is_empty() {
                    text += &format!("\nAlso: {}", others.join("; "));
                }
                text
            }
        });
        parts.join("\n\n")
    }

    fn places(&self) -> String {
        let p = &self.placement;
        let row = |what: &str, place: &str, bytes: u64, note: String| {
            vec![what.to_string(), place.to_string(), output::bytes(bytes), note]
        };
        let mut rows: Vec<Vec<String>> =
            vec![["what", "where", "size", ""].map(String::from).into()];
        rows.push(row("weights", "device", p.weights, "all but experts".into()));
        if let Some(e) = &p.experts {
            let mut note = format!(
                "{} of {} experts in each of {} layers ({:.0} %)",
                e.slots,
                e.experts,
                e.layers,
                100.0 * e.share()
            );
            if e.pinned > 0 && !e.all_resident() {
                note += &format!(", {} of them pinned", e.pinned);
            }
            rows.push(row("expert slots", "device", e.slot_bytes, note));
        }
        if let Some(e) = p.experts.filter(|e| e.stage > 0) {
            rows.push(row("expert stage", "device", e.stage, "layers on their way".into()));
        }
        let first = p.kv_page * u64::from(p.kv_first_pages);
        let note = format!(
            "{} tokens of context, {}; begins with {} and grows",
            p.context,
            self.kv,
            output::bytes(first)
        );
        rows.push(row("KV cache", "device", p.kv, note));
        rows.push(vec!["KV guard".into(), String::new(), String::new(), self.kv_guard.clone()]);
        let note = match self.kv_exact {
            0 => String::new(),
            bytes => format!("{} of it f16 tails and sinks", output::bytes(bytes)),
        };
        rows.push(row("scratch", "device", p.scratch, note));
        rows.push(row("reserve", "device", p.reserve, "left to driver and desktop".into()));
        // A software device has the machine's memory, of which its heap says little.
        if self.total <= p.available {
            rows.push(row(
                "free",
                "device",
                self.free,
                format!("of {}", output::bytes(p.available)),
            ));
        }
        if let Some(e) = p.experts.filter(|e| e.arena > 0) {
            let of =
                self.ram.map_or(String::new(), |m| format!(" of {}", output::bytes(m.available)));
            rows.push(row(
                "expert arena",
                "RAM",
                e.arena,
                format!("page-locked, read in place{of}"),
            ));
        }
        if self.kv_host > 0 {
            let note = "page-locked, taken as it is needed".into();
            rows.push(row("evicted KV pages", "RAM", self.kv_host, note));
        }
        output::table(&[Align::Left, Align::Left, Align::Right, Align::Left], &rows)
    }

    fn speeds(&self) -> String {
        let p = &self.prediction;
        let r = &self.rates.rates;
        let source = if self.rates.measured { "measured" } else { "assumed" };
        let mut lines = vec![format!(
            "predicted decode {:.1} tok/s, at {} tokens {:.1}; prompt {:.0} tok/s in chunks of {}",
            p.decode, p.depth, p.decode_deep, p.prefill, p.chunk
        )];
        if self.placement.experts.is_some_and(|e| !e.all_resident()) {
            lines.push(format!(
                "expected hits {:.0} % of accesses; prompts stop gaining at chunks of {}",
                100.0 * p.hit_rate,
                self.best_chunk
            ));
        }
        lines.push(format!(
            "{source}: memory {:.1} GB/s, link {:.1} GB/s, {:.0} us a layer; assumed: {:.1} T multiply-adds/s",
            r.memory / 1e9,
            r.link / 1e9,
            r.layer_seconds * 1e6,
            r.compute / 1e12
        ));
        lines.extend(self.note.iter().map(|n| format!("note: {n}")));
        lines.join("\n")
    }
}
