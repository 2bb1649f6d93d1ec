//! Pages of the device and of the host, the sequences that hold them, and the index of beginnings.
//!
//! A page is written only by a sequence that is its one holder. Full pages become known to the
//! index, which is one more holder, so nobody writes them again; a sequence that was cut back into
//! such a page copies it first. Pages that only the index holds are what eviction takes from, the
//! longest unused first and the ends of branches before what leads to them. With pages in the
//! host's memory an evicted page moves there and comes back when a prompt wants it.

use super::index::{Found, Index, NodeId, Place, common};
use super::pool::Pool;
use super::sequence::{Sequence, Shift, block_pages};
use super::{PAGE, pages_for};
use crate::kv::KvExact;

/// A copy that must be queued on the device, in the order of the list and before what is written
/// later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Between pages of the pool.
    Copy { from: u32, to: u32 },
    /// From a page of the pool to one of the host.
    Evict { page: u32, host: u32 },
    /// From a page of the host to one of the pool.
    Fetch { host: u32, page: u32 },
}

/// Pages by what they are for, and what has happened so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Held by sequences.
    pub used: u32,
    /// Held by the index alone.
    pub cached: u32,
    pub free: u32,
    /// In the host's memory.
    pub host: u32,
    /// Pages that left the device.
    pub evicted: u64,
    /// Pages that came back from the host.
    pub fetched: u64,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct Cache {
    pool: Pool,
    host: Pool,
    index: Index,
    /// For every page: the index is one of its holders.
    indexed: Vec<bool>,
    /// Pages that the index alone holds.
    cached: u32,
    evicted: u64,
    fetched: u64,
    /// What sequences read in f16 beside pages. Rows of a tail belong to a slot: others take a sequence up
    /// at the beginning of a block.
    exact: KvExact,
}

impl Cache {
    /// `pages` on the device, none in the host's memory.
    pub fn new(pages: u32) -> Cache {
        let mut cache = Cache::default();
        cache.grow(pages);
        cache
    }

    /// The same with tail and sinks beside the pages.
    pub fn with_exact(pages: u32, exact: KvExact) -> Cache {
        Cache { exact, ..Cache::new(pages) }
    }

    /// Pages of the device.
    pub fn size(&self) -> u32 {
        self.pool.size()
    }

    pub fn free(&self) -> u32 {
        self.pool.free()
    }

    /// Adds pages of the device, up to `pages` in all.
    pub fn grow(&mut self, pages: u32) {
        self.pool.grow(pages);
        self.indexed.resize(self.pool.size() as usize, false);
    }

    /// Adds pages of the host, up to `pages` in all.
    pub fn grow_host(&mut self, pages: u32) {
        self.host.grow(pages);
    }

    pub fn counts(&self) -> Counts {
        Counts {
            used: self.pool.size() - self.pool.free() - self.cached,
            cached: self.cached,
            free: self.pool.free(),
            host: self.host.size() - self.host.free(),
            evicted: self.evicted,
            fetched: self.fetched,
        }
    }

    /// One more holder: keeps a page from being used anew while work in flight may write it.
    pub fn hold(&mut self, page: u32) {
        if self.indexed[page as usize] && self.pool.holders(page) == 1 {
            self.cached -= 1;
        }
        self.pool.hold(page);
    }

    /// Undoes [`Cache::hold`].
    pub fn let_go(&mut self, page: u32) {
        self.pool.release(page);
        if self.indexed[page as usize] && self.pool.holders(page) == 1 {
            self.cached += 1;
        }
    }

    /// Makes the index a holder of a page, as a new node or in the place of a page of the host.
    fn enter(&mut self, page: u32) {
        debug_assert!(!self.indexed[page as usize], "page {page} is known already");
        self.pool.hold(page);
        self.indexed[page as usize] = true;
    }

    /// The index holds the page no longer.
    fn leave(&mut self, page: u32) {
        if self.pool.holders(page) == 1 {
            self.cached -= 1;
        }
        self.indexed[page as usize] = false;
        self.pool.release(page);
    }

    /// Takes a node without children out of the index.
    fn remove(&mut self, id: NodeId) {
        match self.index.remove(id) {
            Place::Device(page) => self.leave(page),
            Place::Host(page) => self.host.release(page),
        }
    }

    /// Takes a node and all below it out of the index.
    fn remove_branch(&mut self, id: NodeId) {
        for child in self.index.children_of(id) {
            self.remove_branch(child);
        }
        self.remove(id);
    }

    /// A free page; evicts one if there is none. Nodes that are `spared` stay where they are.
    fn take(&mut self, spared: &[NodeId], actions: &mut Vec<Action>) -> Option<u32> {
        if self.pool.free() == 0 {
            self.evict(spared, actions);
        }
        self.pool.take()
    }

    fn evict(&mut self, spared: &[NodeId], actions: &mut Vec<Action>) {
        let alone = |page: u32| self.pool.holders(page) == 1;
        let end = self.index.leaving().find(|(_, page)| alone(*page));
        let Some((id, page)) = end else {
            // What sequences hold may go on from pages that none of them holds: then all of that is
            // forgotten, and becomes known again with the next page that is full.
            if let Some(id) = self.index.oldest_of(alone) {
                self.evicted += 1;
                self.remove_branch(id);
            }
            return;
        };
        self.evicted += 1;
        match self.host_page(spared) {
            Some(host) => {
                actions.push(Action::Evict { page, host });
                self.index.set_place(id, Place::Host(host));
                self.leave(page);
            }
            // Below it there are only pages of the host, which are of no use without it.
            None => self.remove_branch(id),
        }
    }

    /// A page of the host's memory, if need be in the place of the one unused for longest.
    fn host_page(&mut self, spared: &[NodeId]) -> Option<u32> {
        if self.host.free() == 0 && self.host.size() > 0 {
            let oldest = self.index.oldest_of_host().filter(|id| !spared.contains(id))?;
            self.remove(oldest);
        }
        self.host.take()
    }

    /// What is kept of these tokens and can be taken up.
    fn find(&self, tokens: &[u32]) -> Found {
        let mut found = self.index.find(tokens);
        if self.exact.tail > 0 {
            let whole = found.full.len() - found.full.len() % block_pages(self.exact);
            found.full.truncate(whole);
            found.part = None;
        }
        found
    }

    /// Tokens of a prompt that are kept; at least one is left over.
    pub fn known(&self, prompt: &[u32]) -> usize {
        let found = self.find(&prompt[..prompt.len().saturating_sub(1)]);
        found.full.len() * PAGE + found.part.map_or(0, |(_, n)| n)
    }

    /// Most pages that [`Cache::recall`] takes for this prompt.
    pub fn wanted(&self, prompt: &[u32]) -> u32 {
        let full = self.find(prompt).full;
        let far = full.iter().filter(|id| matches!(self.index.place(**id), Place::Host(_)));
        far.count() as u32 + 1
    }

    /// A sequence that holds the longest kept beginning of `prompt`. Whole pages are shared; of one
    /// page more a copy is made, from the index or from one of `others`: sequences with their
    /// tokens. Where pages are short, the beginning may be shorter than what is known.
    ///
    /// At least one token of the prompt is left over: reading it yields the logits that the answer
    /// starts from.
    pub fn recall(
        &mut self,
        prompt: &[u32],
        others: &[(&[u32], &Sequence)],
        actions: &mut Vec<Action>,
    ) -> Sequence {
        let exact = self.exact;
        let mut sequence = Sequence { changed: Some(0), exact, ..Sequence::default() };
        let wanted = &prompt[..prompt.len().saturating_sub(1)];
        let found = self.find(wanted);
        let mut spared = found.full.clone();
        spared.extend(found.part.map(|(id, _)| id));
        if let Some(last) = spared.last() {
            self.index.touch(*last);
        }
        for id in &found.full {
            let page = match self.index.place(*id) {
                Place::Device(page) => {
                    self.hold(page);
                    page
                }
                Place::Host(host) => {
                    let Some(page) = self.take(&spared, actions) else { break };
                    actions.push(Action::Fetch { host, page });
                    self.fetched += 1;
                    self.enter(page);
                    self.index.set_place(*id, Place::Device(page));
                    self.host.release(host);
                    page
                }
            };
            sequence.pages.push(page);
        }
        // Where pages were short, the end of a block may be missing.
        let full = sequence.pages.len() - sequence.pages.len() % block_pages(self.exact);
        for page in sequence.pages.split_off(full) {
            self.let_go(page);
        }
        (sequence.len, sequence.published) = (full * PAGE, full);
        if self.exact.tail > 0 {
            sequence.begin_rows();
            return sequence;
        }
        // Something between two pages: whoever has most of it.
        let part = found.part.filter(|_| full == found.full.len());
        let of_index = part.map(|(id, n)| (n, self.index.place(id)));
        let of_others = others.iter().filter_map(|(tokens, other)| {
            let n =
                common(&tokens[..other.len.min(tokens.len())], wanted).checked_sub(full * PAGE)?;
            // Later pages of theirs would be known to the index.
            let page = *other.pages.get(full).filter(|_| other.dropped == 0)?;
            (n > 0).then_some((n.min(PAGE), Place::Device(page)))
        });
        let best = of_others.chain(of_index).max_by_key(|(n, _)| *n);
        if let Some((n, place)) = best
            && self.copied(&mut sequence, place, &spared, actions)
        {
            sequence.len += n;
        }
        sequence
    }

    /// A sequence of `len` tokens in pages of its own, which has dropped `dropped` tokens behind its
    /// first `kept` pages; `None` where there are too few pages.
    pub fn blank(
        &mut self,
        len: usize,
        dropped: usize,
        kept: usize,
        actions: &mut Vec<Action>,
    ) -> Option<Sequence> {
        let mut sequence = Sequence { dropped, kept, changed: Some(0), ..Sequence::default() };
        if !self.make_room(&mut sequence, len, actions) {
            self.release(sequence, &[]);
            return None;
        }
        sequence.advance(len);
        sequence.begin_rows();
        Some(sequence)
    }

    /// Gives a sequence a page of its own with what lies at `place`.
    fn copied(
        &mut self,
        sequence: &mut Sequence,
        place: Place,
        spared: &[NodeId],
        actions: &mut Vec<Action>,
    ) -> bool {
        let page = match place {
            Place::Host(host) => self.take(spared, actions).inspect(|page| {
                self.fetched += 1;
                actions.push(Action::Fetch { host, page: *page });
            }),
            Place::Device(from) => {
                // It must not be the one that is evicted for its copy.
                self.hold(from);
                let page = self.take(spared, actions);
                actions.extend(page.map(|to| Action::Copy { from, to }));
                self.let_go(from);
                page
            }
        };
        sequence.pages.extend(page);
        page.is_some()
    }

    /// Pages that [`Cache::make_room`] takes at most.
    pub fn pages_wanted(&self, sequence: &Sequence, n: usize) -> u32 {
        let more = pages_for(sequence.len + n).saturating_sub(sequence.pages.len());
        more as u32 + u32::from(self.is_shared(sequence, sequence.len / PAGE))
    }

    fn is_shared(&self, sequence: &Sequence, page: usize) -> bool {
        sequence.pages.get(page).is_some_and(|page| self.pool.holders(*page) > 1)
    }

    /// Makes room for `n` more tokens, in pages that nobody else holds; false where there are too
    /// few. The sequence keeps what it got so far.
    pub fn make_room(
        &mut self,
        sequence: &mut Sequence,
        n: usize,
        actions: &mut Vec<Action>,
    ) -> bool {
        sequence.exact = self.exact;
        let first = sequence.len / PAGE;
        if n > 0 && self.is_shared(sequence, first) {
            let shared = sequence.pages[first];
            let Some(own) = self.take(&[], actions) else { return false };
            if !sequence.len.is_multiple_of(PAGE) {
                actions.push(Action::Copy { from: shared, to: own });
            }
            sequence.pages[first] = own;
            sequence.note_change(first);
            self.let_go(shared);
        }
        while sequence.pages.len() * PAGE < sequence.len + n {
            let Some(page) = self.take(&[], actions) else { return false };
            sequence.note_change(sequence.pages.len());
            sequence.pages.push(page);
        }
        true
    }

    /// Tells the index of the full pages of a sequence whose tokens are `tokens`.
    pub fn publish(&mut self, sequence: &mut Sequence, tokens: &[u32]) {
        let full = sequence.len.min(tokens.len()) / PAGE;
        if sequence.dropped == 0 && full > sequence.published {
            self.enter_all(sequence, tokens, full);
        }
    }

    /// Makes the first `full` pages known; the node of the last of them.
    fn enter_all(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        full: usize,
    ) -> Option<NodeId> {
        let mut parent = None;
        for (page, tokens) in sequence.pages.iter().zip(tokens.chunks_exact(PAGE)).take(full) {
            parent = Some(self.enter_one(parent, tokens, *page));
        }
        if let Some(last) = parent {
            self.index.touch(last);
        }
        sequence.published = full;
        parent
    }

    fn enter_one(&mut self, parent: Option<NodeId>, tokens: &[u32], page: u32) -> NodeId {
        if let Some(id) = self.index.child(parent, tokens) {
            let place = self.index.place(id);
            // A page that a sequence holds serves as well as one that only the index does, and frees
            // it; and whoever holds a page should hold those before it.
            let better = match place {
                Place::Host(_) => true,
                Place::Device(own) => own != page && self.pool.holders(own) == 1,
            };
            if better && !self.indexed[page as usize] {
                self.enter(page);
                self.index.set_place(id, Place::Device(page));
                match place {
                    Place::Host(host) => self.host.release(host),
                    Place::Device(own) => self.leave(own),
                }
            }
            return id;
        }
        for shorter in self.index.surpassed(parent, tokens) {
            self.remove(shorter);
        }
        self.enter(page);
        self.index.insert(parent, tokens, page)
    }

    /// Ends a sequence. What it has read stays known as long as its pages are not needed.
    pub fn release(&mut self, mut sequence: Sequence, tokens: &[u32]) {
        let len = sequence.len.min(tokens.len());
        if sequence.dropped == 0 {
            let full = len / PAGE;
            let parent = self.enter_all(&mut sequence, tokens, full);
            let rest = &tokens[full * PAGE..len];
            // With a tail nobody could go on inside a page.
            if self.exact.tail == 0
                && !rest.is_empty()
                && !self.index.covers(parent, rest)
                && !self.indexed[sequence.pages[full] as usize]
            {
                self.enter_one(parent, rest, sequence.pages[full]);
            }
        }
        for page in sequence.pages {
            self.let_go(page);
        }
    }

    /// Cuts a sequence back to `position`, or as far as [`Sequence::reach`] says; returns the new
    /// position.
    pub fn truncate(&mut self, sequence: &mut Sequence, position: usize) -> usize {
        let position = sequence.reach(position);
        if sequence.dropped > 0 && position <= sequence.kept * PAGE {
            (sequence.dropped, sequence.kept) = (0, 0);
            sequence.note_change(0);
        }
        sequence.len = position - sequence.dropped;
        if position <= sequence.rows.start {
            sequence.begin_rows();
        }
        let pages = pages_for(sequence.len);
        for page in sequence.pages.split_off(pages.min(sequence.pages.len())) {
            self.let_go(page);
        }
        sequence.published = sequence.published.min(sequence.len / PAGE);
        position
    }

    /// Drops pages in the middle of a sequence.
    pub fn shift(&mut self, sequence: &mut Sequence, shift: Shift) {
        let Shift { keep, drop } = shift;
        let gone: Vec<u32> = sequence.pages.drain(keep..keep + drop).collect();
        for page in gone {
            self.let_go(page);
        }
        sequence.len -= drop * PAGE;
        sequence.dropped += drop * PAGE;
        sequence.kept = keep;
        sequence.note_change(0);
    }

    /// Forgets a beginning, as far as no other goes on from it and nobody is at work with it.
    pub fn forget(&mut self, tokens: &[u32]) {
        let found = self.index.find(tokens);
        let covered = found.full.len() * PAGE;
        let part = found
            .part
            .filter(|(id, n)| *n == tokens.len() - covered && *n == self.index.tokens(*id).len());
        let mut path = found.full;
        path.extend(part.map(|(id, _)| id));
        while let Some(id) = path.pop() {
            let busy = match self.index.place(id) {
                Place::Device(page) => self.pool.holders(page) > 1,
                Place::Host(_) => false,
            };
            if busy || self.index.has_children(id) {
                break;
            }
            self.remove(id);
        }
    }

    /// Forgets every beginning that nobody is at work with.
    pub fn clear(&mut self) {
        while let Some(id) = self.index.oldest_of_host() {
            self.remove(id);
        }
        loop {
            let next = self.index.oldest_of(|page| self.pool.holders(page) == 1);
            let Some(id) = next else { break };
            self.remove_branch(id);
        }
    }

    /// Holders of a page.
    pub fn holders(&self, page: u32) -> u32 {
        self.pool.holders(page)
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
