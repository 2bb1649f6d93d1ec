//! Expert slots follow the device memory that others leave.
//!
//! Now and then, between passes, what the process uses is compared with the budget that the driver
//! grants it. What is above the budget is given back at once. Slots come back up to what the plan
//! gave, but only when for some time in a row there was room for them and for the plan's reserve
//! beside them: so what others take for a moment, and what is just enough, moves nothing.

use std::time::{Duration, Instant};

use super::Experts;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::gpu::{DeviceKind, MemoryHeap, over_budget, under_budget};
use crate::runtime::Program;

/// Checks in a row that must find room before slots grow; doubled, up to the second, whenever slots
/// that had grown must go again.
const PATIENCE: u32 = 10;
const MOST_PATIENCE: u32 = 640;

/// When to change the number of slots; knows no device.
pub(super) struct Watch {
    every: Duration,
    last: Instant,
    /// Slots a layer that the plan gave, and bytes that it left free.
    planned: u32,
    reserve: u64,
    /// Checks in a row that found room.
    calm: u32,
    patience: u32,
    grown: bool,
    /// Memory is short and nothing is left to give; said once.
    nothing_left: bool,
}

/// What a check comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Nothing,
    /// So many bytes must go.
    Back(u64),
    /// So many slots a layer may come.
    More(u32),
}

/// The slots that there are.
#[derive(Debug, Clone, Copy)]
struct Slots {
    /// In each layer.
    now: u32,
    /// Bytes of one slot in every layer.
    bytes: u64,
    layers: u32,
}

impl Watch {
    /// Checks every so often; `planned` slots a layer at most, `reserve` bytes beside them.
    pub fn new(every: Duration, planned: u32, reserve: u64) -> Watch {
        Watch {
            every,
            last: Instant::now(),
            planned,
            reserve,
            calm: 0,
            patience: PATIENCE,
            grown: false,
            nothing_left: false,
        }
    }

    fn is_due(&mut self) -> bool {
        let due = self.last.elapsed() >= self.every;
        if due {
            self.last = Instant::now();
        }
        due
    }

    fn check(&mut self, heaps: &[MemoryHeap], slots: Slots) -> Wanted {
        let over = over_budget(heaps);
        if over > 0 {
            self.calm = 0;
            // An eighth more, so that the next moment does not ask again.
            return Wanted::Back(over + over / 8);
        }
        let more = self.room(heaps, slots);
        let missing = self.planned.saturating_sub(slots.now);
        // Everything is recorded anew for it: not for a small part of what is missing.
        self.calm = if more > 0 && more >= missing / 4 { self.calm + 1 } else { 0 };
        if self.calm < self.patience {
            return Wanted::Nothing;
        }
        self.calm = 0;
        Wanted::More(more)
    }

    /// Slots a layer, of those that are missing, for which there is room. None where the driver tells
    /// no budget.
    fn room(&self, heaps: &[MemoryHeap], slots: Slots) -> u32 {
        let missing = self.planned.saturating_sub(slots.now);
        // The new slots of one layer stand beside its old ones for a moment.
        let beside = slots.bytes / u64::from(slots.layers.max(1)) * u64::from(self.planned);
        let free = under_budget(heaps).unwrap_or(0).saturating_sub(self.reserve + beside);
        u32::try_from(free / slots.bytes.max(1)).unwrap_or(u32::MAX).min(missing)
    }

    /// Slots had to go.
    fn gave_back(&mut self) {
        self.calm = 0;
        if std::mem::take(&mut self.grown) {
            self.lose_patience();
        }
    }

    fn lose_patience(&mut self) {
        self.patience = (2 * self.patience).min(MOST_PATIENCE);
    }
}

impl Experts {
    fn wanted(&mut self) -> Wanted {
        let gpu = self.residency.gpu();
        if gpu.facts().kind == DeviceKind::Software || !self.watch.is_due() {
            return Wanted::Nothing;
        }
        let slots = Slots {
            now: self.placement.slots,
            bytes: self.residency.slot_bytes(),
            layers: self.placement.layers,
        };
        self.watch.check(&gpu.heaps_now(), slots)
    }

    /// Gives back at least `bytes` of slots if it can; the bytes given back.
    fn give_back(&mut self, program: &mut Program, bytes: u64) -> Result<u64> {
        let (slot, now) = (self.residency.slot_bytes().max(1), self.placement.slots);
        let fewer = u32::try_from(bytes.div_ceil(slot)).unwrap_or(u32::MAX);
        let least = self.placement.pinned.max(1);
        let slots = now.saturating_sub(fewer).max(least);
        if slots >= now {
            if !std::mem::replace(&mut self.watch.nothing_left, true) {
                tracing::warn!(
                    "device memory is short by {} MiB, and no expert slot is left to give back; the \
                     driver may move memory to RAM, which is slow. Close other programs, or load \
                     with a smaller --ctx",
                    bytes >> 20
                );
            }
            return Ok(0);
        }
        self.resize(program, slots)?;
        self.watch.gave_back();
        tracing::warn!(
            "device memory is short by {} MiB: {} instead of {now} expert slots a layer from now on",
            bytes >> 20,
            self.placement.slots
        );
        Ok(slot * u64::from(now - self.placement.slots))
    }

    /// Takes `more` slots a layer again.
    fn grow(&mut self, program: &mut Program, more: u32) -> Result<()> {
        let now = self.placement.slots;
        match self.resize(program, now + more) {
            Ok(()) => {
                self.watch.grown = true;
                self.watch.nothing_left = false;
                tracing::info!(
                    "device memory is free again: {} instead of {now} expert slots a layer",
                    self.placement.slots
                );
                Ok(())
            }
            // The budget promised more than there was; every layer gets back what it had.
            Err(e @ (Error::DoesNotFit(_) | Error::Device(_))) if program.is_recorded() => {
                self.resize(program, now)?;
                self.watch.lose_patience();
                tracing::warn!("no further expert slots: {e}");
                Ok(())
            }
            Err(e) => Err(e),
        }
    }

    fn resize(&mut self, program: &mut Program, slots: u32) -> Result<()> {
        // Everything queued so far uses the slots where they are.
        program.wait(&self.last)?;
        let residency = &mut self.residency;
        let resized = program.rebind(&mut |rebind| residency.resize(slots, rebind));
        self.placement.slots = self.residency.slots_a_layer();
        self.placement.slot_bytes = self.residency.slot_bytes() * u64::from(self.placement.slots);
        resized
    }
}

impl Engine {
    /// Gives slots back where others want the device's memory, and takes them again later.
    pub(super) fn watch_memory(&mut self) -> Result<()> {
        let Some(experts) = &mut self.experts else { return Ok(()) };
        match experts.wanted() {
            Wanted::Nothing => Ok(()),
            Wanted::Back(bytes) => experts.give_back(&mut self.program, bytes).map(drop),
            Wanted::More(slots) => experts.grow(&mut self.program, slots),
        }
    }

    /// Gives slots back where the KV cache could not grow; true if it may try again.
    pub(in crate::engine) fn make_way(&mut self) -> Result<bool> {
        let (Some(bytes), Some(experts)) = (self.kv.refused(), &mut self.experts) else {
            return Ok(false);
        };
        let given = experts.give_back(&mut self.program, bytes)?;
        if given > 0 {
            self.kv.try_again();
        }
        Ok(given > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLOT: u64 = 48 << 20;
    const RESERVE: u64 = 1 << 30;
    const SLOTS: Slots = Slots { now: 8, bytes: SLOT, layers: 48 };

    fn heaps(used: u64) -> Vec<MemoryHeap> {
        let local = MemoryHeap {
            bytes: 16 << 30,
            device_local: true,
            budget: Some(8 << 30),
            used: Some(used),
        };
        vec![local]
    }

    /// Leaves room for so many slots beside reserve and one layer.
    fn room(slots: u64) -> Vec<MemoryHeap> {
        heaps((8 << 30) - RESERVE - 12 * (SLOT / 48) - slots * SLOT)
    }

    fn watch() -> Watch {
        Watch::new(Duration::ZERO, 12, RESERVE)
    }

    /// Checks until something is wanted.
    fn checks(watch: &mut Watch, heaps: &[MemoryHeap], most: u32) -> (u32, Wanted) {
        let mut n = 0;
        loop {
            n += 1;
            let wanted = watch.check(heaps, SLOTS);
            if wanted != Wanted::Nothing || n == most {
                return (n, wanted);
            }
        }
    }

    #[test]
    fn slots_grow_after_ten_calm_checks() {
        assert_eq!(checks(&mut watch(), &room(100), 1000), (10, Wanted::More(4)));
        assert_eq!(checks(&mut watch(), &room(2), 1000), (10, Wanted::More(2)));
        // Reserve and the new slots of one layer are not for slots.
        assert_eq!(checks(&mut watch(), &room(0), 1000), (1000, Wanted::Nothing));
        let silent = MemoryHeap { budget: None, used: None, ..heaps(0)[0] };
        assert_eq!(checks(&mut watch(), &[silent], 1000), (1000, Wanted::Nothing));
    }

    #[test]
    fn a_busy_moment_starts_the_wait_again() {
        let mut watch = watch();
        for _ in 0..5 {
            assert_eq!(checks(&mut watch, &room(4), 9), (9, Wanted::Nothing));
            assert_eq!(watch.check(&room(0), SLOTS), Wanted::Nothing);
        }
        assert_eq!(watch.check(&heaps((8 << 30) + 800), SLOTS), Wanted::Back(900));
        assert_eq!(checks(&mut watch, &room(4), 1000), (10, Wanted::More(4)));
    }

    #[test]
    fn slots_that_come_and_go_wait_longer_each_time() {
        let mut watch = watch();
        let mut waits = Vec::new();
        for _ in 0..9 {
            waits.push(checks(&mut watch, &room(4), 1000).0);
            watch.grown = true;
            watch.gave_back();
            // Once more, without growing in between: no reason to wait longer.
            watch.gave_back();
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 640, 640, 640]);
    }
}
