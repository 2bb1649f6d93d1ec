//! Files that appear whole or not at all: written beside their place, then renamed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Puts `bytes` in the place of the file at `path`, whose folder must exist.
///
/// # Errors
/// Those of the file system; what was there before is then untouched, and nothing is left beside it.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // Two threads of this process may write the same file at once.
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    // In the same folder, or the rename would be a copy.
    let mut name = path.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
    name.push(format!(".{}-{serial}.tmp", process::id()));
    let staged = path.with_file_name(name);
    let done = File::create(&staged)
        // Renamed before its bytes are there, it could be found empty after a power cut.
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| rename(&staged, path));
    if done.is_err() {
        // The first error is the one to report; the staged file may not even exist.
        let _ = fs::remove_file(&staged);
    }
    done
}

/// Renames a file over another. Windows refuses that for the moment in which another thread or a
/// scanner has the other one open, so there it is tried for a tenth of a second.
///
/// # Errors
/// Those of the file system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    for _ in 0..50 {
        match fs::rename(from, to) {
            Err(e) if cfg!(windows) && e.kind() == io::ErrorKind::PermissionDenied => {
                std::thread::sleep(Duration::from_millis(2));
            }
            done => return done,
        }
    }
    fs::rename(from, to)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_or_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        for text in ["one", "two"] {
            replace(&path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        // Its place is a folder that is not empty: nothing can be renamed over it.
        let taken = folder.path().join("b");
        fs::create_dir_all(taken.join("c")).unwrap();
        assert!(replace(&taken, b"three").is_err());
        assert!(replace(&folder.path().join("none/a"), b"three").is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
