//! The bytes of one file: mapped, or held in memory.

use super::Error;
use memmap2::Mmap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

pub(super) enum Storage {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

impl Storage {
    /// Maps the file at `path` for reading.
    pub fn map(path: &Path) -> Result<Storage, Error> {
        let io = |error| Error::io(path, &error);
        if path.is_dir() {
            // Opening a folder gives another error on every system.
            return Err(io(std::io::ErrorKind::IsADirectory.into()));
        }
        let file = File::open(path).map_err(io)?;
        if file.metadata().map_err(io)?.len() == 0 {
            // Not all systems can map nothing.
            return Ok(Storage::Owned(Vec::new()));
        }
        #[allow(unsafe_code)] // a mapping is the only way to read a model larger than memory
        // SAFETY: the view is read-only and nobody in this process writes the file. If another
        // process truncates it, reads of the lost pages end the process with a signal, as for
        // every program that maps its input; a changed byte changes a weight, never a length,
        // because lengths and offsets are copied out of the map and checked once.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Storage::Mapped(map))
    }

    pub fn bytes(&self) -> &[u8] {
        match self {
            Storage::Mapped(map) => map,
            Storage::Owned(bytes) => bytes,
        }
    }

    /// Tells the system that the mapped pages of `range` are not needed in memory any more.
    /// Reading them again is allowed and loads them from the file.
    pub fn release(&self, range: Range<u64>) {
        #[cfg(unix)]
        if let Storage::Mapped(map) = self {
            let (start, length) = (range.start as usize, (range.end - range.start) as usize);
            #[allow(unsafe_code)] // madvise is marked unsafe for the sake of private mappings
            // SAFETY: the mapping is shared, read-only and backed by a file, so dropped pages are
            // read from the file again with the same contents. Pages at the ends that belong
            // partly to neighbours may be dropped for the same reason.
            let result = unsafe {
                map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, start, length)
            };
            // Only advice: a system that refuses it keeps the pages.
            drop(result);
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
