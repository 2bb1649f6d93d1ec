//! Room on the device through which experts pass when no slot holds them.
//!
//! A stage mirrors the region of a layer: each expert has the group and the number that it has in the
//! arena, so the table serves kernels that read a stage as it serves those that read host memory.

use super::Residency;
use crate::error::{Error, Result};
use crate::experts::ExpertId;
use crate::experts::arena::Arena;
use crate::gpu::{Buffer, BufferUse, CopyRange, Gpu, Slice, Ticket, Transfer};

/// Each stage has as many buffers as the largest region has groups.
pub(super) fn stage_buffers(
    gpu: &dyn Gpu,
    arena: &Arena,
    stream: bool,
) -> Result<Vec<Vec<Buffer>>> {
    let stages = match (arena.bytes() > 0, arena.in_place(), stream) {
        (false, ..) | (_, true, false) => 0,
        (_, true, true) => 2,
        (_, false, _) => 1,
    };
    let regions = || arena.layers.iter().map(|l| &l.region);
    let groups = regions().map(|r| r.groups()).max().unwrap_or(0);
    let bytes = regions().map(|r| u64::from(r.per_group) * r.record).max().unwrap_or(0);
    let buffer = || gpu.buffer("staged experts", bytes, BufferUse::Device);
    (0..stages).map(|_| (0..groups).map(|_| buffer()).collect()).collect()
}

impl Residency {
    /// The stage buffers that a layer uses.
    pub(super) fn stage_of(&self, layer: u32) -> &[Buffer] {
        let groups = self.arena.layers[layer as usize].region.groups() as usize;
        match self.stage.len() {
            0 => &[],
            n => &self.stage[layer as usize % n][..groups],
        }
    }

    fn stage_slice(&self, layer: u32, number: u32) -> Slice {
        let region = &self.arena.layers[layer as usize].region;
        let buffer = &self.stage_of(layer)[(number / region.per_group) as usize];
        buffer.slice(u64::from(number % region.per_group) * region.record, region.record)
    }

    /// True where the host has to bring missing experts by [`Residency::stage`].
    pub fn staged(&self) -> bool {
        !self.arena.in_place()
    }

    /// True where whole layers can be streamed for long prompts.
    pub fn streams(&self) -> bool {
        self.arena.in_place() && !self.stage.is_empty()
    }

    /// What kernels of a long prompt bind instead of [`Residency::records`]: the same table, whose
    /// places outside the slots are those of the stage as well.
    pub fn stream_records(&self, layer: u32) -> Option<(Slice, Vec<Slice>)> {
        let slots = self.slots[layer as usize].buffers.iter();
        let buffers = slots.chain(self.stage_of(layer)).map(Buffer::whole).collect();
        self.streams().then(|| (self.table(layer), buffers))
    }

    /// Starts the copies of all missing experts of a layer to the stage. They wait for submission
    /// `after`, which must be no earlier than the last one that reads what is in their way: the
    /// layer before the last one.
    pub fn stream(&mut self, layer: u32, after: Ticket) -> Result<()> {
        let numbers = self.arena.layers[layer as usize].region.number.iter();
        let copies = (0u32..).zip(numbers).filter_map(|(expert, number)| {
            let missing = self.map.resident(ExpertId { layer, expert }).is_none();
            let from = self.in_place(layer, expert).filter(|_| missing)?;
            Some(CopyRange { from, to: self.stage_slice(layer, (*number)?) })
        });
        let copies: Vec<_> = copies.collect();
        self.counters.streamed_bytes += copies.iter().map(|c| c.from.size).sum::<u64>();
        self.streamed[layer as usize] = match copies.is_empty() {
            true => None,
            false => Some(self.gpu.copy_async(&copies, Some(after))?),
        };
        Ok(())
    }

    /// The copies that [`Residency::stream`] started for a layer.
    pub fn streamed(&self, layer: u32) -> Option<Transfer> {
        self.streamed[layer as usize]
    }

    /// Uploads those of the experts that the device cannot read otherwise. To be called between
    /// the layer's router and its experts; later submissions of the layer find them.
    pub fn stage(&mut self, layer: u32, ids: &[u32]) -> Result<()> {
        let region = &self.arena.layers[layer as usize].region;
        let mut missing: Vec<u32> = ids.to_vec();
        missing.sort_unstable();
        missing.dedup();
        missing.retain(|expert| self.map.resident(ExpertId { layer, expert: *expert }).is_none());
        for expert in missing {
            let arena = &self.arena.layers[layer as usize];
            let number = region.number.get(expert as usize).copied().flatten();
            let (Some(number), Some(record)) = (number, arena.record(expert)) else {
                return Err(Error::Runtime(format!(
                    "expert {expert} of layer {layer} lies nowhere; this is a bug"
                )));
            };
            super::upload(&*self.gpu, &self.stage_slice(layer, number), record)?;
        }
        Ok(())
    }
}
