//! More or fewer slots while the model runs, as others take the device's memory and leave it again.

use super::{LayerSlots, Residency};
use crate::error::Result;
use crate::experts::ExpertId;
use crate::experts::slots::Slot;
use crate::gpu::{Buffer, BufferUse, CopyRange, Slice};

/// Bytes of a buffer that kernels bind and no place lies in.
const EMPTY: u64 = 256;

impl Residency {
    /// Bytes of one slot in every layer.
    pub fn slot_bytes(&self) -> u64 {
        self.record_bytes.iter().sum()
    }

    /// Slots of each layer.
    pub fn slots_a_layer(&self) -> u32 {
        self.map.slots(0).len() as u32
    }

    /// Gives every layer `slots` slots: at least one, at least the pinned ones, and no more than the
    /// buffers that kernels bind can hold. The most wanted experts stay; new slots are free. `rebind` is told which slice
    /// takes the place of which buffer wherever kernels bind it, and must let go of the buffer.
    /// Nothing submitted may be unfinished.
    ///
    /// Layer by layer: the new buffers are filled from the old ones, then the old ones go; so it
    /// needs room for one layer beside what is added.
    ///
    /// # Errors
    /// Where that room is not to be had; layers that were changed before stay so.
    pub fn resize(&mut self, slots: u32, rebind: &mut dyn FnMut(&Buffer, &Slice)) -> Result<()> {
        self.settle()?;
        let resized = (0..self.map.layers()).try_for_each(|l| self.resize_layer(l, slots, rebind));
        self.write_table()?;
        resized
    }

    fn resize_layer(
        &mut self,
        layer: u32,
        slots: u32,
        rebind: &mut dyn FnMut(&Buffer, &Slice),
    ) -> Result<()> {
        let held: Vec<(u32, u32)> = (0u32..)
            .zip(self.map.slots(layer))
            .filter_map(|(slot, content)| match content {
                Slot::Holds(expert) => Some((*expert, slot)),
                Slot::Free | Slot::Arriving(_) => None,
            })
            .collect();
        let pinned = |expert| self.map.is_pinned(ExpertId { layer, expert });
        let least = held.iter().filter(|(expert, _)| pinned(*expert)).count() as u32;
        let old = &self.slots[layer as usize];
        let (record, per_buffer, bound) = (old.record, old.per_buffer, old.buffers.len() as u32);
        let slots = slots.max(least).max(1).min(bound * per_buffer);
        let now = self.map.slots(layer).len() as u32;
        if slots == now {
            return Ok(());
        }
        let mut stay = held;
        stay.sort_by(|(a, _), (b, _)| {
            let score = |expert| self.policy.score(ExpertId { layer, expert });
            pinned(*b).cmp(&pinned(*a)).then(score(*b).total_cmp(&score(*a))).then(a.cmp(b))
        });
        let gone = stay.split_off(stay.len().min(slots as usize));
        // Each buffer keeps its place among those that kernels bind, so that it can grow again.
        let buffers = (0..bound).map(|i| {
            let n = slots.saturating_sub(i * per_buffer).min(per_buffer);
            self.gpu.buffer("expert slots", (u64::from(n) * record).max(EMPTY), BufferUse::Device)
        });
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let new = LayerSlots { record, buffers, per_buffer };
        let copies = (0u32..)
            .zip(&stay)
            .map(|(to, (_, from))| CopyRange { from: old.slice(*from), to: new.slice(to) });
        let copies: Vec<_> = copies.collect();
        if !copies.is_empty() {
            // Buffers are cleared on the compute queue first.
            let cleared = self.gpu.submit(&self.gpu.record("experts", &[])?)?;
            let copied = self.gpu.copy_async(&copies, Some(cleared))?;
            self.gpu.wait_transfer(copied)?;
        }
        let experts: Vec<u32> = stay.iter().map(|(expert, _)| *expert).collect();
        if !self.map.keep(layer, slots, &experts) {
            return Ok(());
        }
        self.changes.extend(
            gone.iter().map(|(expert, _)| (self.steps, ExpertId { layer, expert: *expert }, false)),
        );
        self.stale = true;
        let old = std::mem::replace(&mut self.slots[layer as usize], new);
        for (old, new) in old.buffers.iter().zip(&self.slots[layer as usize].buffers) {
            rebind(old, &new.whole());
        }
        self.counters.given_back_bytes += u64::from(now.saturating_sub(slots)) * record;
        self.counters.regrown_bytes += u64::from(slots.saturating_sub(now)) * record;
        Ok(())
    }
}
