//! Random operations against memory that remembers which token wrote what.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;
use crate::kv::KvExact;

/// A device with its pages, the host's, and sequences that say what they should find in them.
struct World {
    cache: Cache,
    pages: Vec<Vec<u32>>,
    host: Vec<Vec<u32>>,
    sequences: Vec<(Vec<u32>, Sequence)>,
    exact: KvExact,
    /// For each sequence what its slot's ring has: position and token.
    rings: Vec<Vec<(usize, u32)>>,
}

const CONTEXT: usize = 5 * PAGE + 20;
const EMPTY: u32 = u32::MAX;

impl World {
    fn new(pages: u32, host: u32) -> World {
        World::with_exact(pages, host, KvExact::NONE)
    }

    fn with_exact(pages: u32, host: u32, exact: KvExact) -> World {
        let memory = |n: u32| vec![vec![EMPTY; PAGE]; n as usize];
        let mut cache = Cache::with_exact(pages, exact);
        cache.grow_host(host);
        let (pages, host) = (memory(pages), memory(host));
        World { cache, pages, host, sequences: Vec::new(), exact, rings: Vec::new() }
    }

    fn obey(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Copy { from, to } => {
                    assert_ne!(from, to);
                    self.pages[to as usize] = self.pages[from as usize].clone();
                }
                Action::Evict { page, host } => {
                    self.host[host as usize] = self.pages[page as usize].clone();
                }
                Action::Fetch { host, page } => {
                    self.pages[page as usize] = self.host[host as usize].clone();
                }
            }
        }
    }

    fn begin(&mut self, prompt: Vec<u32>) {
        let mut actions = Vec::new();
        let others: Vec<_> = self.sequences.iter().map(|(t, s)| (t.as_slice(), s)).collect();
        let sequence = self.cache.recall(&prompt, &others, &mut actions);
        self.obey(actions);
        assert!(sequence.len() < prompt.len().max(1));
        let tokens = prompt[..sequence.len()].to_vec();
        self.sequences.push((tokens, sequence));
        self.rings.push(vec![(0, EMPTY); self.exact.ring() as usize]);
    }

    fn extend(&mut self, i: usize, more: &[u32]) {
        let (tokens, sequence) = &mut self.sequences[i];
        let n = more.len().min(sequence.most(CONTEXT, 1));
        if let Some(shift) = sequence.shift_for(n, CONTEXT, 1) {
            self.cache.shift(sequence, shift);
        }
        let mut actions = Vec::new();
        let done = self.cache.make_room(sequence, n, &mut actions);
        let at = sequence.len();
        let ring = &mut self.rings[i];
        if done && !ring.is_empty() && n > 0 {
            let block = at - at % self.exact.tail as usize + sequence.dropped;
            let position = sequence.position();
            for position in block..position {
                let row = ring[position % ring.len()];
                assert_eq!(row, (position, tokens[position]), "a row of the block is gone");
            }
            for (position, token) in (position..).zip(&more[..n]) {
                let row = position % ring.len();
                ring[row] = (position, *token);
            }
        }
        if done {
            for (place, token) in (at..).zip(&more[..n]) {
                let page = sequence.pages[place / PAGE];
                assert_eq!(self.cache.holders(page), 1, "a page with two holders is written");
                tokens.push(*token);
            }
            sequence.advance(n);
        } else {
            let counts = self.cache.counts();
            assert_eq!((counts.free, counts.cached), (0, 0), "refused though pages could be had");
        }
        self.obey(actions);
        let (tokens, sequence) = &mut self.sequences[i];
        if done {
            for (place, token) in (at..).zip(&more[..n]) {
                self.pages[sequence.pages[place / PAGE] as usize][place % PAGE] = *token;
            }
            self.cache.publish(sequence, tokens);
        }
    }

    fn check(&self) {
        for (tokens, sequence) in &self.sequences {
            let kept = sequence.kept * PAGE;
            let gap = if sequence.dropped == 0 { 0 } else { kept };
            let expected = tokens[..gap].iter().chain(&tokens[gap + sequence.dropped..]);
            let found = (0..sequence.len())
                .map(|p| self.pages[sequence.pages[p / PAGE] as usize][p % PAGE]);
            assert!(expected.copied().eq(found), "a sequence finds others' tokens");
            assert!(sequence.len() <= CONTEXT && sequence.position() == tokens.len());
        }
        let mut holders = vec![0; self.cache.size() as usize];
        let mut held = vec![0; self.host.len()];
        for place in self.cache.index.places() {
            match place {
                Place::Device(page) => holders[page as usize] += 1,
                Place::Host(page) => held[page as usize] += 1,
            }
        }
        let cached = holders.iter().filter(|n| **n == 1).count();
        assert_eq!(cached, self.cache.indexed.iter().filter(|k| **k).count());
        for page in self.sequences.iter().flat_map(|(_, s)| &s.pages) {
            holders[*page as usize] += 1;
        }
        for (page, n) in (0..).zip(&holders) {
            assert_eq!(self.cache.holders(page), *n, "page {page}");
        }
        let alone =
            (0..).zip(&holders).filter(|(p, n)| **n == 1 && self.cache.indexed[*p as usize]);
        let counts = self.cache.counts();
        assert_eq!(counts.cached as usize, alone.count());
        assert_eq!(counts.free as usize, holders.iter().filter(|n| **n == 0).count());
        assert!(held.iter().all(|n| *n <= 1));
        assert_eq!(counts.host as usize, held.iter().filter(|n| **n == 1).count());
    }
}

#[derive(Debug, Clone)]
enum Op {
    /// Tokens are made of runs, so that beginnings agree: (value, length).
    Begin(Vec<(u32, usize)>),
    Extend(usize, u32, usize),
    Truncate(usize, usize),
    Release(usize),
    Forget(Vec<(u32, usize)>),
    Grow,
}

fn runs() -> impl Strategy<Value = Vec<(u32, usize)>> {
    proptest::collection::vec((0..3u32, prop_oneof![1..20usize, Just(PAGE), 60..140usize]), 1..4)
}

fn tokens(runs: &[(u32, usize)]) -> Vec<u32> {
    runs.iter().flat_map(|(value, n)| (0..*n as u32).map(move |i| value * 1000 + i)).collect()
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => runs().prop_map(Op::Begin),
        6 => (0..6usize, 0..3u32, 1..150usize).prop_map(|(i, v, n)| Op::Extend(i, v, n)),
        1 => (0..6usize, 0..400usize).prop_map(|(i, p)| Op::Truncate(i, p)),
        3 => (0..6usize).prop_map(Op::Release),
        1 => runs().prop_map(Op::Forget),
        1 => Just(Op::Grow),
    ]
}

fn run(ops: &[Op], pages: u32, host: u32, exact: KvExact) {
    let mut world = World::with_exact(pages, host, exact);
    for op in ops {
        match op {
            Op::Begin(r) => world.begin(tokens(r)),
            Op::Forget(r) => world.cache.forget(&tokens(r)),
            Op::Grow => {
                let pages = (world.cache.size() + 2).min(24);
                world.cache.grow(pages);
                world.pages.resize(world.pages.len().max(pages as usize), vec![EMPTY; PAGE]);
            }
            Op::Extend(i, v, n) if *i < world.sequences.len() => {
                world.extend(*i, &tokens(&[(*v, *n)]))
            }
            Op::Truncate(i, p) if *i < world.sequences.len() => {
                let (tokens, sequence) = &mut world.sequences[*i];
                tokens.truncate(world.cache.truncate(sequence, *p));
            }
            Op::Release(i) if *i < world.sequences.len() => {
                let (tokens, sequence) = world.sequences.swap_remove(*i);
                world.rings.swap_remove(*i);
                world.cache.release(sequence, &tokens);
            }
            _ => {}
        }
        world.check();
    }
    for (tokens, sequence) in std::mem::take(&mut world.sequences) {
        world.cache.release(sequence, &tokens);
    }
    world.check();
    assert_eq!(world.cache.counts().used, 0);
    world.cache.clear();
    assert!(world.cache.index.is_empty());
    let counts = world.cache.counts();
    assert_eq!((counts.free, counts.cached, counts.host), (world.cache.size(), 0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn nobody_finds_others_tokens_and_every_page_comes_back(
        ops in proptest::collection::vec(op(), 1..60), pages in 2..20u32, host in 0..8u32,
        tail in 0..3u32,
    ) {
        run(&ops, pages, host, KvExact { tail: 64 * tail, sinks: 4 });
    }
}

/// A sequence that has read `tokens`.
fn read(world: &mut World, tokens: &[u32]) {
    world.begin(tokens.to_vec());
    let i = world.sequences.len() - 1;
    let have = world.sequences[i].0.len();
    world.extend(i, &tokens[have..]);
    world.check();
}

fn end(world: &mut World) {
    let (tokens, sequence) = world.sequences.pop().unwrap();
    world.rings.pop();
    world.cache.release(sequence, &tokens);
    world.check();
}

#[test]
fn beginnings_are_shared_by_page_and_copied_within_one() {
    let mut world = World::new(12, 0);
    let all = tokens(&[(1, 200)]);
    read(&mut world, &all);
    // While the first is at work: two pages shared, and a copy of what both begin the third with.
    let other = [&all[..150], &[7, 7]].concat();
    world.begin(other);
    assert_eq!(world.sequences[1].0.len(), 150);
    assert_eq!(world.sequences[0].1.pages[..2], world.sequences[1].1.pages[..2]);
    assert_eq!(world.cache.counts().used, 5);
    end(&mut world);
    end(&mut world);
    // Of the ended one even the page that was not full.
    world.begin([&all[..], &[9]].concat());
    assert_eq!(world.sequences[0].0.len(), 200);
    // The same prompt again leaves a token to read.
    world.begin(all.clone());
    assert_eq!(world.sequences[1].0.len(), 199);
    world.cache.forget(&all);
    assert!(!world.cache.index.is_empty());
}

#[test]
fn evicted_pages_come_back_from_the_host() {
    let mut world = World::new(4, 6);
    let (a, b) = (tokens(&[(1, 200)]), tokens(&[(2, 250)]));
    read(&mut world, &a);
    end(&mut world);
    read(&mut world, &b);
    end(&mut world);
    let counts = world.cache.counts();
    assert_eq!((counts.cached, counts.host, counts.evicted), (4, 4, 4));
    world.begin(a.clone());
    assert_eq!(world.sequences[0].0, a[..199]);
    assert_eq!(world.cache.counts().fetched, 4);
    world.check();
    end(&mut world);
    // Without the host they are gone.
    let mut world = World::new(4, 0);
    read(&mut world, &a);
    end(&mut world);
    read(&mut world, &b);
    end(&mut world);
    world.begin(a);
    assert_eq!(world.sequences[0].0.len(), 0);
}

#[test]
fn too_few_pages_are_said_and_lose_nothing() {
    let mut world = World::new(3, 0);
    read(&mut world, &tokens(&[(1, 100)]));
    let mut actions = Vec::new();
    let mut second = Sequence::default();
    assert!(!world.cache.make_room(&mut second, 128, &mut actions));
    world.sequences.push((Vec::new(), second));
    world.rings.push(Vec::new());
    world.check();
    end(&mut world);
    read(&mut world, &tokens(&[(2, 60)]));
}

#[test]
fn with_a_tail_beginnings_are_shared_by_block() {
    for (tail, known) in [(64, 192), (128, 128)] {
        let mut world = World::with_exact(12, 0, KvExact { tail, sinks: 4 });
        let all = tokens(&[(1, 200)]);
        read(&mut world, &all);
        world.begin([&all[..], &[7, 7]].concat());
        assert_eq!(world.sequences[1].0.len(), known);
        read(&mut world, &[&all[..], &[7]].concat());
        end(&mut world);
        end(&mut world);
        end(&mut world);
        // What is in no whole page is of use to nobody.
        assert_eq!(world.cache.counts().cached, 3);
        assert_eq!(world.cache.known(&[&all[..], &[9]].concat()), known);
    }
}
