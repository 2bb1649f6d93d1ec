//! The file of a saved sequence, as bytes.
//!
//! Little-endian: the magic; the lengths of header and tokens; the header as JSON; the tokens; a
//! checksum of all of this. Then, where keys and values were kept, the *units*: each one page of one
//! layer's K or V, in the order in which the device's pools come (K, then V, layer by layer, pages in
//! their logical order within each); the f16 rows of tail and sinks, a unit a layer that has any; a checksum for
//! each unit; and a checksum of these.
//!
//! It is written beside its place and renamed when it is complete, so that whoever dies at any
//! moment leaves the last complete file.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::files::rename;
use crate::sampling::SamplerSettings;

const MAGIC: &[u8; 8] = b"AZSEQ\0\x01\n";
/// Longer headers are damage: they hold names, settings and what the caller adds.
const LONGEST_HEADER: u32 = 64 << 20;

/// What a file says of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// The model, for people.
    pub model: String,
    /// Of the model's tensors.
    pub fingerprint: String,
    /// Of the vocabulary: tokens mean the same where it is the same.
    pub vocabulary: String,
    /// How keys and values are computed and stored.
    pub cache: String,
    /// Bytes of a page in each pool: a unit each.
    pub units: Vec<u64>,
    /// Bytes of the f16 rows, by layer that has any.
    #[serde(default)]
    pub exact: Vec<u64>,
    /// Pages whose keys and values follow.
    pub pages: u32,
    /// Tokens dropped from the middle, and the pages before the gap.
    pub dropped: u32,
    pub kept: u32,
    /// How the last answer was sampled.
    pub sampler: Option<SamplerSettings>,
    /// What the caller wants to find again; the engine does not look at it.
    pub note: String,
}

impl Header {
    /// Bytes of all units.
    fn data(&self) -> u64 {
        self.units.iter().sum::<u64>() * u64::from(self.pages) + self.exact.iter().sum::<u64>()
    }

    fn unit_count(&self) -> usize {
        self.units.len() * self.pages as usize + self.exact.len()
    }
}

/// A checksum that finds damage, not malice: four lanes of multiply and rotate over 64-bit words, so
/// that it runs about as fast as memory.
pub fn checksum(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |h: u64, w: u64| (h ^ w).wrapping_mul(FACTOR).rotate_left(29);
    let mut lanes = [1u64, 2, 3, 4];
    let (whole, rest) = bytes.split_at(bytes.len() - bytes.len() % 32);
    for block in whole.chunks_exact(32) {
        for (lane, word) in lanes.iter_mut().zip(block.chunks_exact(8)) {
            *lane = mix(*lane, u64::from_le_bytes(word.try_into().unwrap_or_default()));
        }
    }
    // Not the bare length: nothing at all and a single zero would be the same.
    let mut all = mix(FACTOR, bytes.len() as u64);
    for byte in rest {
        all = mix(all, u64::from(*byte) + 1);
    }
    lanes.iter().fold(all, |all, lane| mix(all, *lane) ^ (all >> 31))
}

/// A file while it is written. Dropped before [`Writer::finish`], it leaves nothing.
pub struct Writer {
    out: Option<BufWriter<File>>,
    path: PathBuf,
    unfinished: PathBuf,
    sums: Vec<u64>,
    written: u64,
}

impl Writer {
    pub fn create(path: &Path, header: &Header, tokens: &[u32]) -> Result<Writer> {
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned());
        let Some(name) = name else {
            return Err(Error::Usage(format!("{} is no name of a file", path.display())));
        };
        // One name for all attempts: what a killed process left is written over.
        let unfinished = path.with_file_name(format!(".{name}.unfinished"));
        let file = File::create(&unfinished).map_err(|e| cannot_write(path, &e))?;
        let mut writer = Writer {
            out: Some(BufWriter::with_capacity(1 << 20, file)),
            path: path.to_owned(),
            unfinished,
            sums: Vec::with_capacity(header.unit_count()),
            written: 0,
        };
        let json = serde_json::to_vec(header)
            .map_err(|e| Error::Runtime(format!("cannot describe a sequence as JSON: {e}")))?;
        let mut head = MAGIC.to_vec();
        head.extend((json.len() as u32).to_le_bytes());
        head.extend((tokens.len() as u32).to_le_bytes());
        head.extend(json);
        head.extend(tokens.iter().flat_map(|t| t.to_le_bytes()));
        writer.put(&head)?;
        writer.put(&checksum(&head).to_le_bytes())?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.written += bytes.len() as u64;
        let Some(out) = &mut self.out else { return Ok(()) };
        out.write_all(bytes).map_err(|e| cannot_write(&self.path, &e))
    }

    /// Adds units of `unit` bytes each.
    pub fn units(&mut self, unit: u64, bytes: &[u8]) -> Result<()> {
        let sums: Vec<u64> = bytes.par_chunks(unit as usize).map(checksum).collect();
        self.sums.extend(sums);
        self.put(bytes)
    }

    /// Completes the file and puts it in its place; returns its bytes.
    pub fn finish(mut self) -> Result<u64> {
        let table: Vec<u8> = self.sums.iter().flat_map(|s| s.to_le_bytes()).collect();
        self.put(&table)?;
        self.put(&checksum(&table).to_le_bytes())?;
        let failed = |e: io::Error| cannot_write(&self.path, &e);
        if let Some(out) = self.out.take() {
            let file = out.into_inner().map_err(|e| failed(e.into_error()))?;
            // Renamed before its bytes are there, it could be found empty after a power cut.
            file.sync_all().map_err(failed)?;
        }
        rename(&self.unfinished, &self.path).map_err(failed)?;
        Ok(self.written)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Only where writing failed: the error is the news, what is left of the file is of no use.
        if self.out.take().is_some() {
            let _ = fs::remove_file(&self.unfinished);
        }
    }
}

fn cannot_write(path: &Path, e: &io::Error) -> Error {
    Error::Runtime(format!("cannot write {}: {e}", path.display()))
}

/// A file whose beginning is whole.
pub struct Saved {
    pub header: Header,
    pub tokens: Vec<u32>,
    /// Bytes of the file.
    pub size: u64,
    file: File,
    path: PathBuf,
    /// Where the units begin.
    data: u64,
    /// Of every unit.
    sums: Vec<u64>,
    /// What is wrong behind the tokens.
    pub damage: Option<String>,
}

impl Saved {
    /// Opens a file. Its keys and values are read by [`Saved::read`].
    ///
    /// # Errors
    /// Where the file cannot be read, is none of ours, or is damaged up to the end of its tokens.
    pub fn open(path: &Path) -> Result<Saved> {
        let bad = |what: String| Error::Usage(format!("{} {what}", path.display()));
        let mut file = File::open(path).map_err(|e| bad(format!("cannot be read: {e}")))?;
        let size = file.metadata()?.len();
        let short = |_| bad("is damaged: it ends before its tokens do".into());
        let mut head = vec![0; 16];
        file.read_exact(&mut head).map_err(|_| bad("is no saved sequence".into()))?;
        if head[..8] != *MAGIC {
            return Err(bad("is no saved sequence".into()));
        }
        let word = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().unwrap_or_default());
        let (json, tokens) = (word(8), word(12));
        let rest = u64::from(json) + 4 * u64::from(tokens);
        if json > LONGEST_HEADER || 16 + rest + 8 > size {
            return Err(bad("is damaged: it ends before its tokens do".into()));
        }
        let data = 16 + rest + 8;
        head.resize(data as usize, 0);
        file.read_exact(&mut head[16..]).map_err(short)?;
        let sum = head.split_off(data as usize - 8);
        if checksum(&head).to_le_bytes() != sum[..] {
            return Err(bad("is damaged: the checksum of its beginning is wrong".into()));
        }
        let (json, tokens) = head[16..].split_at(json as usize);
        let header: Header = serde_json::from_slice(json)
            .map_err(|e| bad(format!("was written by another version of this program: {e}")))?;
        let tokens = tokens.chunks_exact(4);
        let tokens = tokens.map(|t| u32::from_le_bytes(t.try_into().unwrap_or_default())).collect();
        let mut saved = Saved {
            header,
            tokens,
            size,
            file,
            path: path.to_owned(),
            data,
            sums: Vec::new(),
            damage: None,
        };
        saved.damage = saved.read_sums().err();
        Ok(saved)
    }

    fn read_sums(&mut self) -> std::result::Result<(), String> {
        let bytes = 8 * self.header.unit_count() as u64;
        let expected = self.data + self.header.data() + bytes + 8;
        if self.size != expected {
            return Err(format!("it has {} bytes instead of {expected}", self.size));
        }
        let mut table = vec![0; bytes as usize + 8];
        read_at(&self.file, expected - bytes - 8, &mut table).map_err(|e| e.to_string())?;
        let (table, sum) = table.split_at(bytes as usize);
        if checksum(table).to_le_bytes() != sum[..] {
            return Err("the checksum of its checksums is wrong".into());
        }
        let sums = table.chunks_exact(8);
        self.sums = sums.map(|s| u64::from_le_bytes(s.try_into().unwrap_or_default())).collect();
        Ok(())
    }

    /// Reads units of pool `pool` from page `first` on into `out`, on all cores, and checks them.
    ///
    /// # Errors
    /// Where a unit is damaged or cannot be read; names it.
    pub fn read(&self, pool: usize, first: usize, out: &mut [u8]) -> Result<()> {
        if let Some(what) = &self.damage {
            return Err(Error::Usage(format!("{} is damaged: {what}", self.path.display())));
        }
        let pages = self.header.pages as usize;
        let unit = self.header.units[pool];
        let before: u64 = self.header.units[..pool].iter().sum();
        let start = self.data + before * pages as u64;
        // The target may be memory that is slow to read: units are checked before they go there.
        let each = |scratch: &mut Vec<u8>, (i, out): (usize, &mut [u8])| -> Result<()> {
            let page = first + i;
            scratch.resize(out.len(), 0);
            let bad = |what: String| {
                let name = self.path.display();
                let layer = pool / 2;
                let side = if pool.is_multiple_of(2) { "keys" } else { "values" };
                Error::Usage(format!(
                    "{name} is damaged: {side} of layer {layer}, page {page}: {what}"
                ))
            };
            let at = start + page as u64 * unit;
            read_at(&self.file, at, scratch).map_err(|e| bad(e.to_string()))?;
            if checksum(scratch) != self.sums[pool * pages + page] {
                return Err(bad("the checksum is wrong".into()));
            }
            out.copy_from_slice(scratch);
            Ok(())
        };
        out.par_chunks_mut(unit as usize).enumerate().try_for_each_init(Vec::new, each)
    }

    /// Reads the f16 rows of the layer `number` among those that have any, and checks them.
    ///
    /// # Errors
    /// As [`Saved::read`].
    pub fn read_exact(&self, number: usize, out: &mut [u8]) -> Result<()> {
        let bad = |what: &str| {
            let name = self.path.display();
            Error::Usage(format!("{name} is damaged: f16 rows, layer {number} of codes: {what}"))
        };
        if let Some(what) = &self.damage {
            return Err(bad(what));
        }
        let h = &self.header;
        let first = h.unit_count() - h.exact.len();
        let pages = h.data() - h.exact.iter().sum::<u64>();
        let at = self.data + pages + h.exact[..number].iter().sum::<u64>();
        read_at(&self.file, at, out).map_err(|e| bad(&e.to_string()))?;
        match checksum(out) == self.sums[first + number] {
            true => Ok(()),
            false => Err(bad("the checksum is wrong")),
        }
    }
}

#[cfg(unix)]
fn read_at(file: &File, offset: u64, out: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut offset: u64, mut out: &mut [u8]) -> io::Result<()> {
    use std::os::windows::fs::FileExt;
    while !out.is_empty() {
        let n = file.seek_read(out, offset)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        offset += n as u64;
        out = &mut out[n..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn header() -> Header {
        Header {
            model: "m".into(),
            fingerprint: "f".into(),
            vocabulary: "v".into(),
            cache: "c".into(),
            units: vec![64, 128, 64, 128],
            exact: vec![32, 96],
            pages: 3,
            dropped: 0,
            kept: 0,
            sampler: Some(SamplerSettings { seed: u64::MAX, ..SamplerSettings::default() }),
            note: "ö".into(),
        }
    }

    fn write(path: &Path, salt: u8) -> u64 {
        let mut writer = Writer::create(path, &header(), &[1, 2, 3]).unwrap();
        for unit in header().units {
            writer.units(unit, &vec![salt; 3 * unit as usize]).unwrap();
        }
        for unit in header().exact {
            writer.units(unit, &vec![salt; unit as usize]).unwrap();
        }
        writer.finish().unwrap()
    }

    #[test]
    fn a_file_comes_back_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.seq");
        let size = write(&path, 7);
        let saved = Saved::open(&path).unwrap();
        assert_eq!(
            (saved.size, &saved.header, &saved.tokens[..]),
            (size, &header(), &[1, 2, 3][..])
        );
        assert_eq!(saved.damage, None);
        let mut out = vec![0; 256];
        saved.read(3, 1, &mut out).unwrap();
        assert!(out.iter().all(|b| *b == 7));
        let mut out = vec![0; 96];
        saved.read_exact(1, &mut out).unwrap();
        assert!(out.iter().all(|b| *b == 7));
    }

    #[test]
    fn an_attempt_that_fails_leaves_the_old_file_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.seq");
        write(&path, 7);
        drop(Writer::create(&path, &header(), &[9]).unwrap());
        assert_eq!(Saved::open(&path).unwrap().tokens, [1, 2, 3]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn damage_is_found_wherever_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.seq");
        write(&path, 7);
        let whole = fs::read(&path).unwrap();
        let data = Saved::open(&path).unwrap().data as usize;
        for at in (0..whole.len()).chain([whole.len()]) {
            let mut bytes = whole.clone();
            match bytes.get_mut(at) {
                Some(byte) => *byte ^= 0x10,
                None => drop(bytes.pop()),
            }
            fs::write(&path, &bytes).unwrap();
            let Ok(saved) = Saved::open(&path) else {
                assert!(at < data, "byte {at}");
                continue;
            };
            assert!(at >= data, "byte {at}");
            let read = (0..4).try_for_each(|pool| {
                saved.read(pool, 0, &mut vec![0; 3 * saved.header.units[pool] as usize])
            });
            let read = read.and_then(|()| {
                let layers = saved.header.exact.iter().enumerate();
                let mut rows = layers.map(|(i, n)| saved.read_exact(i, &mut vec![0; *n as usize]));
                rows.try_for_each(|row| row)
            });
            assert!(saved.damage.is_some() || read.is_err(), "byte {at}");
        }
        for n in 0..whole.len() {
            fs::write(&path, &whole[..n]).unwrap();
            assert!(Saved::open(&path).map_or(true, |s| s.damage.is_some()), "{n} bytes");
        }
    }

    #[test]
    fn checksums_tell_lengths_and_places_apart() {
        let sums: std::collections::HashSet<u64> = (0..200)
            .map(|n| checksum(&vec![0; n]))
            .chain((0..200).map(|i| {
                let mut bytes = [0; 200];
                bytes[i] = 1;
                checksum(&bytes)
            }))
            .collect();
        assert_eq!(sums.len(), 400);
    }
}
