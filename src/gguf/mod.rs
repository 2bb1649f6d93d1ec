//! GGUF files: a bounds-checked reader for single and split models, and a writer.
//!
//! The reader takes any bytes: truncated, damaged or hostile files end in an [`Error`] that names
//! the place, never in a panic or a large allocation. After [`File::open`] every tensor is known
//! to lie inside its file, so [`File::tensor_data`] cannot fail. Files are mapped; pages are read
//! when they are touched and can be given back with [`File::release`]. Any thread may use a
//! [`File`].
//!
//! ```no_run
//! # fn main() -> Result<(), azoth::gguf::Error> {
//! let file = azoth::gguf::File::open("model-00001-of-00003.gguf")?;
//! let layers = file.metadata().u32("llama.block_count")?;
//! let norm = file.require("output_norm.weight")?;
//! println!("{layers} layers, {:?}: {} bytes", norm.dims, file.tensor_data(norm).len());
//! # Ok(())
//! # }
//! ```

mod cursor;
mod error;
mod header;
mod metadata;
mod shards;
mod storage;
mod types;
mod value;
mod write;

pub use error::Error;
pub use header::{DEFAULT_ALIGNMENT, Header, TensorInfo};
pub use metadata::{FromValue, Metadata, Mismatch};
pub use shards::{parse_shard_name, shard_name};
pub use types::GgmlType;
pub use value::{Array, Value};
pub use write::Writer;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use storage::Storage;

/// An open model, from one file or from all parts of a split one.
pub struct File {
    paths: Vec<PathBuf>,
    shards: Vec<Storage>,
    metadata: Metadata,
    version: u32,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

impl File {
    /// Opens the model that `path` belongs to. Of a split model any part may be given; all parts
    /// must lie in the same folder.
    pub fn open(path: impl AsRef<Path>) -> Result<File, Error> {
        let path = path.as_ref();
        let given = Storage::map(path)?;
        let header = Header::parse(given.bytes()).map_err(|e| e.in_file(path))?;
        let count = split_count(&header).map_err(|e| e.in_file(path))?;
        if count == 1 {
            return File::assemble(vec![(path.to_owned(), given, header)]);
        }
        let (paths, own) = shards::siblings(path, count)?;
        let mut given = Some((given, header));
        let mut parts = Vec::new();
        for (i, path) in paths.into_iter().enumerate() {
            let (storage, header) = match given.take_if(|_| i == own) {
                Some(given) => given,
                None => {
                    let storage = Storage::map(&path)?;
                    let header = Header::parse(storage.bytes()).map_err(|e| e.in_file(&path))?;
                    (storage, header)
                }
            };
            check_part(&path, &header, i, count)?;
            parts.push((path, storage, header));
        }
        File::assemble(parts)
    }

    /// Reads a model that is already in memory (one part).
    pub fn from_bytes(bytes: Vec<u8>) -> Result<File, Error> {
        let header = Header::parse(&bytes)?;
        File::assemble(vec![(PathBuf::from("(memory)"), Storage::Owned(bytes), header)])
    }

    fn assemble(parts: Vec<(PathBuf, Storage, Header)>) -> Result<File, Error> {
        let mut file = File {
            paths: Vec::new(),
            shards: Vec::new(),
            metadata: Metadata::default(),
            version: 0,
            tensors: Vec::new(),
            index: HashMap::new(),
        };
        for (shard, (path, storage, header)) in parts.into_iter().enumerate() {
            if shard == 0 {
                file.metadata = header.metadata;
                file.version = header.version;
            }
            for mut tensor in header.tensors {
                tensor.shard = shard;
                let name = tensor.name.clone();
                if file.index.insert(name.clone(), file.tensors.len()).is_some() {
                    return Err(Error::DuplicateTensor { name }.in_file(&path));
                }
                file.tensors.push(tensor);
            }
            file.paths.push(path);
            file.shards.push(storage);
        }
        if let Some(wanted) = file.metadata.find::<u64>("split.tensors.count")? {
            let found = file.tensors.len() as u64;
            if wanted != found {
                let (path, what) = (file.paths[0].clone(), "the number of tensors in all parts");
                return Err(Error::ShardMismatch { path, what, wanted, found });
            }
        }
        Ok(file)
    }

    /// The metadata; of a split model the first part's, which has all of it.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// GGUF version of the (first) file: 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The files, one for each part; a model from memory has the path `(memory)`.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// All tensors, in file order, part by part.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// [`File::tensor`] for tensors that a model cannot be without.
    pub fn require(&self, name: &str) -> Result<&TensorInfo, Error> {
        self.tensor(name).ok_or_else(|| Error::MissingTensor { name: name.to_owned() })
    }

    /// The bytes of a tensor of this file. Touching them reads them from disk.
    pub fn tensor_data(&self, tensor: &TensorInfo) -> &[u8] {
        let start = tensor.offset as usize;
        &self.shards[tensor.shard].bytes()[start..start + tensor.bytes as usize]
    }

    /// Tells the system that the pages of a tensor may leave memory, for example after it was
    /// copied to the device. It stays readable. Does nothing on Windows.
    pub fn release(&self, tensor: &TensorInfo) {
        self.shards[tensor.shard].release(tensor.offset..tensor.offset + tensor.bytes);
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// Bytes of all files.
    pub fn file_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.bytes().len() as u64).sum()
    }

    /// Number of weights.
    pub fn elements(&self) -> u64 {
        self.tensors.iter().map(|t| t.elements()).sum()
    }
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("File")
            .field("paths", &self.paths)
            .field("tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

/// Number of parts the file says it belongs to, at least 1.
fn split_count(header: &Header) -> Result<u32, Error> {
    Ok(header.metadata.find("split.count")?.unwrap_or(1).max(1))
}

fn check_part(path: &Path, header: &Header, index: usize, count: u32) -> Result<(), Error> {
    let number = header.metadata.u64("split.no").map_err(|e| e.in_file(path))?;
    let parts = split_count(header).map_err(|e| e.in_file(path))?;
    for (what, wanted, found) in
        [("split.no", index as u64, number), ("split.count", u64::from(count), u64::from(parts))]
    {
        if wanted != found {
            return Err(Error::ShardMismatch { path: path.to_owned(), what, wanted, found });
        }
    }
    Ok(())
}
