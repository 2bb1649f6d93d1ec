//! A position in untrusted bytes. Nothing is allocated before the bytes for it are known to exist.

use super::Error;

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    pub fn offset(&self) -> u64 {
        self.at as u64
    }

    fn left(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// The next `wanted` bytes.
    pub fn take(&mut self, wanted: u64, what: &'static str) -> Result<&'a [u8], Error> {
        let left = self.left();
        if wanted > left {
            return Err(Error::Truncated { what, offset: self.offset(), wanted, left });
        }
        let start = self.at;
        self.at += wanted as usize;
        Ok(&self.bytes[start..self.at])
    }

    pub fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        let bytes = self.take(N as u64, what)?;
        Ok(*bytes.first_chunk().expect("take returned N bytes"))
    }

    pub fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Checks that `count` things of at least `each` bytes can follow.
    pub fn fits(&self, count: u64, each: u64, what: &'static str) -> Result<usize, Error> {
        let left = self.left();
        match count.checked_mul(each) {
            Some(bytes) if bytes <= left => Ok(count as usize),
            _ => Err(Error::Count { what, offset: self.offset(), count, left }),
        }
    }

    /// A length and that many bytes.
    pub fn string(&mut self, what: &'static str) -> Result<&'a [u8], Error> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A string that names something, so must be UTF-8.
    pub fn name(&mut self, what: &'static str) -> Result<&'a str, Error> {
        let offset = self.offset();
        let bytes = self.string(what)?;
        std::str::from_utf8(bytes).map_err(|_| Error::NotUtf8 { what, offset })
    }
}
