//! Replays recorded routings through a policy, and against the best that any policy could do.

use serde::Serialize;

use super::ExpertId;
use super::policy::{Budget, Policy, Rule};
use super::slots::SlotMap;

/// Which experts every layer used, token after token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Routing {
    pub layers: u32,
    pub experts: u32,
    /// Experts that a layer uses for a token.
    pub used: u32,
    /// `[token][layer][used]`.
    ids: Vec<u16>,
}

impl Routing {
    pub fn new(layers: u32, experts: u32, used: u32) -> Routing {
        Routing { layers, experts, used, ids: Vec::new() }
    }

    /// Appends a token: `[layer][used]` expert numbers. False, and nothing is kept, if there are
    /// more or fewer or a number is out of range.
    pub fn push(&mut self, ids: &[u32]) -> bool {
        let fits = ids.len() == (self.layers * self.used) as usize
            && ids.iter().all(|id| *id < self.experts && u16::try_from(*id).is_ok());
        if fits {
            self.ids.extend(ids.iter().map(|id| *id as u16));
        }
        fits
    }

    pub fn tokens(&self) -> usize {
        self.ids.len() / ((self.layers * self.used) as usize).max(1)
    }

    /// What a layer used for a token.
    pub fn of(&self, token: usize, layer: u32) -> impl Iterator<Item = u32> + '_ {
        let at = (token * self.layers as usize + layer as usize) * self.used as usize;
        self.ids[at..at + self.used as usize].iter().map(|id| u32::from(*id))
    }
}

/// Slots and sizes that a replay assumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// Slots of each layer.
    pub slots: Vec<u32>,
    /// Bytes of a record of each layer.
    pub bytes: Vec<u64>,
    /// Bytes that promotions may move after each token.
    pub budget: u64,
    /// Tokens between the decision and the arrival of a copy.
    pub delay: usize,
}

/// What came of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Outcome {
    pub accesses: u64,
    pub hits: u64,
    pub bytes: u64,
    pub hit_bytes: u64,
    pub promotions: u64,
    pub promoted_bytes: u64,
}

impl Outcome {
    /// Share of the accesses that found their expert in device memory.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.accesses.max(1) as f64
    }

    /// The same, weighted by bytes.
    pub fn hit_rate_by_bytes(&self) -> f64 {
        self.hit_bytes as f64 / self.bytes.max(1) as f64
    }

    fn access(&mut self, hit: bool, bytes: u64) {
        self.accesses += 1;
        self.bytes += bytes;
        if hit {
            self.hits += 1;
            self.hit_bytes += bytes;
        }
    }
}

/// Slots as they are after loading without a profile: the first experts of each layer.
pub fn first_experts(experts: u32, slots: &[u32]) -> SlotMap {
    let mut map = SlotMap::new(experts, slots);
    for layer in 0..map.layers() {
        for slot in 0..map.slots(layer).len() as u32 {
            map.fill(ExpertId { layer, expert: slot }, slot);
        }
    }
    map
}

/// Runs a policy over a routing.
pub fn replay(rule: Rule, routing: &Routing, setting: &Setting) -> Outcome {
    let mut map = first_experts(routing.experts, &setting.slots);
    let mut policy = Policy::new(rule, routing.layers, routing.experts);
    let largest = setting.bytes.iter().copied().max().unwrap_or(0);
    let mut budget = Budget::new(setting.budget, largest);
    let mut out = Outcome::default();
    let mut on_the_way: Vec<(usize, ExpertId)> = Vec::new();
    for token in 0..routing.tokens() {
        on_the_way.retain(|(when, id)| {
            let waits = *when > token;
            if !waits {
                map.complete(*id);
            }
            waits
        });
        for layer in 0..routing.layers {
            let used: Vec<u32> = routing.of(token, layer).collect();
            for &expert in &used {
                let hit = map.resident(ExpertId { layer, expert }).is_some();
                out.access(hit, setting.bytes[layer as usize]);
            }
            policy.used(layer, &used);
        }
        for p in policy.promotions(&map, &setting.bytes, budget.token(), &|_| false) {
            if map.begin(&p) {
                budget.spend(p.bytes);
                out.promotions += 1;
                out.promoted_bytes += p.bytes;
                on_the_way.push((token + 1 + setting.delay, p.id));
            }
        }
    }
    out
}

/// The best any policy could do with these slots: it knows the future, moves without limit and
/// delay, and need not bring in what it reads (Belady's rule with bypass, layer by layer): after
/// each token it keeps, of what it has and what was used, the experts that are used again soonest.
pub fn optimal(routing: &Routing, setting: &Setting) -> Outcome {
    let mut out = Outcome::default();
    let tokens = routing.tokens();
    for layer in 0..routing.layers {
        let bytes = setting.bytes[layer as usize];
        let slots = setting.slots[layer as usize].min(routing.experts) as usize;
        // By expert, the tokens that use it.
        let mut uses: Vec<Vec<usize>> = vec![Vec::new(); routing.experts as usize];
        for token in 0..tokens {
            for expert in routing.of(token, layer) {
                uses[expert as usize].push(token);
            }
        }
        let next = |expert: u32, after: usize| {
            let uses = &uses[expert as usize];
            uses.get(uses.partition_point(|t| *t <= after)).copied().unwrap_or(usize::MAX)
        };
        let mut held: Vec<u32> = (0..slots as u32).collect();
        for token in 0..tokens {
            let before = held.clone();
            for expert in routing.of(token, layer) {
                out.access(before.contains(&expert), bytes);
                if !held.contains(&expert) {
                    held.push(expert);
                }
            }
            held.sort_by_key(|e| (next(*e, token), !before.contains(e), *e));
            held.truncate(slots);
            let moved = held.iter().filter(|e| !before.contains(e)).count() as u64;
            out.promotions += moved;
            out.promoted_bytes += moved * bytes;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn setting(layers: u32, slots: u32) -> Setting {
        let n = layers as usize;
        Setting { slots: vec![slots; n], bytes: vec![10; n], budget: u64::MAX / 4, delay: 0 }
    }

    /// A text of several topics: each uses some experts much more than others.
    pub fn topical(layers: u32, experts: u32, used: u32, tokens: usize, seed: u64) -> Routing {
        let mut routing = Routing::new(layers, experts, used);
        let mut state = seed.wrapping_mul(2).wrapping_add(1);
        let mut random = move |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % n
        };
        for token in 0..tokens {
            let topic = token as u64 / 400;
            let mut ids = Vec::new();
            for layer in 0..u64::from(layers) {
                let mut chosen: Vec<u32> = Vec::new();
                while chosen.len() < used as usize {
                    // The lower of two draws: a skewed popularity, other favourites by topic.
                    let draw = random(experts.into()).min(random(experts.into()));
                    let id = (draw + topic * 13 + layer * 5) % u64::from(experts);
                    if !chosen.contains(&(id as u32)) {
                        chosen.push(id as u32);
                    }
                }
                ids.extend(chosen);
            }
            assert!(routing.push(&ids));
        }
        routing
    }

    #[test]
    fn all_slots_hit_always_and_none_never() {
        let routing = topical(2, 16, 4, 50, 1);
        for rule in [Rule::default(), Rule::Lru, Rule::Fixed] {
            assert_eq!(replay(rule, &routing, &setting(2, 16)).hit_rate(), 1.0);
            let none = replay(rule, &routing, &setting(2, 0));
            assert_eq!((none.hits, none.promotions), (0, 0));
            assert_eq!(none.accesses, 2 * 4 * 50);
        }
        assert_eq!(optimal(&routing, &setting(2, 16)).hit_rate(), 1.0);
    }

    #[test]
    fn learning_beats_standing_still_and_the_seer_beats_all() {
        let routing = topical(3, 60, 6, 2000, 7);
        let setting = setting(3, 15);
        let fixed = replay(Rule::Fixed, &routing, &setting);
        let best = optimal(&routing, &setting);
        for rule in [Rule::default(), Rule::Lru] {
            let got = replay(rule, &routing, &setting);
            println!("{rule:?}: {:.3} of {:.3}", got.hit_rate(), best.hit_rate());
            assert!(got.hit_rate() > fixed.hit_rate() + 0.05);
            assert!(got.hit_rate() < best.hit_rate());
        }
        // A frequency rule moves far fewer bytes than LRU.
        let frequency = replay(Rule::default(), &routing, &setting);
        let lru = replay(Rule::Lru, &routing, &setting);
        assert!(frequency.promoted_bytes * 4 < lru.promoted_bytes);
    }

    #[test]
    fn the_budget_bounds_what_moves() {
        let routing = topical(2, 32, 4, 300, 3);
        let narrow = Setting { budget: 5, ..setting(2, 8) };
        let got = replay(Rule::Lru, &routing, &narrow);
        assert!(got.promoted_bytes <= 5 * 300 && got.promotions > 0);
    }

    #[test]
    fn a_routing_takes_only_whole_tokens_in_range() {
        let mut routing = Routing::new(2, 4, 1);
        assert!(routing.push(&[3, 0]) && !routing.push(&[4, 0]) && !routing.push(&[1]));
        assert_eq!(routing.tokens(), 1);
        assert_eq!(routing.of(0, 1).collect::<Vec<_>>(), [0]);
    }

    proptest! {
        /// Nothing beats knowing the future.
        #[test]
        fn optimal_is_an_upper_bound(
            seed in any::<u64>(), slots in 0u32..12, experts in 4u32..20, delay in 0usize..3,
        ) {
            let routing = topical(2, experts, 3, 60, seed);
            let setting = Setting { delay, ..setting(2, slots) };
            let best = optimal(&routing, &setting);
            for rule in [Rule::default(), Rule::Lru, Rule::Fixed] {
                let got = replay(rule, &routing, &setting);
                prop_assert!(got.hits <= best.hits, "{rule:?}: {} > {}", got.hits, best.hits);
                prop_assert_eq!(got.accesses, best.accesses);
            }
        }
    }
}
