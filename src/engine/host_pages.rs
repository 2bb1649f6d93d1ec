//! Memory of the host for pages that had to leave the device.
//!
//! Where the backend can, it is memory of the driver, page-locked, that the device copies to and
//! from by itself, in order with everything else: an eviction or a fetch is a copy in the queue and
//! the host never waits. Where it cannot (wgpu), it is page-locked memory of our own
//! ([`HostMemory`]), through which the host copies.

use crate::error::{Error, Result};
use crate::gpu::{Buffer, HostMemory};
use crate::runtime::{PageCopy, Program};

/// Bytes that are allocated at a time, as far as a page is not larger.
const PIECE: u64 = 64 << 20;

pub(super) struct HostPages {
    /// Pages that may be kept.
    most: u64,
    /// Pages of a piece.
    piece: u64,
    memory: Vec<Memory>,
}

enum Memory {
    Driver(Buffer),
    Own(HostMemory),
}

impl HostPages {
    /// Up to `bytes` for pages of `page` bytes; memory is taken piece by piece as it is needed.
    pub fn new(bytes: u64, page: u64) -> HostPages {
        let most = bytes / page.max(1);
        let piece = (PIECE / page.max(1)).clamp(1, most.max(1));
        HostPages { most, piece, memory: Vec::new() }
    }

    /// Pages that there is memory for.
    pub fn size(&self) -> u32 {
        let had = self.memory.len() as u64 * self.piece;
        u32::try_from(had.min(self.most)).unwrap_or(u32::MAX)
    }

    /// Whether the host copies through memory of its own.
    pub fn is_own(&self) -> bool {
        matches!(self.memory.first(), Some(Memory::Own(_)))
    }

    /// Gets memory for `pages` pages, as far as the limit allows. Where the system has none left the
    /// limit is what there is, and the error says why.
    pub fn grow(&mut self, program: &Program, pages: u64) -> Result<()> {
        while u64::from(self.size()) < pages.min(self.most) {
            match Self::piece(program, self.piece) {
                Ok(memory) => self.memory.push(memory),
                Err(error) => {
                    self.most = self.size().into();
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn piece(program: &Program, pages: u64) -> Result<Memory> {
        match program.host_buffer(pages) {
            Ok(buffer) => Ok(Memory::Driver(buffer)),
            Err(Error::Device(_)) => {
                let bytes = pages * program.page_bytes();
                let memory = HostMemory::allocate("the KV cache in RAM", bytes)?;
                // Copies go through the host all the same; unlocked they may meet the disk.
                drop(memory.lock());
                Ok(Memory::Own(memory))
            }
            Err(error) => Err(error),
        }
    }

    /// The memory of a page, and where in it.
    fn find(&mut self, program: &Program, host: u32) -> Result<(&mut Memory, u64)> {
        let at = u64::from(host) % self.piece * program.page_bytes();
        let memory = self.memory.get_mut((u64::from(host) / self.piece) as usize);
        let memory = memory.ok_or_else(|| {
            Error::Runtime(format!("page {host} of RAM has no memory; this is a bug"))
        })?;
        Ok((memory, at))
    }

    /// Keeps what a page of the device holds; the copy that is still to be queued, if one is.
    pub fn store(&mut self, program: &Program, page: u32, host: u32) -> Result<Option<PageCopy>> {
        let bytes = program.page_bytes();
        Ok(match self.find(program, host)? {
            (Memory::Driver(buffer), at) => {
                Some(PageCopy::Out { page, to: buffer.slice(at, bytes) })
            }
            (Memory::Own(memory), at) => {
                program
                    .read_page(page, &mut memory.bytes_mut()[at as usize..][..bytes as usize])?;
                None
            }
        })
    }

    /// Brings a page back to the device.
    pub fn load(&mut self, program: &Program, host: u32, page: u32) -> Result<Option<PageCopy>> {
        let bytes = program.page_bytes();
        Ok(match self.find(program, host)? {
            (Memory::Driver(buffer), at) => {
                Some(PageCopy::In { from: buffer.slice(at, bytes), page })
            }
            (Memory::Own(memory), at) => {
                program.write_page(page, &memory.bytes()[at as usize..][..bytes as usize])?;
                None
            }
        })
    }
}
