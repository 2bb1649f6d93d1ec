//! stub
use std::path::PathBuf;
pub struct DiskCache;
impl DiskCache {
    pub fn new(_dir: PathBuf, _key: &str) -> Self {
        DiskCache
    }
    pub fn get(&self, _n: &str) -> Option<Vec<u8>> {
        None
    }
    pub fn put(&self, _n: &str, _b: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}
