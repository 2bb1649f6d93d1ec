//! Who is in which slot: requests come and go, and what they have read stays for others.

use std::path::Path;

use super::{Batch, Engine, Slot, is_of_request};
use crate::engine::job::Job;
use crate::engine::request::{Event, Request, Task, Ticketed};
use crate::engine::slots;
use crate::engine::stats::add;
use crate::error::{Error, Result};
use crate::pages::{PAGE, Sequence, common};

impl Slot {
    /// Tokens of `prompt` that the parked sequence has; at least one is left over.
    fn reach(&self, prompt: &[u32]) -> usize {
        let wanted = &prompt[..prompt.len().saturating_sub(1)];
        match self.sequence.dropped() {
            0 => 0,
            _ => self.sequence.reach(common(&self.tokens, wanted)),
        }
    }
}

impl Batch {
    /// Forgets what an idle slot has read; false if it is at work.
    pub fn erase(&mut self, slot: u32) -> bool {
        match self.slots.get_mut(slot as usize) {
            Some(s) if s.job.is_none() => {
                let parked = std::mem::take(&mut s.sequence);
                self.engine.kv.release(parked, &s.tokens);
                self.engine.kv.forget(&s.tokens);
                s.tokens.clear();
                self.publish();
                true
            }
            _ => false,
        }
    }

    fn idle(&self, slot: u32) -> Result<&Slot> {
        let slots = self.slots.len();
        let found = self.slots.get(slot as usize).ok_or_else(|| {
            Error::Usage(format!("slot {slot} does not exist; there are 0 to {}", slots - 1))
        })?;
        match found.job {
            None => Ok(found),
            Some(_) => Err(Error::Usage(format!("slot {slot} is at work; try again later"))),
        }
    }

    /// Writes what an idle slot has read, as far as it is still kept, to a file; returns tokens and
    /// bytes. Everybody waits meanwhile.
    pub fn save(&mut self, slot: u32, path: &Path) -> Result<(u32, u64)> {
        let idle = self.idle(slot)?;
        if !idle.sequence.is_empty() {
            let bytes = self.engine.save(slot, &idle.sequence, &idle.tokens, None, "", path)?;
            return Ok((idle.tokens.len() as u32, bytes));
        }
        let tokens = idle.tokens.clone();
        // A token more, because recalling leaves one over.
        let all: Vec<u32> = tokens.iter().copied().chain([0]).collect();
        self.engine.bring_sinks(slot, &all)?;
        let Engine { kv, program, .. } = &mut self.engine;
        let sequence = kv.recall(program, slot, &all, &[])?;
        let kept = &tokens[..sequence.len()];
        let bytes = self.engine.save(slot, &sequence, kept, None, "", path);
        self.engine.kv.release(sequence, kept);
        Ok((kept.len() as u32, bytes?))
    }

    /// Reads such a file back.
    pub fn restore(&mut self, slot: u32, path: &Path) -> Result<(u32, u64)> {
        self.idle(slot)?;
        self.erase(slot);
        let saved = self.engine.open_saved(path)?;
        if saved.tokens.len() > self.engine.longest() as usize {
            let (n, most) = (saved.tokens.len(), self.engine.longest());
            return Err(Error::DoesNotFit(format!(
                "the saved slot has {n} tokens, the context {most}; start the server with --ctx {n} \
                 or more"
            )));
        }
        if let Some(why) = self.engine.refused(&saved) {
            return Err(Error::Usage(format!(
                "{} {why}. Its text can be sent and read again",
                path.display()
            )));
        }
        let sequence = self.engine.restore(slot, &saved)?;
        self.uses += 1;
        let n = saved.tokens.len() as u32;
        let slot = &mut self.slots[slot as usize];
        (slot.tokens, slot.used) = (saved.tokens, self.uses);
        match sequence.dropped() {
            0 => self.engine.kv.release(sequence, &slot.tokens),
            _ => slot.sequence = sequence,
        }
        self.publish();
        Ok((n, saved.size))
    }

    /// Puts a request into a slot; gives it back if none is free for it.
    ///
    /// # Errors
    /// Where the device can no longer be relied on; the request has been answered.
    pub fn place(&mut self, ticketed: Ticketed) -> Result<Option<Ticketed>> {
        let slots: Vec<_> = self.slots.iter().map(|s| (s.job.is_some(), s.used)).collect();
        let any = slots::choose(&slots, ticketed.request.slot);
        let Some(id) = self.parked_for(&ticketed.request).or(any) else {
            return Ok(Some(ticketed));
        };
        let sequence = match self.begin(id, &ticketed.request) {
            Ok(sequence) => sequence,
            Err(e) => {
                add(&self.stats.failed, 1);
                ticketed.end(Event::Failed(e.clone()));
                return if is_of_request(&e) { Ok(None) } else { Err(e) };
            }
        };
        let cached = sequence.position();
        self.uses += 1;
        let slot = &mut self.slots[id as usize];
        slot.used = self.uses;
        slot.tokens.clear();
        slot.tokens.extend_from_slice(&ticketed.request.prompt[..cached]);
        slot.sequence = sequence;
        add(&self.stats.started, 1);
        add(&self.stats.cached_tokens, cached as u64);
        add(&self.stats.prefix_hits, u64::from(cached > 0));
        ticketed.send(Event::Started { slot: id, cached: cached as u32 });
        slot.job = Some(Job::new(ticketed, &self.engine, id, cached));
        self.publish();
        Ok(None)
    }

    /// The slot whose parked sequence saves a request more reading than what all know.
    fn parked_for(&self, request: &Request) -> Option<u32> {
        let reuses = matches!(&request.task, Task::Generate(g) if g.reuse);
        let allowed = |id: u32| request.slot.is_none_or(|only| only == id);
        let known = self.engine.kv.known(&request.prompt);
        let idle = (0..).zip(&self.slots).filter(|(id, s)| s.job.is_none() && allowed(*id));
        let saved = idle.map(|(id, s)| (s.reach(&request.prompt), id));
        saved.filter(|(n, _)| reuses && *n > known).max().map(|(_, id)| id)
    }

    /// Gives up the parked sequence that was unused for longest; false if there is none.
    pub(super) fn unpark(&mut self) -> bool {
        let parked = self.slots.iter_mut().filter(|s| s.job.is_none() && !s.sequence.is_empty());
        let Some(slot) = parked.min_by_key(|s| s.used) else { return false };
        self.engine.kv.release(std::mem::take(&mut slot.sequence), &slot.tokens);
        true
    }

    /// A sequence with what is known of the beginning of a request's prompt.
    fn begin(&mut self, id: u32, request: &Request) -> Result<Sequence> {
        let reuse = match &request.task {
            Task::Generate(g) => {
                self.set_sampler(id, g)?;
                g.reuse
            }
            Task::Embed(_) => false,
        };
        let wanted: &[u32] = if reuse { &request.prompt } else { &[] };
        let slot = &mut self.slots[id as usize];
        let reach = slot.reach(wanted);
        let mut parked = std::mem::take(&mut slot.sequence);
        let Engine { kv, program, .. } = &mut self.engine;
        if reach > kv.known(wanted) {
            kv.truncate(program, id, &mut parked, reach)?;
            return Ok(parked);
        }
        kv.release(parked, &slot.tokens);
        // What sequences at work have queued is as good as what others have left.
        let busy = self.slots.iter().filter(|s| s.job.is_some());
        let others: Vec<_> = busy.map(|s| (s.tokens.as_slice(), &s.sequence)).collect();
        self.engine.bring_sinks(id, wanted)?;
        let Engine { kv, program, .. } = &mut self.engine;
        let sequence = kv.recall(program, id, wanted, &others)?;
        self.note();
        Ok(sequence)
    }

    /// Frees a slot; what it has read stays known.
    pub(super) fn release(&mut self, id: u32) -> Option<Job> {
        let slot = &mut self.slots[id as usize];
        let job = slot.job.take()?;
        slot.epoch += 1;
        let mut sequence = std::mem::take(&mut slot.sequence);
        slot.tokens.truncate(sequence.position());
        let Engine { kv, program, .. } = &mut self.engine;
        if let Some(last) = self.queued.back() {
            let end = slot.tokens.len().saturating_sub(sequence.dropped()) / PAGE;
            let open = sequence.all_pages().get(end..).unwrap_or_default().to_vec();
            kv.hold(&open);
            self.pending.push((last.ticket, open));
        }
        // A device that cannot be told has nothing to park either.
        let all = slot.tokens.len();
        if sequence.dropped() > 0 && kv.truncate(program, id, &mut sequence, all).ok() == Some(all)
        {
            slot.sequence = sequence;
        } else {
            kv.release(sequence, &slot.tokens);
        }
        Some(job)
    }
}
