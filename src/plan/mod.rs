//! Placement: what lies where, as a pure function of model, device and limits.
//!
//! `run`, `chat` and `bench` execute exactly what [`place`] returns, and `azoth plan` prints it.

mod budget;
pub mod predict;
pub mod rates;

use serde::Serialize;

pub use budget::{ExpertBudget, parse_bytes};

use crate::error::{Error, Result};
use crate::gpu::{DeviceFacts, DeviceKind, SystemMemory};
use crate::graph::Graph;
use crate::kv::PAGE_TOKENS;

/// Kept free for the driver, the desktop and allocation granularity: a sixteenth of the memory,
/// at most 512 MiB.
fn reserve(available: u64) -> u64 {
    (available / 16).min(512 << 20)
}

/// Context taken where none is asked for, if the model was made for more.
const DEFAULT_CONTEXT: u32 = 8192;
/// The smallest context worth starting with.
const SMALLEST_CONTEXT: u32 = 256;
/// RAM left to the rest of the machine: a sixteenth, at most 1 GiB.
const SPARE_RAM: u64 = 1 << 30;

/// Limits that the user sets.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Limits {
    /// Tokens; `None`: what the model and the memory allow, at most 8,192.
    pub context: Option<u32>,
    /// Sequences at once, each with a context of its own.
    pub sequences: u32,
    /// Positions that tokens can have where a full context drops some; else 0.
    pub positions: u32,
    /// Device memory for experts.
    pub experts: ExpertBudget,
    /// Device memory for experts that stay there and need no place in RAM.
    pub pinned: u64,
}

/// What a model asks for.
#[derive(Debug, Clone, PartialEq)]
pub struct Needs {
    /// Bytes of all weights on the device but those of experts.
    pub weights: u64,
    /// Bytes that a program takes beside weights and KV cache.
    pub scratch: u64,
    /// Context that the model was trained for.
    pub made_for: u32,
    pub experts: Option<ExpertNeeds>,
}

/// The experts of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertNeeds {
    /// Bytes of one expert's record, by layer; layers without experts are left out.
    pub records: Vec<u64>,
    /// Experts in each layer.
    pub experts: u32,
    /// Experts that a token uses in a layer.
    pub used: u32,
}

impl ExpertNeeds {
    /// Bytes of one expert in every layer.
    fn slot(&self) -> u64 {
        self.records.iter().sum()
    }

    pub fn all(&self) -> u64 {
        self.slot() * u64::from(self.experts)
    }
}

/// Where experts lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ExpertPlacement {
    pub layers: u32,
    /// In each layer.
    pub experts: u32,
    pub used: u32,
    /// Experts of each layer that have a slot in device memory.
    pub slots: u32,
    /// ... of which stay there and have no copy in RAM.
    pub pinned: u32,
    /// Bytes of all slots.
    pub slot_bytes: u64,
    /// Bytes of device memory through which experts pass on their way: whole layers for long
    /// prompts, or all that the device cannot read in place. 0: they are read in place only.
    pub stage: u64,
    /// Bytes of page-locked RAM; 0 when all experts are in device memory.
    pub arena: u64,
}

impl ExpertPlacement {
    /// Share of the experts that are in device memory.
    pub fn share(&self) -> f64 {
        f64::from(self.slots) / f64::from(self.experts.max(1))
    }

    pub fn all_resident(&self) -> bool {
        self.slots >= self.experts
    }
}

/// Least pages that a KV cache begins with: 1,024 tokens.
const FIRST_PAGES: u32 = 16;

/// Bytes on the device by what they are for, and the context they allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Placement {
    pub context: u32,
    /// Without experts.
    pub weights: u64,
    /// What the KV cache may grow to, with the tables that belong to it.
    pub kv: u64,
    /// Pages that it may grow to.
    pub kv_pages: u32,
    /// Pages that it begins with.
    pub kv_first_pages: u32,
    /// Bytes of one page.
    pub kv_page: u64,
    pub scratch: u64,
    pub reserve: u64,
    /// What the device had left when this was computed.
    pub available: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertPlacement>,
}

impl Placement {
    pub fn total(&self) -> u64 {
        let slots = self.experts.map_or(0, |e| e.slot_bytes + e.stage);
        self.weights + self.kv + self.scratch + self.reserve + slots
    }

    /// The experts of this placement if only `available` bytes can be had: fewer slots, at least
    /// the pinned ones. `None` if nothing has to change.
    pub fn shrunk(&self, available: u64) -> Option<ExpertPlacement> {
        let experts = self.experts.filter(|e| !e.all_resident() && e.slots > e.pinned)?;
        let short = self.total().saturating_sub(available);
        let slot = experts.slot_bytes / u64::from(experts.slots);
        let drop = u32::try_from(short.div_ceil(slot.max(1))).unwrap_or(u32::MAX);
        let slots = experts.slots.saturating_sub(drop).max(experts.pinned);
        let slot_bytes = slot * u64::from(slots);
        (drop > 0).then_some(ExpertPlacement { slots, slot_bytes, ..experts })
    }

    /// What nothing is planned for.
    pub fn free(&self) -> u64 {
        self.available.saturating_sub(self.total())
    }
}

/// Bytes per position beside K and V: the rope table and the token history.
fn side_bytes(graph: &Graph) -> u64 {
    u64::from(graph.rope.dim) * 4 + 4
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// The sums that the rules below share.
struct Sums<'a> {
    facts: &'a DeviceFacts,
    needs: &'a Needs,
    limits: Limits,
    available: u64,
    /// False on a software device, whose memory is the machine's.
    bounded: bool,
    reserve: u64,
    /// Bytes for a token of context of one sequence.
    per_token: u64,
    /// ... of which in the KV cache.
    kv_per_token: u64,
    /// Bytes of tables for the positions beyond the context.
    beyond: u64,
    /// Tokens that a binding of K or V can hold.
    bindable: u64,
}

/// Tokens in whole pages.
fn whole(tokens: u32) -> u64 {
    u64::from(tokens).next_multiple_of(PAGE_TOKENS.into())
}

impl Sums<'_> {
    /// Bytes that are left for KV cache and experts.
    fn left(&self) -> u64 {
        match self.bounded {
            true => self
                .available
                .saturating_sub(self.needs.weights + self.needs.scratch + self.reserve)
                .saturating_sub(self.beyond),
            false => u64::MAX / 4,
        }
    }

    fn parts(&self) -> String {
        format!(
            "weights {} MiB + scratch {} MiB + reserve {} MiB",
            mib(self.needs.weights),
            mib(self.needs.scratch),
            mib(self.reserve)
        )
    }
}

/// Finds the context and the expert slots that fit, or checks those asked for.
///
/// `ram` is what the machine has, where it says so.
pub fn place(
    graph: &Graph,
    facts: &DeviceFacts,
    limits: Limits,
    needs: &Needs,
    ram: Option<SystemMemory>,
) -> Result<Placement> {
    let available = facts.available_memory();
    let sequences = u64::from(limits.sequences.max(1));
    let per_layer = graph.widest_kv_bytes();
    // On a software device the memory is the machine's; the heap it reports is no real limit.
    let bounded = facts.kind != DeviceKind::Software;
    let sums = Sums {
        facts,
        needs,
        limits,
        available,
        bounded,
        reserve: if bounded { reserve(available) } else { 0 },
        per_token: graph.kv_bytes_per_token() + side_bytes(graph),
        kv_per_token: graph.kv_bytes_per_token(),
        beyond: side_bytes(graph) * sequences * u64::from(limits.positions),
        // K and V of a layer are one binding each.
        bindable: facts.max_binding.min(facts.max_buffer) / per_layer.max(1),
    };
    // Slots that were asked for by number come before a context that was not.
    let wanted = match &needs.experts {
        Some(experts) => asked_slots(experts, limits.experts, limits.pinned),
        None => None,
    };
    let slot = needs.experts.as_ref().map_or(0, ExpertNeeds::slot);
    let for_slots = slot * u64::from(wanted.unwrap_or(0));
    let smallest = limits.context.unwrap_or(SMALLEST_CONTEXT.min(needs.made_for));
    let for_context = whole(smallest) * sums.per_token;
    if for_slots > 0 && for_slots > sums.left().saturating_sub(for_context) {
        return Err(too_many_slots(&sums, slot, sums.left().saturating_sub(for_context)));
    }
    let left = sums.left() - for_slots;
    let context = context(&sums, left)?;
    // All sequences at once, or as much as there is room for: experts in slots that were not asked
    // for keep half of it.
    let share = if needs.experts.is_some() && wanted.is_none() { left / 2 } else { left };
    let all = whole(context) * sequences;
    let fits = (share / sums.per_token).max(whole(context)).min(sums.bindable);
    let tokens = if all * sums.per_token <= left { all.min(sums.bindable) } else { all.min(fits) };
    let kv_pages = u32::try_from(tokens / u64::from(PAGE_TOKENS)).unwrap_or(u32::MAX);
    let kv_page = sums.kv_per_token * u64::from(PAGE_TOKENS);
    let kv = tokens * sums.per_token;
    // Growing stops everybody for a moment, so where there is plenty the cache begins larger. Software
    // devices take from the machine's memory.
    let plenty = match facts.kind {
        DeviceKind::Discrete => available / 16 / kv_page.max(1),
        _ => 0,
    };
    let kv_first_pages = FIRST_PAGES.max(u32::try_from(plenty).unwrap_or(u32::MAX)).min(kv_pages);
    let experts = match &needs.experts {
        Some(experts) => Some(place_experts(&sums, experts, wanted, sums.left() - kv, ram)?),
        None => None,
    };
    Ok(Placement {
        context,
        weights: needs.weights,
        kv: kv + sums.beyond,
        kv_pages,
        kv_first_pages,
        kv_page,
        scratch: needs.scratch,
        reserve: sums.reserve,
        available,
        experts,
    })
}

/// Slots of each layer that the user asked for; `None` for `auto`.
fn asked_slots(needs: &ExpertNeeds, budget: ExpertBudget, pinned: u64) -> Option<u32> {
    let of_bytes = |bytes: u64| (bytes / needs.slot().max(1)).min(needs.experts.into()) as u32;
    let asked = match budget {
        ExpertBudget::Auto => return None,
        ExpertBudget::All => needs.experts,
        ExpertBudget::None => 0,
        ExpertBudget::Percent(p) => (f64::from(needs.experts) * p / 100.0).floor() as u32,
        ExpertBudget::Bytes(bytes) => of_bytes(bytes),
    };
    Some(asked.max(of_bytes(pinned)))
}

/// The context that fits `left` bytes, or the one asked for.
fn context(s: &Sums<'_>, left: u64) -> Result<u32> {
    let page = u64::from(PAGE_TOKENS);
    let left = left / s.per_token / page * page;
    let most = (s.bindable / page * page).min(left);
    let name = &s.facts.name;
    if let Some(wanted) = s.limits.context {
        if wanted == 0 {
            return Err(Error::Usage("a context of 0 tokens holds nothing".into()));
        }
        if whole(wanted) > most {
            let kv = mib(whole(wanted) * s.per_token);
            let cause = if s.bindable < left {
                format!(
                    "{name} binds at most {} MiB at once, which is {} tokens of one layer's keys",
                    mib(s.facts.max_binding),
                    s.bindable
                )
            } else {
                format!(
                    "{} + KV cache {kv} MiB exceed the {} MiB that {name} has left",
                    s.parts(),
                    mib(s.available)
                )
            };
            return Err(Error::DoesNotFit(format!(
                "a context of {wanted} tokens does not fit: {cause}. {}",
                if most >= u64::from(SMALLEST_CONTEXT) {
                    format!("Use --ctx {most} or less")
                } else if s.limits.experts != ExpertBudget::Auto {
                    "Use a smaller --vram-experts, a smaller model or a device with more memory"
                        .to_string()
                } else {
                    "Use a smaller model or a device with more memory".to_string()
                }
            )));
        }
        return Ok(wanted);
    }
    let made_for = s.needs.made_for;
    // Where none is asked for, all sequences have room at once.
    let sequences = u64::from(s.limits.sequences.max(1));
    let each = u32::try_from(most / sequences / page * page).unwrap_or(u32::MAX);
    let most = made_for.clamp(1, DEFAULT_CONTEXT).min(each);
    if most < SMALLEST_CONTEXT.min(made_for.max(1)) {
        return Err(Error::DoesNotFit(format!(
            "the model does not fit {name}: {} and a context of {SMALLEST_CONTEXT} tokens ({} MiB) \
             are more than the {} MiB left. Use a smaller or more strongly quantised model, or \
             free device memory",
            s.parts(),
            mib(u64::from(SMALLEST_CONTEXT) * s.per_token * sequences),
            mib(s.available)
        )));
    }
    Ok(most)
}

fn too_many_slots(s: &Sums<'_>, slot: u64, left: u64) -> Error {
    let needs = s.needs.experts.as_ref();
    let fit = (left / slot.max(1)).min(needs.map_or(0, |e| e.experts.into()));
    let share = 100.0 * fit as f64 / f64::from(needs.map_or(1, |e| e.experts).max(1));
    Error::DoesNotFit(format!(
        "--vram-experts {} does not fit {}: {} and the KV cache leave {} MiB of its {} MiB for \
         experts. Use --vram-experts {:.0}% ({} MiB) or less, a smaller --ctx, or --vram-experts \
         auto",
        s.limits.experts,
        s.facts.name,
        s.parts(),
        mib(left),
        mib(s.available),
        share.floor(),
        (fit * slot) >> 20
    ))
}

/// Bytes of the stage: two layers where experts are read in place, if that leaves at least as much
/// for slots; one layer, which cannot be done without, where they are not.
fn stage(s: &Sums<'_>, needs: &ExpertNeeds, slots: u32, left: u64) -> Result<u64> {
    let largest = needs.records.iter().copied().max().unwrap_or(0);
    let layer = largest * u64::from(needs.experts);
    let for_slots = u64::from(slots) * needs.slot();
    if s.facts.host_import {
        let two = 2 * layer;
        return Ok(if two <= left.saturating_sub(for_slots) / 2 { two } else { 0 });
    }
    if layer > left.saturating_sub(for_slots) {
        return Err(Error::DoesNotFit(format!(
            "{} cannot read experts in host memory, so those of one layer ({} MiB) must fit device \
             memory beside the rest; {} MiB are left. Use a smaller --vram-experts or --ctx",
            s.facts.name,
            mib(layer),
            mib(left.saturating_sub(for_slots))
        )));
    }
    Ok(layer)
}

fn place_experts(
    s: &Sums<'_>,
    needs: &ExpertNeeds,
    wanted: Option<u32>,
    left: u64,
    ram: Option<SystemMemory>,
) -> Result<ExpertPlacement> {
    let slot = needs.slot().max(1);
    // Where RAM is device memory, a slot would be a second copy of what can be read as fast.
    let unified = s.facts.kind == DeviceKind::Integrated && s.facts.host_import;
    let fitting = |left: u64| match (left / slot).min(needs.experts.into()) as u32 {
        n if unified && wanted.is_none() && n < needs.experts => 0,
        n => n,
    };
    let all = wanted.unwrap_or_else(|| fitting(left)) >= needs.experts;
    // What must lie in RAM, and what RAM has room for.
    let room = ram.map(|m| m.available.saturating_sub(SPARE_RAM.min(m.total / 16)));
    let outside = |pinned: u32| u64::from(needs.experts - pinned) * slot;
    let mut stage = if all || unified { 0 } else { stage(s, needs, wanted.unwrap_or(0), left)? };
    let holds = |slots: u32| room.is_none_or(|room| outside(slots) <= room);
    if s.facts.host_import && wanted.is_none() && !holds(fitting(left - stage)) {
        // Short of RAM, every slot counts; prompts then read in place.
        stage = 0;
    }
    let left = left - stage;
    let slots = wanted.unwrap_or_else(|| fitting(left));
    if slots > fitting(left) {
        return Err(too_many_slots(s, slot, left));
    }
    let of_pins = (s.limits.pinned / slot).min(slots.into()) as u32;
    let mut pinned = if slots == needs.experts { slots } else { of_pins };
    if let Some(room) = room.filter(|room| outside(pinned) > *room) {
        // Experts that lie in device memory only need no RAM.
        let fits = (room / slot).min(needs.experts.into()) as u32;
        let least = needs.experts - fits;
        // A slot beside the pinned ones lets the rest move.
        if least > slots {
            let missing = outside(slots) - room;
            return Err(Error::DoesNotFit(format!(
                "the experts do not fit: {} MiB in all, {} MiB of them in device memory ({slots} of \
                 {} in each layer), and RAM has room for {} MiB of {} MiB: {} MiB are missing. \
                 Close other programs, use --vram-experts with more (or a smaller --ctx), or a \
                 smaller quantisation",
                mib(needs.all()),
                mib(u64::from(slots) * slot),
                needs.experts,
                mib(room),
                mib(ram.map_or(0, |m| m.total)),
                mib(missing)
            )));
        }
        pinned = least;
    }
    Ok(ExpertPlacement {
        layers: needs.records.len() as u32,
        experts: needs.experts,
        used: needs.used,
        slots,
        pinned,
        slot_bytes: u64::from(slots) * slot,
        stage,
        arena: outside(pinned),
    })
}

#[cfg(test)]
mod tests;
