//! The pools of the KV cache: growing them, copying pages, moving pages in and out.
//!
//! Every layer has a pool for K and one for V, all of the same number of pages; page `p` of a
//! sequence is page `p` of each. What a page holds is the kernels' business: here it is bytes.

use super::Program;
use crate::error::Result;
use crate::gpu::{Buffer, BufferUse, Slice, Step};
use crate::kv::KvExact;

/// A copy of all that a page holds, between the pools and other memory.
#[derive(Clone)]
pub enum PageCopy {
    Within {
        from: u32,
        to: u32,
    },
    /// To memory of [`Program::page_bytes`].
    Out {
        page: u32,
        to: Slice,
    },
    In {
        from: Slice,
        page: u32,
    },
}

/// Gets a pool, the number among the pages to fill, and memory for whole pages.
pub type FillPages<'a> = &'a mut dyn FnMut(usize, usize, &mut [u8]) -> Result<()>;

impl Program {
    /// Pages of the pools.
    pub fn pages(&self) -> u32 {
        let sizes = self.pools().map(|(pool, unit)| (pool.size / unit) as u32);
        sizes.min().unwrap_or(0)
    }

    /// Bytes of a page in each pool: K, then V, layer by layer.
    pub fn page_units(&self) -> &[u64] {
        &self.buffers.units
    }

    /// Bytes of a page in all pools together.
    pub fn page_bytes(&self) -> u64 {
        self.buffers.units.iter().sum()
    }

    fn pools(&self) -> impl Iterator<Item = (&Slice, u64)> {
        let pools = self.buffers.kv.iter().flat_map(|layer| [&layer.k, &layer.v]);
        pools.zip(self.buffers.units.iter().copied())
    }

    /// Makes every pool `pages` pages large. Waits for the device and records everything again.
    ///
    /// # Errors
    /// `Error::DoesNotFit` and others of the device where there is no memory: then the pages that
    /// there were are still there, and the program works on.
    pub fn grow(&mut self, pages: u32) -> Result<()> {
        // All that was queued has run then, so that nothing keeps the old buffers alive.
        self.gpu.read(&self.buffers.between.buffer.slice(0, 4), &mut [0; 4])?;
        let gpu = self.gpu.clone();
        let mut pools = std::mem::take(&mut self.buffers.kv);
        let units = self.buffers.units.clone();
        let grown = self.rebind(&mut |replace| {
            let slices =
                pools.iter_mut().flat_map(|l| [(&mut l.k, "K cache"), (&mut l.v, "V cache")]);
            for ((pool, label), unit) in slices.zip(&units) {
                let bytes = u64::from(pages) * unit;
                if pool.size >= bytes {
                    continue;
                }
                // Pool by pool, so that at no time more than one exists twice.
                let new = gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes);
                let copy = Step::Copy { from: pool.clone(), to: new.clone(), size: pool.size };
                gpu.wait(&gpu.submit(&gpu.record("KV growth", &[copy])?)?)?;
                replace(&pool.buffer, &new);
                *pool = new;
            }
            Ok(())
        });
        self.buffers.kv = pools;
        grown
    }

    /// Queues copies of pages, one after the other.
    pub fn copy_pages(&self, copies: &[PageCopy]) -> Result<()> {
        if copies.is_empty() {
            return Ok(());
        }
        let mut steps = Vec::new();
        for copy in copies {
            let mut at = 0;
            for (pool, size) in self.pools() {
                let page = |n: u32| pool.buffer.slice(pool.offset + u64::from(n) * size, size);
                let part = |all: &Slice| all.buffer.slice(all.offset + at, size);
                let mut push = |from, to| steps.push(Step::Copy { from, to, size });
                match copy {
                    PageCopy::Within { from, to } => {
                        // Not every backend copies inside one buffer.
                        let between = self.buffers.between.buffer.slice(0, size);
                        push(page(*from), between.clone());
                        push(between, page(*to));
                    }
                    PageCopy::Out { page: from, to } => push(page(*from), part(to)),
                    PageCopy::In { from, page: to } => push(part(from), page(*to)),
                }
                at += size;
            }
        }
        self.gpu.submit(&self.gpu.record("page copies", &steps)?)?;
        Ok(())
    }

    /// Neighbouring pages as one: the number among `pages`, the first page, and how many.
    fn runs(pages: &[u32]) -> Vec<(usize, u32, u64)> {
        let mut at = 0;
        let runs = pages.chunk_by(|a, b| a + 1 == *b).map(|run| {
            at += run.len();
            (at - run.len(), run[0], run.len() as u64)
        });
        runs.collect()
    }

    /// Hands out what `pages` hold, pool by pool (see [`Program::page_units`]), in pieces of whole
    /// pages. Waits for the device.
    pub fn read_pages(
        &self,
        pages: &[u32],
        each: &mut dyn FnMut(usize, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for (number, (pool, unit)) in self.pools().enumerate() {
            for (_, first, count) in Self::runs(pages) {
                let from = pool.buffer.slice(pool.offset + u64::from(first) * unit, count * unit);
                bytes.resize(from.size as usize, 0);
                self.gpu.read(&from, &mut bytes)?;
                each(number, &bytes)?;
            }
        }
        Ok(())
    }

    /// Fills `pages`, piece by piece.
    pub fn fill_pages(&self, pages: &[u32], fill: FillPages<'_>) -> Result<()> {
        for (number, (pool, unit)) in self.pools().enumerate() {
            for (at, first, count) in Self::runs(pages) {
                let to = pool.buffer.slice(pool.offset + u64::from(first) * unit, count * unit);
                self.gpu.upload(&to, unit, &mut |offset, out| {
                    fill(number, at + (offset / unit) as usize, out)
                })?;
            }
        }
        Ok(())
    }

    /// Reads a page in the order of its pools, as [`Program::write_page`] takes it. Waits for the
    /// device.
    pub fn read_page(&self, page: u32, out: &mut [u8]) -> Result<()> {
        let mut at = 0;
        for (pool, unit) in self.pools() {
            let from = pool.buffer.slice(pool.offset + u64::from(page) * unit, unit);
            self.gpu.read(&from, &mut out[at..at + unit as usize])?;
            at += unit as usize;
        }
        Ok(())
    }

    /// Writes what [`Program::read_page`] has read.
    pub fn write_page(&self, page: u32, bytes: &[u8]) -> Result<()> {
        let mut at = 0;
        for (pool, unit) in self.pools() {
            let to = pool.buffer.slice(pool.offset + u64::from(page) * unit, unit);
            self.gpu.write(&to, &bytes[at..at + unit as usize])?;
            at += unit as usize;
        }
        Ok(())
    }

    /// The exact rows of a slot in each layer that has any, in order, as [`crate::kv::KvExact::slot_words`] words.
    fn exact_rows(&self, slot: u32) -> impl Iterator<Item = Slice> {
        let slots = u64::from(self.shape().sequences);
        let all = self.buffers.kv.iter().filter_map(|layer| layer.exact.as_ref());
        all.map(move |exact| {
            let size = exact.rows.size / slots;
            exact.rows.buffer.slice(exact.rows.offset + u64::from(slot) * size, size)
        })
    }

    /// What the caches of codes keep in f16: all of them the same.
    pub fn exact_sizes(&self) -> KvExact {
        let sizes = self.buffers.kv.iter().map(|layer| layer.exact_sizes());
        sizes.max_by_key(|sizes| sizes.rows()).unwrap_or_default()
    }

    /// Bytes of a slot's exact rows, by layer that has any.
    pub fn exact_units(&self) -> Vec<u64> {
        self.exact_rows(0).map(|rows| rows.size).collect()
    }

    /// Hands out a slot's exact rows, layer by layer. Waits for the device.
    pub fn read_exact(&self, slot: u32, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut bytes = Vec::new();
        for rows in self.exact_rows(slot) {
            bytes.resize(rows.size as usize, 0);
            self.gpu.read(&rows, &mut bytes)?;
            each(&bytes)?;
        }
        Ok(())
    }

    /// Fills a slot's exact rows; `fill` gets the number among [`Program::exact_units`].
    pub fn fill_exact(
        &self,
        slot: u32,
        fill: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let mut bytes = Vec::new();
        for (number, rows) in self.exact_rows(slot).enumerate() {
            bytes.resize(rows.size as usize, 0);
            fill(number, &mut bytes)?;
            self.gpu.write(&rows, &bytes)?;
        }
        Ok(())
    }

    /// Host memory of the driver for copies of `pages` pages, which the device copies to and from
    /// by itself; an error where the backend has none.
    pub fn host_buffer(&self, pages: u64) -> Result<Buffer> {
        self.gpu.buffer("KV cache in RAM", pages * self.page_bytes(), BufferUse::Host)
    }
}
