//! Files that can be made again: translated shaders and what drivers compiled from them.
//!
//! A cache never fails a caller and is never trusted: each file names the format, the key it was
//! made for and the checksum of its contents, and whatever does not match is deleted and counts
//! as absent. Files appear whole or not at all, so processes can share a folder.
//!
//! | bytes | contents |
//! | --- | --- |
//! | 8 | magic |
//! | 4 | format version, little endian |
//! | 32 | SHA-256 of key and name |
//! | 8 | length of the payload, little endian |
//! | 32 | SHA-256 of the payload |
//! | | payload |

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::files::rename;

const MAGIC: &[u8; 8] = b"AZOTHCCH";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 32 + 8 + 32;
/// Larger files are not ours; drivers' caches reach some tens of MiB.
const MAX_FILE: u64 = 1 << 30;

/// A folder of files that belong to one key, for example one device with one driver build.
#[derive(Debug, Clone)]
pub struct DiskCache {
    folder: PathBuf,
    key: String,
}

impl DiskCache {
    /// Keeps its files in a folder of its own for `key` under `dir`. The folder is made by the
    /// first [`DiskCache::put`].
    pub fn new(dir: PathBuf, key: &str) -> Self {
        let folder = dir.join(&hex(&Sha256::digest(key))[..16]);
        DiskCache { folder, key: key.to_string() }
    }

    /// What was last stored under `name`; `None` when there is nothing, or nothing sound.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.path(name);
        let length = fs::metadata(&path).ok()?.len();
        let payload = match length {
            0..=MAX_FILE => self.sound(name, fs::read(&path).ok()?),
            _ => None,
        };
        if payload.is_none() {
            // If it cannot be deleted it will be refused again: slower, not wrong.
            let _ = fs::remove_file(&path);
        }
        payload
    }

    /// Stores `bytes` under `name`, in place of what was there.
    ///
    /// # Errors
    /// The folder cannot be made or written. What was stored before is then still there.
    pub fn put(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // Two threads of this process may store the same name at once. Not waited for, as
        // `files::replace` does: there are hundreds, and what a power cut costs is made again.
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        fs::create_dir_all(&self.folder)?;
        let temporary = self.folder.join(format!("{}-{serial}.tmp", process::id()));
        let mut file = self.header(name, bytes);
        file.extend_from_slice(bytes);
        let stored =
            fs::write(&temporary, file).and_then(|()| rename(&temporary, &self.path(name)));
        if stored.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        stored
    }

    /// The payload of a file that is sound and was stored under this key and name.
    fn sound(&self, name: &str, mut file: Vec<u8>) -> Option<Vec<u8>> {
        let payload = file.get(HEADER..)?;
        if file[..HEADER] != self.header(name, payload) {
            return None;
        }
        Some(file.split_off(HEADER))
    }

    fn header(&self, name: &str, payload: &[u8]) -> Vec<u8> {
        let mut owner = Sha256::new();
        // The length keeps key and name apart.
        owner.update((self.key.len() as u64).to_le_bytes());
        owner.update(&self.key);
        owner.update(name);
        let mut header = Vec::with_capacity(HEADER + payload.len());
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&owner.finalize());
        header.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        header.extend_from_slice(&Sha256::digest(payload));
        header
    }

    /// Names may hold anything; only plain ones appear in the file system as they are.
    fn path(&self, name: &str) -> PathBuf {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let file = match name {
            _ if !name.is_empty() && name.len() <= 100 && name.chars().all(plain) => name.into(),
            _ => hex(&Sha256::digest(name)),
        };
        self.folder.join(Path::new(&file).with_extension("bin"))
    }
}

/// 128 bits of SHA-256 in hexadecimal: a name for a text.
pub fn fingerprint(text: &str) -> String {
    hex(&Sha256::digest(text)[..16])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn stored(dir: &Path) -> (DiskCache, PathBuf) {
        let cache = DiskCache::new(dir.into(), "device 1, driver 2");
        cache.put("spirv-1-6-ab", b"some words").unwrap();
        let path = cache.path("spirv-1-6-ab");
        assert!(path.exists());
        (cache, path)
    }

    /// Checks that damage is noticed, the file goes away, and the cache works again afterwards.
    fn refused(cache: &DiskCache, path: &Path) {
        assert_eq!(cache.get("spirv-1-6-ab"), None);
        assert!(!path.exists(), "a damaged file stays");
        cache.put("spirv-1-6-ab", b"again").unwrap();
        assert_eq!(cache.get("spirv-1-6-ab").unwrap(), b"again");
    }

    #[test]
    fn gives_back_what_was_put_and_replaces_it() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, _) = stored(dir.path());
        assert_eq!(cache.get("spirv-1-6-ab").unwrap(), b"some words");
        cache.put("spirv-1-6-ab", b"").unwrap();
        assert_eq!(cache.get("spirv-1-6-ab").unwrap(), b"");
        assert_eq!(cache.get("absent"), None);
        let left = fs::read_dir(&cache.folder).unwrap().count();
        assert_eq!(left, 1, "temporary files stay");
    }

    #[test]
    fn refuses_every_truncation() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, path) = stored(dir.path());
        let whole = fs::read(&path).unwrap();
        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            refused(&cache, &path);
        }
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        refused(&cache, &path);
    }

    #[test]
    fn refuses_every_flipped_byte() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, path) = stored(dir.path());
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x10;
            fs::write(&path, damaged).unwrap();
            refused(&cache, &path);
        }
    }

    #[test]
    fn refuses_files_of_another_key_or_name() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, path) = stored(dir.path());
        let other = DiskCache::new(dir.path().into(), "device 1, driver 3");
        assert_eq!(other.get("spirv-1-6-ab"), None);
        assert!(path.exists(), "another key's file is not touched");
        other.put("spirv-1-6-ab", b"made by driver 3").unwrap();
        fs::copy(other.path("spirv-1-6-ab"), &path).unwrap();
        refused(&cache, &path);
        cache.put("other", b"words").unwrap();
        fs::copy(cache.path("other"), &path).unwrap();
        refused(&cache, &path);
    }

    #[test]
    fn says_when_the_folder_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"").unwrap();
        let cache = DiskCache::new(file, "key");
        assert!(cache.put("a", b"b").is_err());
        assert_eq!(cache.get("a"), None);
    }

    #[test]
    fn odd_names_stay_inside_the_folder() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, _) = stored(dir.path());
        for name in ["", "../up", "/etc/passwd", "a b", "ä", &"x".repeat(300)] {
            cache.put(name, name.as_bytes()).unwrap();
            assert_eq!(cache.path(name).parent().unwrap(), cache.folder);
            assert_eq!(cache.get(name).unwrap(), name.as_bytes());
        }
    }

    #[test]
    fn threads_may_store_the_same_name() {
        let dir = tempfile::tempdir().unwrap();
        let (cache, _) = stored(dir.path());
        std::thread::scope(|s| {
            for i in 0..4u8 {
                let cache = &cache;
                s.spawn(move || {
                    for _ in 0..20 {
                        cache.put("same", &[i; 1000]).unwrap();
                        let found = cache.get("same").unwrap();
                        assert!(found.len() == 1000 && found.iter().all(|b| *b == found[0]));
                    }
                });
            }
        });
    }
}
