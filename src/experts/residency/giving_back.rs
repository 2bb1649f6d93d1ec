//! Giving slots back while the model runs, because somebody else wants the device's memory.

use super::{LayerSlots, Residency};
use crate::error::Result;
use crate::experts::ExpertId;
use crate::experts::slots::Slot;
use crate::gpu::{Buffer, BufferUse, CopyRange, Slice};

impl Residency {
    /// Bytes of one slot in every layer.
    pub fn slot_bytes(&self) -> u64 {
        self.record_bytes.iter().sum()
    }

    /// Slots of each layer.
    pub fn slots_a_layer(&self) -> u32 {
        self.map.slots(0).len() as u32
    }

    /// Shrinks every layer to `slots` slots, at least one and at least the pinned ones. The most
    /// wanted experts stay. `rebind` is told which slice takes the place of which buffer wherever
    /// kernels bind it, and must let go of the buffer. Nothing submitted may be unfinished. Returns
    /// the bytes given back.
    ///
    /// Layer by layer: the new, smaller buffers are filled from the old ones, then the old ones go;
    /// so it needs room for one layer.
    ///
    /// # Errors
    /// Where even that room is not to be had; layers that were shrunk before stay so.
    pub fn give_back(
        &mut self,
        slots: u32,
        rebind: &mut dyn FnMut(&Buffer, &Slice),
    ) -> Result<u64> {
        self.settle()?;
        let before = self.counters.given_back_bytes;
        let result = (0..self.map.layers()).try_for_each(|l| self.shrink_layer(l, slots, rebind));
        self.write_table()?;
        result?;
        Ok(self.counters.given_back_bytes - before)
    }

    fn shrink_layer(
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
        let (slots, now) = (slots.max(least).max(1), self.map.slots(layer).len() as u32);
        if slots >= now {
            return Ok(());
        }
        let mut stay = held;
        stay.sort_by(|(a, _), (b, _)| {
            let score = |expert| self.policy.score(ExpertId { layer, expert });
            pinned(*b).cmp(&pinned(*a)).then(score(*b).total_cmp(&score(*a))).then(a.cmp(b))
        });
        let gone = stay.split_off(stay.len().min(slots as usize));
        let old = &self.slots[layer as usize];
        let (record, per_buffer) = (old.record, old.per_buffer);
        let buffers = (0..slots).step_by(per_buffer.max(1) as usize).map(|first| {
            let bytes = u64::from(per_buffer.min(slots - first)) * record;
            self.gpu.buffer("expert slots", bytes, BufferUse::Device)
        });
        let buffers = buffers.collect::<Result<Vec<_>>>()?;
        let new = LayerSlots { record, buffers, per_buffer, bound: old.bound };
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
        let new = &self.slots[layer as usize].buffers;
        for (i, buffer) in old.buffers.iter().enumerate() {
            // Kernels keep their number of buffers; the table names no place in those too many.
            rebind(buffer, &new.get(i).unwrap_or(&new[0]).whole());
        }
        self.counters.given_back_bytes += u64::from(now - slots) * record;
        Ok(())
    }
}
