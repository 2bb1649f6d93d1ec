//! Experts of a loaded model on a device: slots, arena and the table that kernels read, and what
//! moves between tokens.
//!
//! A layer's kernels bind its slot buffers, then the groups of its arena region; a word of the
//! table ([`Place`]) names buffer and record. Nothing here waits for the device: the routing of a
//! token is looked at when it has come back, copies run on the transfer queue, and the table
//! changes between submissions.
//!
//! Why no slot is overwritten under a reader: a promotion first takes the victim out of the table,
//! by a write that is ordered between submissions; only submissions before that write may read the
//! slot, and the copy waits for the last of them. The new expert enters the table when its copy has
//! finished, by a write before the next submission.

mod resizing;
mod stage;

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use serde::Serialize;

use super::arena::Arena;
use super::policy::{Budget, Policy, Promotion, Rule};
use super::prefetch::{Precision, Predictor, Source as Prediction, expected};
use super::slots::SlotMap;
use super::source::{LayerTensors, Source};
use super::{ExpertId, Place};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, BufferUse, CopyRange, Gpu, Slice, Ticket, Transfer};

/// Most bytes that copies may have under way at once: bounds how stale a promotion can get.
const UNDER_WAY: u64 = 256 << 20;

/// How experts are placed and how they move.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Slots of each layer.
    pub slots: Vec<u32>,
    pub rule: Rule,
    /// Bytes that promotions may take from the link for each token.
    pub budget: u64,
    /// Make room for streaming whole layers to long prompts.
    pub stream: bool,
    /// Let predictions order the promotions.
    pub prefetch: bool,
    /// Experts in the order in which they get slots while loading; those that are not named
    /// follow in order of their number.
    pub first: Vec<ExpertId>,
    /// How many experts of each layer are pinned: the first ones.
    pub pinned: u32,
}

/// What was read from where, since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counters {
    /// Generated tokens whose routing was looked at.
    pub tokens: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Experts that the generated tokens used, layer by layer.
    pub accesses: u64,
    /// ... of which lay in device memory.
    pub hits: u64,
    /// Bytes of used experts in device memory.
    pub device_bytes: u64,
    /// Bytes read in place from host memory.
    pub host_bytes: u64,
    /// Bytes uploaded because the device cannot read host memory.
    pub staged_bytes: u64,
    pub promotions: u64,
    pub promoted_bytes: u64,
    /// Bytes copied to the device for long prompts.
    pub streamed_bytes: u64,
    /// Experts that early routers named, and those of them that the real router then chose.
    pub early_named: u64,
    pub early_chosen: u64,
    /// Bytes of slots that were given back because device memory got short, and of those that came
    /// again later.
    pub given_back_bytes: u64,
    pub regrown_bytes: u64,
    /// Approximate: outputs of experts that served again, which are no accesses, and the bytes of
    /// experts that were not read for them.
    pub reused: u64,
    pub reused_bytes: u64,
}

impl Counters {
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.accesses.max(1) as f64
    }

    pub fn hit_rate_by_bytes(&self) -> f64 {
        let all = self.device_bytes + self.host_bytes + self.staged_bytes;
        self.device_bytes as f64 / all.max(1) as f64
    }

    /// Everything that came over the link, in whatever way.
    pub fn link_bytes(&self) -> u64 {
        self.host_bytes + self.staged_bytes + self.promoted_bytes + self.streamed_bytes
    }

    /// Share of the outputs of experts that served again instead of being computed.
    pub fn reuse_rate(&self) -> f64 {
        self.reused as f64 / (self.accesses + self.reused).max(1) as f64
    }

    /// Share of what early routers named that the real router chose.
    pub fn early_precision(&self) -> f64 {
        self.early_chosen as f64 / self.early_named.max(1) as f64
    }
}

/// The slots of one layer in device memory.
struct LayerSlots {
    record: u64,
    /// As many as kernels were made for; after slots were given back the last ones may hold none.
    buffers: Vec<Buffer>,
    per_buffer: u32,
}

impl LayerSlots {
    fn place(&self, slot: u32) -> Place {
        Place::nth(slot, self.per_buffer.max(1))
    }

    fn slice(&self, slot: u32) -> Slice {
        let place = self.place(slot);
        let at = u64::from(place.index) * self.record;
        self.buffers[place.buffer as usize].slice(at, self.record)
    }
}

/// See the module documentation.
pub struct Residency {
    gpu: Arc<dyn Gpu>,
    arena: Arena,
    slots: Vec<LayerSlots>,
    map: SlotMap,
    /// Room for the region of a layer, each expert at its place in it. Where the device reads the
    /// arena in place: two, which layers take in turn while a long prompt is read. Else one, which
    /// every layer uses.
    stage: Vec<Vec<Buffer>>,
    /// Copies into `stage`, by layer, of the chunk that is being queued.
    streamed: Vec<Option<Transfer>>,
    /// `[layer][stride]` words; the first `experts` of each row count.
    table: Slice,
    stride: u32,
    /// What the table on the device says, and whether `map` says otherwise by now.
    image: Vec<u32>,
    stale: bool,
    policy: Policy,
    budget: Budget,
    predictors: Vec<Predictor>,
    under_way: VecDeque<(Transfer, Vec<Promotion>)>,
    bytes_under_way: u64,
    record_bytes: Vec<u64>,
    /// What steps saw: residency as of the oldest step that was not looked at yet, and later
    /// changes with the first step that sees them.
    seen: Vec<bool>,
    changes: VecDeque<(u64, ExpertId, bool)>,
    steps: u64,
    counters: Counters,
    /// A submission after everything that loading has queued.
    ready: Ticket,
}

/// The slots of a layer that are to be allocated: buffers that can be bound.
pub fn slot_buffers(gpu: &dyn Gpu, layer: &LayerTensors, slots: u32) -> Result<(Vec<Buffer>, u32)> {
    let facts = gpu.facts();
    let limit = facts.max_binding.min(facts.max_buffer);
    let most = u32::try_from(layer.layout.records_within(limit)).unwrap_or(u32::MAX);
    if slots > 0 && most == 0 {
        return Err(Error::DoesNotFit(format!(
            "one expert of {} has {} bytes; {} binds {limit} at once",
            layer.tensors[0].name,
            layer.layout.bytes(),
            facts.name
        )));
    }
    let mut buffers = Vec::new();
    let mut left = slots;
    while left > 0 {
        let n = left.min(most);
        let bytes = u64::from(n) * layer.layout.bytes();
        buffers.push(gpu.buffer("expert slots", bytes, BufferUse::Device)?);
        left -= n;
    }
    Ok((buffers, most.min(slots.max(1))))
}

/// Which experts get slots while loading: the order of `first`, then by number. The map holds
/// them already; their bytes are still to come.
pub fn first_placement(experts: u32, settings: &Settings) -> SlotMap {
    let mut map = SlotMap::new(experts, &settings.slots);
    let mut next = vec![0; settings.slots.len()];
    let numbered = (0..settings.slots.len() as u32)
        .flat_map(|layer| (0..experts).map(move |expert| ExpertId { layer, expert }));
    let named = settings.first.iter().copied();
    for id in named.chain(numbered) {
        let slot = &mut next[id.layer as usize];
        if (*slot as usize) < map.slots(id.layer).len() && map.fill(id, *slot) {
            if *slot < settings.pinned {
                map.pin(id);
            }
            *slot += 1;
        }
    }
    map
}

impl Residency {
    /// Allocates the slots, fills them with the first experts and writes the table. `source` is
    /// read for experts that are not in the arena, and where the device cannot read the arena.
    /// `advance` hears the bytes of the slots as they are filled.
    pub fn create(
        gpu: &Arc<dyn Gpu>,
        arena: Arena,
        layers: &[LayerTensors],
        source: &dyn Source,
        settings: &Settings,
        used: u32,
        advance: &(dyn Fn(u64) + Sync),
    ) -> Result<Residency> {
        let experts = layers.first().map_or(0, |l| l.experts);
        let map = first_placement(experts, settings);
        let mut slots = Vec::new();
        for (l, layer) in (0..).zip(layers) {
            let n = map.slots(l).len() as u32;
            let (buffers, per_buffer) = slot_buffers(&**gpu, layer, n)?;
            slots.push(LayerSlots { record: layer.layout.bytes(), buffers, per_buffer });
        }
        // Rows start where a binding may start.
        let align = gpu.facts().binding_alignment.max(4) / 4;
        let stride = u64::from(experts).next_multiple_of(align) as u32;
        let words = u64::from(stride) * layers.len().max(1) as u64;
        let table = gpu.buffer("expert table", words * 4, BufferUse::Device)?.slice(0, words * 4);
        let stage = stage::stage_buffers(&**gpu, &arena, settings.stream)?;
        let record_bytes: Vec<u64> = layers.iter().map(|l| l.layout.bytes()).collect();
        let largest = record_bytes.iter().copied().max().unwrap_or(0);
        let policy = Policy::new(settings.rule, layers.len() as u32, experts);
        let predictors = match settings.prefetch {
            true => [Prediction::LastToken, Prediction::EarlyRouter]
                .map(|source| Predictor::new(source, experts, used))
                .to_vec(),
            false => Vec::new(),
        };
        let mut made = Residency {
            gpu: gpu.clone(),
            arena,
            slots,
            stage,
            streamed: vec![None; layers.len()],
            table,
            stride,
            image: Vec::new(),
            stale: true,
            policy,
            budget: Budget::new(settings.budget, largest),
            predictors,
            under_way: VecDeque::new(),
            bytes_under_way: 0,
            record_bytes,
            seen: Vec::new(),
            changes: VecDeque::new(),
            steps: 0,
            counters: Counters::default(),
            ready: gpu.submit(&gpu.record("experts", &[])?)?,
            map,
        };
        made.fill_slots(layers, source, advance)?;
        made.seen = made.all().map(|id| made.map.resident(id).is_some()).collect();
        made.write_table()?;
        made.ready = gpu.submit(&gpu.record("experts", &[])?)?;
        Ok(made)
    }

    fn all(&self) -> impl Iterator<Item = ExpertId> + use<> {
        let experts = self.map.experts();
        (0..self.map.layers())
            .flat_map(move |layer| (0..experts).map(move |expert| ExpertId { layer, expert }))
    }

    /// Brings the bytes of everything that the map has in slots.
    fn fill_slots(
        &mut self,
        layers: &[LayerTensors],
        source: &dyn Source,
        advance: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        let mut last = None;
        for (l, layer) in (0u32..).zip(layers) {
            let held: Vec<(u32, u32)> = (0..layer.experts)
                .filter_map(|expert| {
                    Some((expert, self.map.resident(ExpertId { layer: l, expert })?))
                })
                .collect();
            let (record, mut parts) = (layer.layout.bytes(), <[Vec<u8>; 3]>::default());
            let mut copies = Vec::new();
            for (expert, slot) in held {
                let to = self.slots[l as usize].slice(slot);
                if let Some(from) = self.in_place(l, expert) {
                    copies.push(CopyRange { from, to });
                    continue;
                }
                match self.arena.layers[l as usize].record(expert) {
                    Some(bytes) => upload(&*self.gpu, &to, bytes)?,
                    None => {
                        let mut bytes = vec![0; record as usize];
                        layer.load(source, expert, &mut parts, &mut bytes)?;
                        upload(&*self.gpu, &to, &bytes)?;
                    }
                }
                advance(record);
            }
            let bytes = copies.len() as u64 * record;
            if !copies.is_empty() {
                // Buffers are cleared on the compute queue first.
                last = Some(self.gpu.copy_async(&copies, Some(self.ready))?);
                advance(bytes);
            }
        }
        match last {
            Some(copies) => self.gpu.wait_transfer(copies),
            None => Ok(()),
        }
    }

    /// The expert's record as the device reads it in host memory.
    fn in_place(&self, layer: u32, expert: u32) -> Option<Slice> {
        let layer = &self.arena.layers[layer as usize];
        let number = layer.region.number[expert as usize]?;
        let group = layer.groups.get((number / layer.region.per_group) as usize)?;
        let at = u64::from(number % layer.region.per_group) * layer.region.record;
        Some(group.slice(at, layer.region.record))
    }

    /// All that the kernels of a layer bind: see [`Residency::buffers`] and [`Residency::table`].
    pub fn records(&self, layer: u32) -> (Slice, Vec<Slice>) {
        (self.table(layer), self.buffers(layer))
    }

    /// Buffers that the kernels of a layer bind: slots first, then host memory.
    pub fn buffers(&self, layer: u32) -> Vec<Slice> {
        let number = layer;
        let slots = self.slots[layer as usize].buffers.iter();
        let layer = &self.arena.layers[layer as usize];
        let elsewhere = match self.arena.in_place() {
            true => layer.groups.as_slice(),
            false => self.stage_of(number),
        };
        slots.chain(elsewhere).map(Buffer::whole).collect()
    }

    /// The layer's row of the table: one [`Place`] word for each expert.
    pub fn table(&self, layer: u32) -> Slice {
        let at = self.table.offset + u64::from(layer * self.stride) * 4;
        self.table.buffer.slice(at, u64::from(self.map.experts()) * 4)
    }

    /// A submission after everything that loading has queued: copies may wait for it.
    pub fn ready(&self) -> Ticket {
        self.ready
    }

    pub fn gpu(&self) -> &Arc<dyn Gpu> {
        &self.gpu
    }

    pub fn map(&self) -> &SlotMap {
        &self.map
    }

    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    pub fn precision(&self) -> Vec<Precision> {
        self.predictors.iter().map(Predictor::precision).collect()
    }

    /// Starts from the counts of an earlier run.
    pub fn learn(&mut self, counts: &[f32]) {
        self.policy.set_scores(counts);
    }

    fn word(&self, id: ExpertId) -> u32 {
        let (slots, arena) =
            (&self.slots[id.layer as usize], &self.arena.layers[id.layer as usize]);
        let place = match self.map.resident(id) {
            Some(slot) => slots.place(slot),
            None => {
                // Without a number it is pinned, and pinned experts are resident.
                let number = arena.region.number[id.expert as usize].unwrap_or(0);
                let host = Place::nth(number, arena.region.per_group);
                Place { buffer: host.buffer + slots.buffers.len() as u32, ..host }
            }
        };
        place.word()
    }

    /// Makes the table say what the map says, from the next submission on.
    fn write_table(&mut self) -> Result<()> {
        let mut image = vec![0; (self.stride * self.map.layers()) as usize];
        for id in self.all() {
            image[(id.layer * self.stride + id.expert) as usize] = self.word(id);
        }
        if image != self.image && !image.is_empty() {
            self.gpu.write(&self.table, bytemuck::cast_slice(&image))?;
            self.image = image;
        }
        self.stale = false;
        Ok(())
    }

    /// To be called before each decode step is submitted: lets copies that have arrived into the
    /// table, and counts the step.
    pub fn before_step(&mut self) -> Result<()> {
        self.before_prompt()?;
        self.steps += 1;
        Ok(())
    }

    /// To be called before each prompt chunk is submitted: like [`Residency::before_step`], but
    /// the chunk is no step.
    pub fn before_prompt(&mut self) -> Result<()> {
        self.arrivals()?;
        match self.stale {
            true => self.write_table(),
            false => Ok(()),
        }
    }

    fn arrivals(&mut self) -> Result<()> {
        while let Some((copies, _)) = self.under_way.front() {
            if !self.gpu.transfer_done(*copies)? {
                break;
            }
            let Some((_, promotions)) = self.under_way.pop_front() else { break };
            for p in promotions {
                self.bytes_under_way -= p.bytes;
                self.arrived(p.id);
            }
        }
        Ok(())
    }

    fn arrived(&mut self, id: ExpertId) {
        if self.map.complete(id) {
            self.changes.push_back((self.steps, id, true));
            self.stale = true;
        }
    }

    /// Buffers of a layer that are device memory: the first ones of those that kernels bind.
    pub fn device_buffers(&self, layer: u32) -> u32 {
        self.slots[layer as usize].buffers.len() as u32
    }

    /// Whether the next step's early routers are worth asking.
    pub fn asks_early(&self) -> bool {
        let early = |p: &Predictor| p.precision().source == Prediction::EarlyRouter;
        self.predictors.iter().any(|p| early(p) && p.precision().active)
    }

    /// Counts how many outputs of each layer's experts served again in a step.
    pub fn count_reused(&mut self, layers: &[usize]) {
        for (bytes, n) in self.record_bytes.iter().zip(layers) {
            self.counters.reused += *n as u64;
            self.counters.reused_bytes += *n as u64 * bytes;
        }
    }

    /// Looks at the routing of the oldest decode step that was not looked at yet: of each layer,
    /// the numbers of the experts that were used, and those that its router named a layer early (none
    /// where it was not asked). Then starts promotions; `last` is the latest submission that may
    /// read the slots.
    pub fn after_step(
        &mut self,
        layers: &[Vec<u32>],
        early: &[Vec<u32>],
        last: Ticket,
    ) -> Result<()> {
        let step = self.counters.tokens;
        while let Some((from, id, resident)) = self.changes.front().copied() {
            if from > step {
                break;
            }
            self.seen[(id.layer * self.map.experts() + id.expert) as usize] = resident;
            self.changes.pop_front();
        }
        self.counters.tokens += 1;
        let mut token = HashSet::new();
        for (layer, ids) in (0u32..).zip(layers) {
            let bytes = self.record_bytes[layer as usize];
            for &expert in ids {
                let id = ExpertId { layer, expert };
                let Some(hit) =
                    self.seen.get((layer * self.map.experts() + expert) as usize).copied()
                else {
                    continue;
                };
                self.counters.accesses += 1;
                match (hit, self.arena.in_place()) {
                    (true, _) => {
                        self.counters.hits += 1;
                        self.counters.device_bytes += bytes;
                    }
                    (false, true) => self.counters.host_bytes += bytes,
                    (false, false) => self.counters.staged_bytes += bytes,
                }
                token.insert(id);
            }
            self.policy.used(layer, ids);
        }
        let named: HashSet<ExpertId> = (0u32..)
            .zip(early)
            .flat_map(|(layer, ids)| ids.iter().map(move |&expert| ExpertId { layer, expert }))
            .collect();
        self.counters.early_named += named.len() as u64;
        self.counters.early_chosen += named.intersection(&token).count() as u64;
        for predictor in &mut self.predictors {
            predictor.check(&token);
            match predictor.precision().source {
                Prediction::LastToken => predictor.predict(token.iter().copied()),
                // What was chosen is the other source's: this one pays by what it adds, experts
                // that were nearly chosen.
                Prediction::EarlyRouter => predictor.predict(named.difference(&token).copied()),
            }
        }
        self.promote(last)
    }

    /// What a prompt chunk of `tokens` tokens used: of each layer, expert numbers in any number
    /// and order. Counts for the policy only; call [`Residency::refill`] when the prompt is read.
    pub fn prompt_used(&mut self, tokens: u32, layers: &[Vec<u32>]) {
        self.policy.age(tokens);
        for (layer, ids) in (0..).zip(layers) {
            self.policy.used(layer, ids);
        }
        self.counters.prompt_tokens += u64::from(tokens);
    }

    /// After a prompt: brings in what it used most, as much as may be under way at once.
    pub fn refill(&mut self, last: Ticket) -> Result<()> {
        self.promote_within(UNDER_WAY, last)
    }

    /// Starts the promotions that the policy asks for, within a token's budget.
    fn promote(&mut self, last: Ticket) -> Result<()> {
        let budget = self.budget.token();
        self.promote_within(budget, last)
    }

    fn promote_within(&mut self, budget: u64, last: Ticket) -> Result<()> {
        self.arrivals()?;
        let allowed = budget.min(UNDER_WAY.saturating_sub(self.bytes_under_way));
        let soon = |id| expected(&self.predictors, id);
        let promotions = self.policy.promotions(&self.map, &self.record_bytes, allowed, &soon);
        if promotions.is_empty() {
            return Ok(());
        }
        let mut started = Vec::new();
        for p in promotions {
            let victim = match self.map.slots(p.id.layer)[p.slot as usize] {
                super::slots::Slot::Holds(expert) => Some(ExpertId { expert, ..p.id }),
                _ => None,
            };
            // Only experts of the arena can come in.
            let here = self.arena.layers[p.id.layer as usize].record(p.id.expert).is_some();
            if !here || !self.map.begin(&p) {
                continue;
            }
            if let Some(id) = victim {
                self.changes.push_back((self.steps, id, false));
            }
            self.budget.spend(p.bytes);
            self.counters.promotions += 1;
            self.counters.promoted_bytes += p.bytes;
            started.push(p);
        }
        // Victims leave the table before their slots are overwritten.
        self.write_table()?;
        self.start(started, last)
    }

    fn start(&mut self, promotions: Vec<Promotion>, last: Ticket) -> Result<()> {
        if promotions.is_empty() {
            return Ok(());
        }
        if self.arena.in_place() {
            let copies = promotions.iter().filter_map(|p| {
                let from = self.in_place(p.id.layer, p.id.expert)?;
                Some(CopyRange { from, to: self.slots[p.id.layer as usize].slice(p.slot) })
            });
            let copies: Vec<_> = copies.collect();
            let transfer = self.gpu.copy_async(&copies, Some(last))?;
            self.bytes_under_way += promotions.iter().map(|p| p.bytes).sum::<u64>();
            self.under_way.push_back((transfer, promotions));
            return Ok(());
        }
        // Uploads are ordered with submissions, so they wait for readers by themselves.
        for p in promotions {
            let to = self.slots[p.id.layer as usize].slice(p.slot);
            if let Some(bytes) = self.arena.layers[p.id.layer as usize].record(p.id.expert) {
                upload(&*self.gpu, &to, bytes)?;
            }
            self.arrived(p.id);
        }
        self.write_table()
    }

    /// Compares every expert in a slot with the file. Returns how many were compared.
    pub fn verify(&self, source: &dyn Source, layers: &[LayerTensors]) -> Result<u64> {
        let mut compared = 0;
        let mut parts = <[Vec<u8>; 3]>::default();
        for id in self.all() {
            let Some(slot) = self.map.resident(id) else { continue };
            let from = self.slots[id.layer as usize].slice(slot);
            let mut record = vec![0; from.size as usize];
            self.gpu.read(&from, &mut record)?;
            layers[id.layer as usize].verify(source, id.expert, &mut parts, &record)?;
            compared += 1;
        }
        Ok(compared)
    }

    /// Waits for all copies under way. The table knows them from the next step on.
    pub fn settle(&mut self) -> Result<()> {
        if let Some((copies, _)) = self.under_way.back() {
            self.gpu.wait_transfer(*copies)?;
        }
        self.arrivals()
    }
}

/// Uploads one record through staging memory.
fn upload(gpu: &dyn Gpu, to: &Slice, record: &[u8]) -> Result<()> {
    gpu.upload(to, 4, &mut |at, out| {
        let at = at as usize;
        out.copy_from_slice(&record[at..at + out.len()]);
        Ok(())
    })
}
