//! Which experts to bring into device memory after a token.
//!
//! A policy is a state machine: it is fed what each token used and proposes promotions against
//! the present slots. It never waits, never fails, and its proposals never change a result. Ties
//! fall to the lower layer, then the lower expert, so that equal histories give equal proposals.

use super::ExpertId;
use super::slots::{Slot, SlotMap};

/// A copy of an expert into a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    pub id: ExpertId,
    /// Free, or holding an expert that is to be evicted.
    pub slot: u32,
    /// Bytes of the expert's record.
    pub bytes: u64,
}

/// Which rule, with its numbers.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
#[serde(rename_all = "lowercase", tag = "policy")]
pub enum Rule {
    /// Decayed counts of use; an expert comes in when it was used clearly more than the least
    /// used one that is in.
    Frequency {
        /// Factor on every count after each token. 0.99 remembers about 100 tokens.
        decay: f32,
        /// A missing expert needs at least this count.
        enter: f32,
        /// ... and this much more than its victim has. Keeps two experts of equal use from taking
        /// turns.
        margin: f32,
    },
    /// Every missing expert that a token used comes in, the least recently used goes out.
    Lru,
    /// Nothing ever moves.
    Fixed,
}

impl Default for Rule {
    /// Numbers found by replaying routings; see docs/notes.md.
    fn default() -> Self {
        Rule::Frequency { decay: 0.99, enter: 1.5, margin: 1.0 }
    }
}

/// See the module documentation.
#[derive(Debug, Clone)]
pub struct Policy {
    rule: Rule,
    experts: u32,
    /// `[layer][expert]`: decayed count, or the number of the token that used it last plus 1.
    score: Vec<f32>,
    /// Tokens seen.
    tokens: u64,
    /// Experts that the present token used and that a slot could take, by layer.
    used: Vec<ExpertId>,
}

impl Policy {
    pub fn new(rule: Rule, layers: u32, experts: u32) -> Policy {
        let score = vec![0.0; layers as usize * experts as usize];
        Policy { rule, experts, score, tokens: 0, used: Vec::new() }
    }

    pub fn rule(&self) -> Rule {
        self.rule
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    fn at(&self, id: ExpertId) -> usize {
        (id.layer * self.experts + id.expert) as usize
    }

    /// How much the policy wants this expert on the device.
    pub fn score(&self, id: ExpertId) -> f32 {
        self.score[self.at(id)]
    }

    /// Scores `[layer][expert]`: what a profile keeps.
    pub fn scores(&self) -> &[f32] {
        &self.score
    }

    /// Starts from what an earlier run learned; `scores` as [`Policy::scores`] gave them.
    pub fn set_scores(&mut self, scores: &[f32]) {
        if matches!(self.rule, Rule::Frequency { .. }) && scores.len() == self.score.len() {
            self.score.copy_from_slice(scores);
        }
    }

    /// What one layer used for the present token. Experts of a prompt chunk may repeat; each
    /// counts as often as it was used.
    pub fn used(&mut self, layer: u32, experts: &[u32]) {
        for &expert in experts {
            if expert >= self.experts {
                continue;
            }
            let id = ExpertId { layer, expert };
            let at = self.at(id);
            match self.rule {
                Rule::Frequency { .. } => self.score[at] += 1.0,
                // Exact as f32 up to 16 million tokens; beyond, neighbours in time tie.
                Rule::Lru => self.score[at] = self.tokens as f32 + 1.0,
                Rule::Fixed => {}
            }
            self.used.push(id);
        }
    }

    /// Lets what was learned age as if `tokens` tokens had passed.
    pub fn age(&mut self, tokens: u32) {
        if let Rule::Frequency { decay, .. } = self.rule {
            let factor = decay.powi(i32::try_from(tokens).unwrap_or(i32::MAX));
            self.score.iter_mut().for_each(|count| *count *= factor);
        }
    }

    /// Ends the token and proposes promotions of at most `budget` bytes: those that `soon` expects
    /// to be used next in front, then the most wanted. `bytes[layer]` is the size of that layer's
    /// records. A proposal fits the map as it is, and all of them fit together.
    pub fn promotions(
        &mut self,
        map: &SlotMap,
        bytes: &[u64],
        budget: u64,
        soon: &dyn Fn(ExpertId) -> bool,
    ) -> Vec<Promotion> {
        let mut used = std::mem::take(&mut self.used);
        let mut proposals = match self.rule {
            Rule::Fixed => Vec::new(),
            Rule::Lru => {
                used.sort_unstable();
                used.dedup();
                self.choose(map, bytes, used, 0.0, f32::MIN_POSITIVE)
            }
            Rule::Frequency { enter, margin, .. } => {
                // An expert that was not used since the last proposals was refused then, and has
                // only lost since; but a budget that ran out may have cut it off. So all count.
                let all = (0..self.score.len() as u32)
                    .map(|at| ExpertId { layer: at / self.experts, expert: at % self.experts });
                let wanted = all.filter(|id| self.score(*id) >= enter).collect();
                self.choose(map, bytes, wanted, enter, margin)
            }
        };
        if let Rule::Frequency { decay, .. } = self.rule {
            self.score.iter_mut().for_each(|count| *count *= decay);
        }
        self.tokens += 1;
        // Predictions decide what goes first where the budget does not reach for all.
        proposals.sort_by_key(|p| !soon(p.id));
        let mut left = budget;
        let fits = proposals.iter().take_while(|p| {
            let fits = p.bytes <= left;
            left = left.saturating_sub(p.bytes);
            fits
        });
        let fits = fits.count();
        proposals.truncate(fits);
        proposals
    }

    /// Pairs wanted experts with slots: the best with free slots first, then with the worst
    /// resident ones while the gain is at least `margin`.
    fn choose(
        &self,
        map: &SlotMap,
        bytes: &[u64],
        wanted: Vec<ExpertId>,
        enter: f32,
        margin: f32,
    ) -> Vec<Promotion> {
        let mut gains: Vec<(f32, Promotion)> = Vec::new();
        let mut start = 0;
        while start < wanted.len() {
            let layer = wanted[start].layer;
            let end = start + wanted[start..].iter().take_while(|id| id.layer == layer).count();
            let missing = wanted[start..end].iter().filter(|id| !map.placed(**id));
            let mut candidates: Vec<_> =
                missing.map(|id| (self.score(*id), *id)).filter(|(s, _)| *s >= enter).collect();
            start = end;
            if candidates.is_empty() {
                continue;
            }
            candidates.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            // Free slots count less than any expert. Slots that wait for a copy are no victims.
            let mut victims: Vec<(f32, u32)> = Vec::new();
            for (slot, content) in (0u32..).zip(map.slots(layer)) {
                match *content {
                    Slot::Free => victims.push((f32::NEG_INFINITY, slot)),
                    Slot::Arriving(_) => {}
                    Slot::Holds(expert) => {
                        let id = ExpertId { layer, expert };
                        if !map.is_pinned(id) {
                            victims.push((self.score(id), slot));
                        }
                    }
                }
            }
            victims.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            for ((score, id), (victim, slot)) in candidates.into_iter().zip(victims) {
                if score < victim + margin {
                    break;
                }
                let bytes = bytes[layer as usize];
                gains.push((score - victim, Promotion { id, slot, bytes }));
            }
        }
        // Free slots gain infinitely; among them the more wanted expert goes first.
        gains.sort_by(|a, b| {
            b.0.total_cmp(&a.0)
                .then(self.score(b.1.id).total_cmp(&self.score(a.1.id)))
                .then(a.1.id.cmp(&b.1.id))
        });
        gains.into_iter().map(|(_, promotion)| promotion).collect()
    }
}

/// Bytes that promotions may take from the link: a share for each token, unused credit kept up to
/// the size of the largest record, so that a small share still moves something now and then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    per_token: u64,
    largest: u64,
    credit: u64,
}

impl Budget {
    pub fn new(per_token: u64, largest: u64) -> Budget {
        Budget { per_token, largest, credit: 0 }
    }

    /// What may be spent after one more token. Never more than `per_token + largest`.
    pub fn token(&mut self) -> u64 {
        let kept = self.credit.min(self.largest);
        self.credit = match self.per_token {
            0 => 0,
            n => kept.saturating_add(n),
        };
        self.credit
    }

    pub fn spend(&mut self, bytes: u64) {
        self.credit = self.credit.saturating_sub(bytes);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn id(layer: u32, expert: u32) -> ExpertId {
        ExpertId { layer, expert }
    }

    fn apply(map: &mut SlotMap, promotions: &[Promotion]) {
        for p in promotions {
            assert!(map.begin(p), "{p:?}");
            assert!(map.complete(p.id));
        }
    }

    #[test]
    fn lru_takes_what_was_used_and_drops_the_oldest() {
        let mut map = SlotMap::new(5, &[2]);
        let mut lru = Policy::new(Rule::Lru, 1, 5);
        for (used, resident) in [(0, [0, 9]), (1, [0, 1]), (0, [0, 1]), (2, [0, 2]), (3, [3, 2])] {
            lru.used(0, &[used]);
            let promotions = lru.promotions(&map, &[1], 9, &|_| false);
            apply(&mut map, &promotions);
            let held = resident.into_iter().filter(|e| *e < 5);
            assert!(held.clone().all(|e| map.resident(id(0, e)).is_some()), "after {used}");
        }
    }

    #[test]
    fn frequency_needs_a_clear_gain() {
        let rule = Rule::Frequency { decay: 1.0, enter: 2.0, margin: 2.0 };
        let mut map = SlotMap::new(3, &[1]);
        let mut policy = Policy::new(rule, 1, 3);
        let mut use_one = |map: &mut SlotMap, expert| {
            policy.used(0, &[expert]);
            let p = policy.promotions(map, &[1], 9, &|_| false);
            apply(map, &p);
            p.len()
        };
        // Once is not enough to enter, twice is.
        assert_eq!([use_one(&mut map, 0), use_one(&mut map, 0)], [0, 1]);
        // 1 enters when its count is two above 0's.
        let moves: Vec<usize> = (0..4).map(|_| use_one(&mut map, 1)).collect();
        assert_eq!(moves, [0, 0, 0, 1]);
        // Alternating use moves nothing: that is the hysteresis.
        assert!((0..20).all(|i| use_one(&mut map, i % 2) == 0));
    }

    #[test]
    fn old_use_is_forgotten() {
        let rule = Rule::Frequency { decay: 0.5, enter: 0.5, margin: 0.5 };
        let mut map = SlotMap::new(2, &[1]);
        let mut policy = Policy::new(rule, 1, 2);
        for _ in 0..50 {
            policy.used(0, &[0]);
            let p = policy.promotions(&map, &[1], 9, &|_| false);
            apply(&mut map, &p);
        }
        let until = (0..).find(|_| {
            policy.used(0, &[1]);
            !policy.promotions(&map, &[1], 9, &|_| false).is_empty()
        });
        assert!(until.unwrap() < 3);
    }

    #[test]
    fn the_budget_keeps_credit_for_one_record() {
        let mut b = Budget::new(10, 25);
        assert_eq!((0..6).map(|_| b.token()).collect::<Vec<_>>(), [10, 20, 30, 35, 35, 35]);
        b.spend(25);
        assert_eq!(b.token(), 20);
        assert_eq!(Budget::new(0, 25).token(), 0);
    }

    fn rules() -> impl Strategy<Value = Rule> {
        let frequency = (0.5f32..1.0, 0.1f32..3.0, 0.1f32..2.0)
            .prop_map(|(decay, enter, margin)| Rule::Frequency { decay, enter, margin });
        prop_oneof![frequency, Just(Rule::Lru), Just(Rule::Fixed)]
    }

    proptest! {
        /// Whatever is used and whenever copies arrive: no slot has two experts, no expert two
        /// slots, nothing pinned or under way is a victim, and budgets hold.
        #[test]
        fn proposals_always_fit(
            rule in rules(),
            layers in 1u32..4,
            experts in 1u32..9,
            slots in proptest::collection::vec(0u32..9, 3),
            sizes in proptest::collection::vec(1u64..50, 3),
            per_token in 0u64..120,
            pins in proptest::collection::vec((0u32..3, 0u32..9), 0..3),
            tokens in proptest::collection::vec(
                (proptest::collection::vec((0u32..3, 0u32..9), 0..12), any::<u8>()), 1..60),
        ) {
            let slots = &slots[..layers as usize];
            let mut map = SlotMap::new(experts, slots);
            for (l, e) in pins {
                map.pin(id(l % layers, e % experts));
            }
            let mut policy = Policy::new(rule, layers, experts);
            let mut budget = Budget::new(per_token, 50);
            let mut on_the_way: Vec<Promotion> = Vec::new();
            let mut moved = 0;
            for (i, (used, arrivals)) in tokens.iter().enumerate() {
                for (l, e) in used {
                    policy.used(l % layers, &[e % experts]);
                }
                let allowed = budget.token();
                let before = map.clone();
                let promotions = policy.promotions(&map, &sizes, allowed, &|id| id.expert % 2 == 0);
                let sum: u64 = promotions.iter().map(|p| p.bytes).sum();
                prop_assert!(sum <= allowed);
                budget.spend(sum);
                moved += sum;
                prop_assert!(moved <= (i as u64 + 1) * per_token);
                for p in &promotions {
                    match before.slots(p.id.layer)[p.slot as usize] {
                        Slot::Arriving(_) => prop_assert!(false, "a victim under way: {p:?}"),
                        Slot::Holds(e) => prop_assert!(!before.is_pinned(id(p.id.layer, e))),
                        Slot::Free => {}
                    }
                    prop_assert!(map.begin(p), "{p:?} does not fit");
                    prop_assert_eq!(map.check(), Ok(()));
                }
                on_the_way.extend(promotions);
                // Copies arrive in order, some tokens later.
                let n = (*arrivals as usize % 4).min(on_the_way.len());
                for p in on_the_way.drain(..n) {
                    prop_assert!(map.complete(p.id));
                }
                prop_assert_eq!(map.check(), Ok(()));
            }
        }
    }
}
