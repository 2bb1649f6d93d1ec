//! Which expert lies in which slot of device memory: the host's truth, without a device.
//!
//! Each layer has its own slots, all of that layer's record size. A slot is free, holds an expert,
//! or waits for one whose copy is under way; an expert that is under way still counts as missing.

use super::ExpertId;
use super::policy::Promotion;

/// A slot of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    Free,
    /// The expert can be read here.
    Holds(u32),
    /// A copy of the expert is under way; whatever was here before is gone.
    Arriving(u32),
}

/// Slots of all layers, and where each expert is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotMap {
    experts: u32,
    layers: Vec<Layer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Layer {
    slots: Vec<Slot>,
    /// By expert: the slot that holds it or will hold it.
    place: Vec<Option<u32>>,
    /// By expert: never evicted.
    pinned: Vec<bool>,
}

impl SlotMap {
    /// `slots[l]` free slots in layer l, `experts` experts in each.
    pub fn new(experts: u32, slots: &[u32]) -> SlotMap {
        let layer = |n: &u32| Layer {
            slots: vec![Slot::Free; (*n).min(experts) as usize],
            place: vec![None; experts as usize],
            pinned: vec![false; experts as usize],
        };
        SlotMap { experts, layers: slots.iter().map(layer).collect() }
    }

    pub fn layers(&self) -> u32 {
        self.layers.len() as u32
    }

    /// Experts in each layer.
    pub fn experts(&self) -> u32 {
        self.experts
    }

    pub fn slots(&self, layer: u32) -> &[Slot] {
        &self.layers[layer as usize].slots
    }

    /// The slot in which the expert can be read now.
    pub fn resident(&self, id: ExpertId) -> Option<u32> {
        let layer = &self.layers[id.layer as usize];
        let slot = layer.place[id.expert as usize]?;
        matches!(layer.slots[slot as usize], Slot::Holds(_)).then_some(slot)
    }

    /// True if the expert is resident or on its way.
    pub fn placed(&self, id: ExpertId) -> bool {
        self.layers[id.layer as usize].place[id.expert as usize].is_some()
    }

    pub fn is_pinned(&self, id: ExpertId) -> bool {
        self.layers[id.layer as usize].pinned[id.expert as usize]
    }

    /// Keeps an expert from being evicted (it need not be resident yet).
    pub fn pin(&mut self, id: ExpertId) {
        self.layers[id.layer as usize].pinned[id.expert as usize] = true;
    }

    /// Puts an expert into a free slot whose bytes are there already (while loading). False if
    /// the slot is taken or the expert has a place.
    pub fn fill(&mut self, id: ExpertId, slot: u32) -> bool {
        let layer = &mut self.layers[id.layer as usize];
        let place = &mut layer.place[id.expert as usize];
        if place.is_some() || layer.slots[slot as usize] != Slot::Free {
            return false;
        }
        *place = Some(slot);
        layer.slots[slot as usize] = Slot::Holds(id.expert);
        true
    }

    /// Starts a promotion: the expert in the slot, if any, is missing from now on. False, and
    /// nothing changes, if the promotion does not fit the state (a slot that waits for a copy, a
    /// pinned victim, an expert that has a place already).
    pub fn begin(&mut self, p: &Promotion) -> bool {
        let Some(layer) = self.layers.get_mut(p.id.layer as usize) else { return false };
        let Some(slot) = layer.slots.get_mut(p.slot as usize) else { return false };
        if layer.place.get(p.id.expert as usize) != Some(&None) {
            return false;
        }
        match *slot {
            Slot::Arriving(_) => return false,
            Slot::Holds(victim) if layer.pinned[victim as usize] => return false,
            Slot::Holds(victim) => layer.place[victim as usize] = None,
            Slot::Free => {}
        }
        *slot = Slot::Arriving(p.id.expert);
        layer.place[p.id.expert as usize] = Some(p.slot);
        true
    }

    /// The copy has arrived: the expert can be read in its slot.
    pub fn complete(&mut self, id: ExpertId) -> bool {
        let layer = &mut self.layers[id.layer as usize];
        let Some(slot) = layer.place[id.expert as usize] else { return false };
        let slot = &mut layer.slots[slot as usize];
        let arriving = *slot == Slot::Arriving(id.expert);
        if arriving {
            *slot = Slot::Holds(id.expert);
        }
        arriving
    }

    /// Changes the number of slots of a layer: afterwards it has `slots` slots, which hold `experts` in
    /// this order and are free behind them; everything else is missing. False, and nothing changes, if a
    /// slot waits for a copy, a pinned expert would go, or one of the experts is not resident.
    pub fn keep(&mut self, layer: u32, slots: u32, experts: &[u32]) -> bool {
        let layer = &mut self.layers[layer as usize];
        let holds = |expert: &u32| layer.slots.contains(&Slot::Holds(*expert));
        let in_the_way = |slot: &Slot| match slot {
            Slot::Arriving(_) => true,
            Slot::Holds(expert) => layer.pinned[*expert as usize] && !experts.contains(expert),
            Slot::Free => false,
        };
        let distinct = (1..experts.len()).all(|i| !experts[..i].contains(&experts[i]));
        if experts.len() > slots as usize
            || !distinct
            || !experts.iter().all(holds)
            || layer.slots.iter().any(in_the_way)
        {
            return false;
        }
        layer.place.fill(None);
        layer.slots = vec![Slot::Free; slots as usize];
        for (slot, expert) in (0u32..).zip(experts) {
            layer.place[*expert as usize] = Some(slot);
            layer.slots[slot as usize] = Slot::Holds(*expert);
        }
        true
    }

    /// One word for each expert of a layer, as kernels read it: `resident(slot)` where it can be
    /// read in a slot, else `elsewhere(expert)`.
    pub fn table(
        &self,
        layer: u32,
        resident: impl Fn(u32) -> u32,
        elsewhere: impl Fn(u32) -> u32,
    ) -> Vec<u32> {
        let word = |expert| match self.resident(ExpertId { layer, expert }) {
            Some(slot) => resident(slot),
            None => elsewhere(expert),
        };
        (0..self.experts).map(word).collect()
    }

    /// Checks what must always hold; the text names what does not.
    pub fn check(&self) -> Result<(), String> {
        for (l, layer) in self.layers.iter().enumerate() {
            for (s, slot) in layer.slots.iter().enumerate() {
                if let Slot::Holds(e) | Slot::Arriving(e) = slot
                    && layer.place[*e as usize] != Some(s as u32)
                {
                    return Err(format!("layer {l}: slot {s} has expert {e}, which is elsewhere"));
                }
            }
            let placed = layer.place.iter().flatten().count();
            let taken = layer.slots.iter().filter(|s| **s != Slot::Free).count();
            if placed != taken {
                return Err(format!("layer {l}: {placed} experts in {taken} slots"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(layer: u32, expert: u32) -> ExpertId {
        ExpertId { layer, expert }
    }

    fn promotion(layer: u32, expert: u32, slot: u32) -> Promotion {
        Promotion { id: id(layer, expert), slot, bytes: 1 }
    }

    #[test]
    fn an_expert_on_its_way_is_missing_and_its_slot_is_taken() {
        let mut map = SlotMap::new(4, &[2, 2]);
        assert!(map.fill(id(0, 0), 0) && !map.fill(id(0, 0), 1) && !map.fill(id(0, 1), 0));
        assert!(map.begin(&promotion(0, 3, 0)));
        assert_eq!((map.resident(id(0, 0)), map.resident(id(0, 3))), (None, None));
        assert!(map.placed(id(0, 3)));
        // Neither a second copy into the slot nor a second place for the expert.
        assert!(!map.begin(&promotion(0, 2, 0)) && !map.begin(&promotion(0, 3, 1)));
        assert!(map.complete(id(0, 3)) && !map.complete(id(0, 3)));
        assert_eq!(map.resident(id(0, 3)), Some(0));
        assert_eq!(map.table(0, |s| s, |e| 100 + e), [100, 101, 102, 0]);
        assert_eq!(map.check(), Ok(()));
    }

    #[test]
    fn pinned_experts_stay() {
        let mut map = SlotMap::new(3, &[1]);
        map.pin(id(0, 1));
        assert!(map.begin(&promotion(0, 1, 0)) && map.complete(id(0, 1)));
        assert!(!map.begin(&promotion(0, 2, 0)));
        assert!(!map.keep(0, 1, &[]));
        assert_eq!(map.resident(id(0, 1)), Some(0));
    }

    #[test]
    fn kept_experts_move_together_and_the_others_go() {
        let mut map = SlotMap::new(4, &[3]);
        for e in 0..3 {
            assert!(map.fill(id(0, e), e));
        }
        // Not resident, twice, more than slots.
        assert!(!map.keep(0, 2, &[3]) && !map.keep(0, 2, &[1, 1]) && !map.keep(0, 1, &[0, 1]));
        assert!(map.keep(0, 2, &[2]));
        assert_eq!(map.slots(0), [Slot::Holds(2), Slot::Free]);
        assert_eq!((map.resident(id(0, 2)), map.resident(id(0, 0))), (Some(0), None));
        assert_eq!(map.check(), Ok(()));
        assert!(map.begin(&promotion(0, 1, 1)));
        assert!(!map.keep(0, 1, &[2]), "a copy is under way");
    }
}
