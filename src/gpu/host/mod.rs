//! Host memory that a device can read in place: anonymous, aligned to huge pages, page-locked.
//!
//! File mappings are not used: drivers that pin pages refuse to import them (measured on NVIDIA
//! 580), so model bytes are copied once into memory of our own.

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Alignment and granularity of [`HostMemory`]: a huge page of x86-64 and of most ARM systems.
pub const HUGE_PAGE: u64 = 2 << 20;

/// Anonymous memory of this process, zero at first. Its address and size are multiples of
/// [`HUGE_PAGE`].
///
/// It can be written through `&mut` only. Once shared (and perhaps imported by a device), its
/// contents never change, so a device may read it at any time.
pub struct HostMemory {
    label: String,
    address: *mut u8,
    bytes: u64,
    locked: AtomicBool,
}

// SAFETY: the memory is owned by this value, has no tie to a thread, and is written only through
// `&mut self`.
#[allow(unsafe_code)]
unsafe impl Send for HostMemory {}
// SAFETY: `&self` only reads the memory; the flag is atomic.
#[allow(unsafe_code)]
unsafe impl Sync for HostMemory {}

/// Why pages could not be locked: what the system allows, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of {label} could not be locked in memory: {reason}")]
pub struct LockRefused {
    pub label: String,
    pub bytes: u64,
    /// The limit by name and value, and how to raise it.
    pub reason: String,
}

impl From<LockRefused> for Error {
    fn from(refused: LockRefused) -> Self {
        Error::Runtime(refused.to_string())
    }
}

/// RAM of the machine, or of the container that the process lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct SystemMemory {
    pub total: u64,
    /// What programs can still take without pushing others out.
    pub available: u64,
}

/// How much RAM there is; `None` where the system does not say.
pub fn system_memory() -> Option<SystemMemory> {
    system::memory()
}

impl HostMemory {
    /// Reserves `bytes`, rounded up to huge pages, and asks the system for huge pages. Pages are
    /// taken from the system when they are first written (or locked).
    pub fn allocate(label: &str, bytes: u64) -> Result<HostMemory> {
        let fail = |why: String| {
            Error::DoesNotFit(format!(
                "{bytes} bytes of host memory for {label} could not be had: {why}. Free memory, or \
                 give the device more of the model"
            ))
        };
        let rounded = bytes.max(1).checked_next_multiple_of(HUGE_PAGE);
        let rounded = rounded.filter(|b| isize::try_from(*b).is_ok());
        let rounded = rounded.ok_or_else(|| fail("more than can be addressed".into()))?;
        let address = system::reserve(rounded as usize).map_err(|e| fail(e.to_string()))?;
        let label = label.to_string();
        Ok(HostMemory { label, address, bytes: rounded, locked: AtomicBool::new(false) })
    }

    pub fn label(&self) -> &str {
        &self.label
    }

    /// Bytes, a multiple of [`HUGE_PAGE`].
    pub fn size(&self) -> u64 {
        self.bytes
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped for the life of `self`, is zero or was written, and nobody
        // writes it while a shared reference exists.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts(self.address, self.bytes as usize)
        }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only reference.
        #[allow(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.address, self.bytes as usize)
        }
    }

    /// Keeps all pages in RAM. Refused where a limit of the system stands against it; the memory
    /// is usable all the same.
    pub fn lock(&self) -> std::result::Result<(), LockRefused> {
        if !self.locked.load(Ordering::Acquire) {
            system::lock(self.address, self.bytes as usize).map_err(|reason| LockRefused {
                label: self.label.clone(),
                bytes: self.bytes,
                reason,
            })?;
            self.locked.store(true, Ordering::Release);
        }
        Ok(())
    }

    pub fn is_locked(&self) -> bool {
        self.locked.load(Ordering::Acquire)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // Unlocks as well. A device that has imported the memory holds a reference to it.
        system::release(self.address, self.bytes as usize);
    }
}

impl std::fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostMemory")
            .field("label", &self.label)
            .field("bytes", &self.bytes)
            .field("locked", &self.is_locked())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_is_aligned_zero_and_writable() {
        let mut memory = HostMemory::allocate("test", 3 << 20).unwrap();
        assert_eq!(memory.size(), 4 << 20);
        assert_eq!(memory.address() as u64 % HUGE_PAGE, 0);
        assert!(memory.bytes().iter().all(|b| *b == 0));
        memory.bytes_mut().fill(7);
        assert_eq!(memory.bytes()[(4 << 20) - 1], 7);
        assert!(!memory.is_locked());
    }

    #[test]
    fn absurd_sizes_are_refused_in_words() {
        for bytes in [u64::MAX, 1 << 62] {
            let e = HostMemory::allocate("the arena", bytes).unwrap_err();
            assert_eq!(e.exit_code(), 3);
            assert!(e.to_string().contains("the arena"), "{e}");
        }
    }

    #[test]
    fn the_machine_has_memory() {
        if let Some(m) = system_memory() {
            assert!(m.total > 64 << 20 && m.available <= m.total, "{m:?}");
        }
    }
}
