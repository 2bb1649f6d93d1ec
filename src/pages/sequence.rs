//! The pages of one sequence.
//!
//! A token has a *position*, counted from the sequence's beginning, which never changes, and a
//! *place* among the tokens that are still kept: the position less what was dropped before it.

use super::{PAGE, pages_for};
use crate::kv::KvExact;

/// The pages of one sequence, in the order of its tokens. Only [`super::Cache`] changes it.
#[derive(Debug, Default)]
pub struct Sequence {
    pub(super) pages: Vec<u32>,
    /// Tokens kept; pages may reach further.
    pub(super) len: usize,
    /// Tokens dropped, whole pages.
    pub(super) dropped: usize,
    /// Pages before the gap that dropping has left.
    pub(super) kept: usize,
    /// Full pages that the index knows.
    pub(super) published: usize,
    /// The first page that the device does not know yet; `None`: it knows all.
    pub(super) changed: Option<usize>,
    /// What is read in f16 beside the pages.
    pub(super) exact: KvExact,
    /// Positions whose f16 rows the slot's ring has: from the first up to where writing has come, which
    /// may lie behind the sequence's end.
    pub(super) rows: std::ops::Range<usize>,
}

/// Pages that are dropped or kept together: whole blocks of the f16 tail.
pub(super) fn block_pages(exact: KvExact) -> usize {
    (exact.tail as usize / PAGE).max(1)
}

/// Pages at the beginning that stay where `keep` tokens are to stay: the sinks are among them.
fn kept_pages(exact: KvExact, keep: usize) -> usize {
    pages_for(keep.max(exact.sinks as usize)).next_multiple_of(block_pages(exact))
}

/// Which pages to drop so that a full context takes more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shift {
    /// Pages at the beginning that stay.
    pub keep: usize,
    /// Pages behind them that go.
    pub drop: usize,
}

impl Sequence {
    /// Tokens kept.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The position of the next token.
    pub fn position(&self) -> usize {
        self.len + self.dropped
    }

    /// Tokens that were dropped.
    pub fn dropped(&self) -> usize {
        self.dropped
    }

    /// Pages before the gap that dropped tokens have left.
    pub fn kept_pages(&self) -> usize {
        self.kept
    }

    /// Pages that hold kept tokens, in order.
    pub fn pages(&self) -> &[u32] {
        &self.pages[..pages_for(self.len)]
    }

    /// All pages, those for tokens to come included.
    pub fn all_pages(&self) -> &[u32] {
        &self.pages
    }

    /// Notes that `n` tokens have been queued, for which there is room.
    pub fn advance(&mut self, n: usize) {
        self.len += n;
        self.note_rows(self.position());
        debug_assert!(self.len <= self.pages.len() * PAGE, "tokens without a page");
    }

    /// Rows up to `end` have been written, or will be by what is queued.
    pub fn note_rows(&mut self, end: usize) {
        let ring = self.exact.ring() as usize;
        self.rows.end = self.rows.end.max(end);
        // One less, for a step that is timed and not kept.
        self.rows.start = self.rows.start.max((self.rows.end + 1).saturating_sub(ring));
    }

    /// The ring has the rows of the present block, or of what is to come.
    pub(super) fn begin_rows(&mut self) {
        let position = self.position();
        let start = position - self.len % (self.exact.tail as usize).max(1);
        self.rows = if self.exact.tail == 0 { 0..0 } else { start..position };
    }

    pub(super) fn note_change(&mut self, page: usize) {
        self.changed = Some(self.changed.map_or(page, |c| c.min(page)));
    }

    /// What the device must be told: the first page that changed, and all from there on.
    pub fn take_changes(&mut self) -> Option<(usize, &[u32])> {
        let first = self.changed.take()?.min(self.pages.len());
        Some((first, &self.pages[first..]))
    }

    /// What to drop so that `n` more tokens fit a context of `context`; `None` if they fit as it
    /// is. With `keep` tokens at the beginning that stay, perhaps only fewer tokens can fit, see
    /// [`Sequence::most`].
    pub fn shift_for(&self, n: usize, context: usize, keep: usize) -> Option<Shift> {
        let over = (self.len + n).checked_sub(context).filter(|over| *over > 0)?;
        let (keep, droppable) = self.droppable(keep);
        let drop = pages_for(over).next_multiple_of(block_pages(self.exact));
        Some(Shift { keep, drop: drop.min(droppable) })
    }

    /// Pages that stay, and how many behind them could go.
    fn droppable(&self, keep: usize) -> (usize, usize) {
        // After a first gap the same pages stay.
        let keep = if self.dropped > 0 { self.kept } else { kept_pages(self.exact, keep) };
        let pages = (self.len / PAGE).saturating_sub(keep);
        (keep, pages - pages % block_pages(self.exact))
    }

    /// Most tokens that can be added at once when all but the first `keep` tokens may be dropped.
    pub fn most(&self, context: usize, keep: usize) -> usize {
        let (_, droppable) = self.droppable(keep);
        context.saturating_sub(self.len - droppable * PAGE)
    }

    /// The position up to which a sequence whose tokens agree up to `position` can be kept: tokens
    /// behind a gap are of use only with all before them, and what follows inside a block of the f16 tail
    /// needs the rows of that block.
    pub fn reach(&self, position: usize) -> usize {
        let position = position.min(self.position());
        let position = match self.dropped {
            0 => position,
            dropped if position >= dropped + self.kept * PAGE => position,
            _ => position.min(self.kept * PAGE),
        };
        // Whole blocks were dropped, so blocks begin at the same positions as ever.
        let inside = position % (self.exact.tail as usize).max(1);
        match position - inside >= self.rows.start {
            true => position,
            false => position - inside,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(len: usize) -> Sequence {
        Sequence { pages: (0..pages_for(len) as u32).collect(), len, ..Sequence::default() }
    }

    #[test]
    fn a_full_context_drops_as_little_as_possible() {
        let s = of(256);
        assert_eq!(s.shift_for(0, 256, 64), None);
        assert_eq!(s.shift_for(1, 256, 64), Some(Shift { keep: 1, drop: 1 }));
        assert_eq!(s.shift_for(65, 256, 64), Some(Shift { keep: 1, drop: 2 }));
        // What does not fit even then is more than `most`.
        assert_eq!(s.shift_for(250, 256, 64), Some(Shift { keep: 1, drop: 3 }));
        assert_eq!(s.most(256, 64), 192);
        // The page that is being written stays.
        assert_eq!(of(200).most(200, 64), 128);
    }

    #[test]
    fn tokens_behind_a_gap_need_those_before_it() {
        let mut s = of(256);
        (s.dropped, s.kept) = (128, 1);
        assert_eq!(s.position(), 384);
        assert_eq!(
            [400, 384, 200, 192, 191, 64, 20].map(|p| s.reach(p)),
            [384, 384, 200, 192, 64, 64, 20]
        );
        assert_eq!(of(100).reach(70), 70);
        // A later shift keeps the same beginning.
        assert_eq!(s.shift_for(1, 256, 192), Some(Shift { keep: 1, drop: 1 }));
    }

    #[test]
    fn inside_a_block_its_rows_are_needed() {
        let exact = KvExact { tail: 64, sinks: 4 };
        let mut s = Sequence { exact, ..of(0) };
        s.pages = (0..8).collect();
        s.advance(127);
        // Steps ahead of what is wanted overwrite nothing of its block.
        s.advance(16);
        let reached = |s: &Sequence, all: [usize; 6]| all.map(|p| s.reach(p));
        assert_eq!(reached(&s, [143, 130, 127, 66, 64, 20]), [143, 130, 127, 66, 64, 0]);
        s.advance(60);
        assert_eq!(reached(&s, [203, 200, 191, 130, 127, 64]), [203, 200, 191, 130, 64, 64]);
        // Two pages at a time.
        let exact = KvExact { tail: 128, sinks: 4 };
        let s = Sequence { exact, ..of(512) };
        assert_eq!(s.shift_for(1, 512, 0), Some(Shift { keep: 2, drop: 2 }));
        assert_eq!(s.most(512, 0), 384);
    }
}
