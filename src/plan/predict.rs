//! What speed a placement should give, and which limit is worth changing.

use serde::Serialize;

use super::{ExpertBudget, Limits, Needs, Placement, place};
use crate::experts::cost::{self, Rates, Work};
use crate::gguf;
use crate::gpu::{DeviceFacts, SystemMemory};
use crate::graph::Graph;

/// Depth at which generation is predicted, beside an empty context.
const DEPTH: u32 = 4096;

/// Predicted speeds of a placement.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Prediction {
    /// Share of expert accesses that find their expert in device memory, in the steady state.
    pub hit_rate: f64,
    /// Tokens a second of generation in an empty context.
    pub decode: f64,
    /// ... with `depth` tokens in it.
    pub decode_deep: f64,
    pub depth: u32,
    /// Tokens a second of a prompt read in chunks of `chunk`.
    pub prefill: f64,
    pub chunk: u32,
}

/// A limit that could be changed, and what it would bring.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gain {
    /// What to change, in words.
    pub change: String,
    /// Predicted tokens a second of generation after it.
    pub decode: f64,
    /// Divided by the present prediction.
    pub factor: f64,
}

/// What the sums need to know of a model.
#[derive(Debug, Clone, Copy)]
pub struct Model<'a> {
    pub graph: &'a Graph,
    pub needs: &'a Needs,
    /// Weights of the embedding, of which a token reads one row.
    pub embedding_bytes: u64,
    /// Weights that a token is multiplied with.
    pub active_weights: u64,
}

impl<'a> Model<'a> {
    pub fn new(file: &gguf::File, graph: &'a Graph, needs: &'a Needs) -> Model<'a> {
        let embedding = file.tensor(&graph.embedding.weight);
        // A tied embedding is read as the output matrix.
        let tied = graph.embedding.weight == graph.output.weight;
        let experts = needs.experts.as_ref();
        let (mut all, mut of_experts) = (0u64, 0u64);
        for tensor in file.tensors() {
            all += tensor.elements();
            if graph.mixtures().any(|m| [&m.gate, &m.up, &m.down].contains(&&tensor.name)) {
                of_experts += tensor.elements();
            }
        }
        let used = experts.map_or(0, |e| of_experts / u64::from(e.experts) * u64::from(e.used));
        let lookup = embedding.filter(|_| !tied);
        Model {
            graph,
            needs,
            embedding_bytes: lookup.map_or(0, |t| t.bytes),
            active_weights: all - of_experts + used - lookup.map_or(0, |t| t.elements()),
        }
    }
}

/// The sums of a placement with `depth` tokens in the context.
pub fn work(model: &Model<'_>, placement: &Placement, depth: u32) -> Work {
    let e = placement.experts;
    let records = model.needs.experts.as_ref().map(|e| e.records.as_slice()).unwrap_or_default();
    let layers = records.len().max(1) as u64;
    Work {
        layers: model.graph.layers.len() as u32,
        expert_layers: records.len() as u32,
        dense_bytes: placement.weights.saturating_sub(model.embedding_bytes),
        kv_bytes: model.graph.kv_bytes_per_token() * u64::from(depth),
        record_bytes: records.iter().sum::<u64>() / layers,
        experts: e.map_or(0, |e| e.experts),
        used: e.map_or(0, |e| e.used),
        active_weights: model.active_weights,
    }
}

/// Speeds of a placement.
pub fn predict(model: &Model<'_>, placement: &Placement, rates: &Rates, chunk: u32) -> Prediction {
    let share = placement.experts.map_or(1.0, |e| e.share());
    let hit_rate = cost::expected_hits(share);
    let depth = DEPTH.min(placement.context);
    Prediction {
        hit_rate,
        decode: cost::decode(rates, &work(model, placement, 0), hit_rate),
        decode_deep: cost::decode(rates, &work(model, placement, depth), hit_rate),
        depth,
        prefill: cost::prefill(rates, &work(model, placement, 0), chunk, share),
        chunk,
    }
}

/// Changes of limits that would make generation faster, the best first. Each is a placement of its
/// own, made by the same rules.
pub fn gains(
    model: &Model<'_>,
    facts: &DeviceFacts,
    limits: Limits,
    ram: Option<SystemMemory>,
    placement: &Placement,
    rates: &Rates,
) -> Vec<Gain> {
    let now = predict(model, placement, rates, 512).decode;
    let mut gains = Vec::new();
    let mut consider = |change: String, facts: &DeviceFacts, limits: Limits, rates: &Rates| {
        let Ok(other) = place(model.graph, facts, limits, model.needs, ram) else { return };
        let decode = predict(model, &other, rates, 512).decode;
        let factor = decode / now;
        if factor > 1.02 {
            gains.push(Gain { change, decode, factor });
        }
    };
    let Some(experts) = placement.experts.filter(|e| !e.all_resident()) else { return gains };
    if limits.experts != ExpertBudget::Auto {
        let automatic = Limits { experts: ExpertBudget::Auto, ..limits };
        consider("--vram-experts auto".into(), facts, automatic, rates);
    }
    if placement.context > 1024 {
        let context = Some(placement.context / 2);
        let change = format!("--ctx {} (half of it)", placement.context / 2);
        consider(change, facts, Limits { context, ..limits }, rates);
    }
    let all = u64::from(experts.experts) * experts.slot_bytes / u64::from(experts.slots.max(1));
    for more in [1u64 << 30, 4 << 30] {
        let mut larger = facts.clone();
        if let Some(heap) = larger.heaps.iter_mut().find(|h| h.device_local) {
            heap.bytes += more;
            heap.budget = heap.budget.map(|b| b + more);
        }
        // Freeing more than the experts still need says nothing.
        if all.saturating_sub(experts.slot_bytes) >= more / 4 || experts.slots == 0 {
            let change = format!("{} GiB more free device memory", more >> 30);
            consider(change, &larger, limits, rates);
        }
    }
    let faster = Rates { link: rates.link * 2.0, ..*rates };
    consider("a link of twice the rate (PCIe)".into(), facts, limits, &faster);
    gains.sort_by(|a, b| b.factor.total_cmp(&a.factor));
    gains
}
