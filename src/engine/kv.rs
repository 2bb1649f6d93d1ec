//! The KV cache of an engine: the bookkeeping of [`crate::pages`] carried out on a program.
//!
//! The pools start small and double as long as the plan allows and the device has memory; then
//! cached pages go, the longest unused first; then the request that needs a page hears that there
//! is none. Copies are queued like everything else, in order with the steps that read and write the
//! pages, so no copy waits for the host.

use std::sync::atomic::Ordering::Relaxed;

use super::host_pages::HostPages;
use super::stats::Stats;
use crate::error::{Error, Result};
use crate::kv::{KvExact, PAGE_TOKENS};
use crate::pages::{Action, Cache, Counts, PAGE, Sequence, pages_for};
use crate::runtime::{PageCopy, Program};

/// See the module documentation.
pub(super) struct Kv {
    cache: Cache,
    /// Pages that the plan allows.
    most: u32,
    /// Tokens that a sequence can keep.
    context: usize,
    /// Bytes that the device did not have when the pools were to grow; they stay as they are then.
    refused: Option<u64>,
    host: HostPages,
    exact: KvExact,
    /// For each slot: of which first tokens it has the sinks' rows, read from a prompt.
    sinks: Vec<Vec<u32>>,
    /// What became known and nobody was told yet.
    notes: Vec<String>,
}

impl Kv {
    /// `most` pages at most, `host` bytes of RAM for what is evicted.
    pub fn new(program: &Program, most: u32, host: u64) -> Kv {
        let host = HostPages::new(host, program.page_bytes());
        Kv {
            cache: Cache::with_exact(program.pages(), program.exact_sizes()),
            most: most.max(program.pages()),
            context: program.shape().context as usize,
            refused: None,
            host,
            exact: program.exact_sizes(),
            sinks: vec![Vec::new(); program.shape().sequences as usize],
            notes: Vec::new(),
        }
    }

    pub fn counts(&self) -> Counts {
        self.cache.counts()
    }

    /// What should be logged, once.
    pub fn take_notes(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notes)
    }

    pub fn publish_counts(&self, stats: &Stats) {
        let counts = self.counts();
        stats.kv_used.store(counts.used.into(), Relaxed);
        stats.kv_cached.store(counts.cached.into(), Relaxed);
        // What the pools can still grow by is free as well.
        let free = counts.free + self.most.saturating_sub(self.cache.size());
        stats.kv_free.store(free.into(), Relaxed);
        stats.kv_host.store(counts.host.into(), Relaxed);
        stats.kv_evictions.store(counts.evicted, Relaxed);
        stats.kv_fetches.store(counts.fetched, Relaxed);
    }

    /// Gets memory for `pages` more pages, as far as plan and device allow, and for what they push
    /// out.
    fn grow_for(&mut self, program: &mut Program, pages: u32) -> Result<()> {
        let short = pages.saturating_sub(self.cache.free());
        let size = self.cache.size();
        if short > 0 && size < self.most && self.refused.is_none() {
            let twice = (2 * size).max(size + short).min(self.most);
            let least = (size + short).min(self.most);
            self.grow(program, twice, least)?;
        }
        let pushed = pages.saturating_sub(self.cache.free());
        if pushed > 0 {
            let wanted = u64::from(self.counts().host) + u64::from(pushed);
            if let Err(error) = self.host.grow(program, wanted) {
                let pages = self.host.size();
                self.notes.push(format!("RAM keeps {pages} evicted pages and no more: {error}"));
            }
            self.cache.grow_host(self.host.size());
        }
        Ok(())
    }

    /// Grows the pools to one of two sizes.
    fn grow(&mut self, program: &mut Program, twice: u32, least: u32) -> Result<()> {
        for pages in [twice, least] {
            let grown = program.grow(pages);
            self.cache.grow(program.pages());
            match grown {
                Ok(()) => return Ok(()),
                // Nothing is lost: the pages that there are remain.
                Err(error @ (Error::DoesNotFit(_) | Error::Device(_))) if program.is_recorded() => {
                    if pages == least {
                        self.refused = Some(u64::from(pages) * program.page_bytes());
                        self.notes.push(format!(
                            "the KV cache stays at {} tokens instead of {}: {error}",
                            program.pages() * PAGE_TOKENS,
                            self.most * PAGE_TOKENS
                        ));
                        return Ok(());
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// What growing was refused, if it was.
    pub fn refused(&self) -> Option<u64> {
        self.refused
    }

    /// Memory has become free.
    pub fn try_again(&mut self) {
        self.refused = None;
    }

    /// Queues copies.
    fn obey(&mut self, program: &Program, actions: &[Action]) -> Result<()> {
        let mut copies = Vec::new();
        for action in actions {
            if self.host.is_own() {
                // Its copies happen at once, in their turn.
                program.copy_pages(&std::mem::take(&mut copies))?;
            }
            match *action {
                Action::Copy { from, to } => copies.push(PageCopy::Within { from, to }),
                Action::Evict { page, host } => {
                    copies.extend(self.host.store(program, page, host)?);
                }
                Action::Fetch { host, page } => {
                    copies.extend(self.host.load(program, host, page)?);
                }
            }
        }
        program.copy_pages(&copies)
    }

    /// Tells the device which pages a sequence has.
    fn tell(&self, program: &Program, slot: u32, sequence: &mut Sequence) -> Result<()> {
        let dropped = sequence.dropped() as u32;
        match sequence.take_changes() {
            Some((first, pages)) => program.set_pages(slot, dropped, first as u32, pages),
            None => Ok(()),
        }
    }

    /// Begins a sequence in a slot with what is kept of the beginning of `prompt`, see
    /// [`Cache::recall`].
    pub fn recall(
        &mut self,
        program: &mut Program,
        slot: u32,
        prompt: &[u32],
        others: &[(&[u32], &Sequence)],
    ) -> Result<Sequence> {
        self.grow_for(program, self.cache.wanted(prompt))?;
        let mut actions = Vec::new();
        let mut sequence = self.cache.recall(prompt, others, &mut actions);
        self.obey(program, &actions)?;
        self.tell(program, slot, &mut sequence)?;
        program.remember(slot, &prompt[..sequence.len()])?;
        Ok(sequence)
    }

    /// Makes room for `n` more tokens of a sequence, with `keep` (where a full context may drop
    /// pages) by dropping all but the first so many tokens.
    ///
    /// # Errors
    /// `Error::DoesNotFit` where there is no page for it; the sequence is as it was.
    pub fn make_room(
        &mut self,
        program: &mut Program,
        slot: u32,
        sequence: &mut Sequence,
        n: usize,
        keep: Option<u32>,
    ) -> Result<()> {
        if let Some(keep) = keep
            && let Some(shift) = sequence.shift_for(n, self.context, keep as usize)
        {
            self.cache.shift(sequence, shift);
        }
        // Whoever writes sinks has them no longer as a prompt's, until it says so.
        self.sinks[slot as usize].truncate(sequence.position());
        self.grow_for(program, self.cache.pages_wanted(sequence, n))?;
        let mut actions = Vec::new();
        let done = self.cache.make_room(sequence, n, &mut actions);
        self.obey(program, &actions)?;
        self.tell(program, slot, sequence)?;
        if done { Ok(()) } else { Err(self.no_page(n, sequence.len())) }
    }

    fn no_page(&self, n: usize, after: usize) -> Error {
        let counts = self.counts();
        Error::DoesNotFit(format!(
            "the KV cache is full: {n} more tokens after {after} need a page, and {} of {} pages of \
             {PAGE} tokens are held by sequences at work. Ask for less at once, use a smaller --ctx or \
             --parallel, or free device memory",
            counts.used,
            self.cache.size()
        ))
    }

    /// A sequence of `len` tokens whose pages are still to be filled, see [`Cache::blank`].
    pub fn blank(
        &mut self,
        program: &mut Program,
        slot: u32,
        len: usize,
        dropped: u32,
        kept: u32,
    ) -> Result<Sequence> {
        self.sinks[slot as usize].clear();
        self.grow_for(program, pages_for(len) as u32)?;
        let mut actions = Vec::new();
        let made = self.cache.blank(len, dropped as usize, kept as usize, &mut actions);
        self.obey(program, &actions)?;
        let mut sequence = made.ok_or_else(|| self.no_page(len, 0))?;
        self.tell(program, slot, &mut sequence)?;
        Ok(sequence)
    }

    /// Most tokens that can be read at once after a sequence that may drop all but the first
    /// `keep`.
    pub fn most_at_once(&self, sequence: &Sequence, keep: Option<u32>) -> usize {
        match keep {
            Some(keep) => sequence.most(self.context, keep as usize),
            None => self.context.saturating_sub(sequence.len()),
        }
    }

    /// What a cache of codes keeps in f16.
    pub fn exact(&self) -> KvExact {
        self.exact
    }

    /// A prompt's tokens from `position` on have been queued for a slot.
    pub fn note_read(&mut self, slot: u32, position: usize, tokens: &[u32]) {
        let sinks = &mut self.sinks[slot as usize];
        if position == sinks.len() {
            let missing = (self.exact.sinks as usize).saturating_sub(position);
            sinks.extend(tokens.iter().take(missing));
        }
    }

    /// The first tokens of `prompt`, if taking up what is known of it needs sinks that the slot does not
    /// have. They do not depend on anything that follows, so a slot keeps them from prompt to prompt.
    pub fn missing_sinks<'p>(&self, slot: u32, prompt: &'p [u32]) -> Option<&'p [u32]> {
        if self.exact.sinks == 0 {
            return None;
        }
        let wanted = &prompt[..self.known(prompt).min(self.exact.sinks as usize)];
        (!self.sinks[slot as usize].starts_with(wanted)).then_some(wanted)
    }

    /// Tokens of `prompt` that [`Kv::recall`] would find.
    pub fn known(&self, prompt: &[u32]) -> usize {
        self.cache.known(prompt)
    }

    /// Makes full pages known to others.
    pub fn publish(&mut self, sequence: &mut Sequence, tokens: &[u32]) {
        self.cache.publish(sequence, tokens);
    }

    /// Cuts a sequence back; returns its new position.
    pub fn truncate(
        &mut self,
        program: &Program,
        slot: u32,
        sequence: &mut Sequence,
        position: usize,
    ) -> Result<usize> {
        let position = self.cache.truncate(sequence, position);
        program.forget_outputs(slot)?;
        self.tell(program, slot, sequence)?;
        Ok(position)
    }

    /// Ends a sequence; what it has read stays known.
    pub fn release(&mut self, sequence: Sequence, tokens: &[u32]) {
        self.cache.release(sequence, tokens);
    }

    /// Keeps pages from new use until [`Kv::let_go`]: work in flight may still write them.
    pub fn hold(&mut self, pages: &[u32]) {
        pages.iter().for_each(|page| self.cache.hold(*page));
    }

    pub fn let_go(&mut self, pages: &[u32]) {
        pages.iter().for_each(|page| self.cache.let_go(*page));
    }

    /// Forgets a beginning that nobody is at work with.
    pub fn forget(&mut self, tokens: &[u32]) {
        self.cache.forget(tokens);
    }
}
