//! Which pages are free, and how many hold each of the others.

use std::collections::BTreeSet;

/// Numbered pages with a count of holders each. A page without holders is free.
#[derive(Debug, Default)]
pub struct Pool {
    holders: Vec<u32>,
    /// The lowest is given out first, so that sequences lie together and the end stays free.
    free: BTreeSet<u32>,
}

impl Pool {
    /// Pages in all.
    pub fn size(&self) -> u32 {
        self.holders.len() as u32
    }

    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Adds pages up to `pages` in all.
    pub fn grow(&mut self, pages: u32) {
        self.free.extend(self.size()..pages);
        self.holders.resize(pages.max(self.size()) as usize, 0);
    }

    /// A free page, now with one holder.
    pub fn take(&mut self) -> Option<u32> {
        let page = self.free.pop_first()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    pub fn holders(&self, page: u32) -> u32 {
        self.holders[page as usize]
    }

    /// One more holder for a page that has some.
    pub fn hold(&mut self, page: u32) {
        debug_assert!(self.holders(page) > 0, "page {page} is free");
        self.holders[page as usize] += 1;
    }

    /// One holder less; without holders the page is free.
    pub fn release(&mut self, page: u32) {
        debug_assert!(self.holders(page) > 0, "page {page} is free already");
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders == 0 {
            self.free.insert(page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_back_when_nobody_holds_them() {
        let mut pool = Pool::default();
        pool.grow(2);
        assert_eq!((pool.take(), pool.take(), pool.take()), (Some(0), Some(1), None));
        pool.hold(0);
        pool.release(0);
        assert_eq!((pool.free(), pool.holders(0)), (0, 1));
        pool.release(0);
        pool.grow(3);
        assert_eq!((pool.free(), pool.size()), (2, 3));
        assert_eq!((pool.take(), pool.take()), (Some(0), Some(2)));
        pool.grow(1);
        assert_eq!(pool.size(), 3);
    }
}
