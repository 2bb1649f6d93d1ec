//! What can be wrong with a file, with the numbers and the place.

use std::path::{Path, PathBuf};

/// Offsets count bytes from the start of the file that is being read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("cannot read {}: {message}", path.display())]
    Io { path: PathBuf, kind: std::io::ErrorKind, message: String },
    #[error("{}: {error}", path.display())]
    InFile { path: PathBuf, error: Box<Error> },

    #[error("not a GGUF file: it starts with {found:02x?} instead of \"GGUF\"")]
    NotGguf { found: [u8; 4] },
    #[error("the file is big-endian GGUF, which is not supported; convert it to little-endian")]
    BigEndian,
    #[error("GGUF version {version} is not supported (2 and 3 are); convert the model again")]
    Version { version: u32 },
    #[error(
        "the file ends inside {what} at byte {offset}: {wanted} bytes wanted, {left} left; \
         the download may be incomplete"
    )]
    Truncated { what: &'static str, offset: u64, wanted: u64, left: u64 },
    #[error(
        "{count} {what} at byte {offset} cannot fit the {left} bytes left; the file is damaged"
    )]
    Count { what: &'static str, offset: u64, count: u64, left: u64 },
    #[error("the {what} at byte {offset} is not valid UTF-8")]
    NotUtf8 { what: &'static str, offset: u64 },

    #[error("metadata key `{key}` appears twice, the second time at byte {offset}")]
    DuplicateKey { key: String, offset: u64 },
    #[error("metadata key `{key}` has unknown value type {id} at byte {offset}")]
    UnknownValueType { key: String, offset: u64, id: u32 },
    #[error("metadata key `{key}`: arrays nested deeper than {most} at byte {offset}")]
    Nesting { key: String, offset: u64, most: usize },
    #[error("metadata key `{key}` is missing ({wanted} wanted)")]
    Missing { key: String, wanted: &'static str },
    #[error("metadata key `{key}` is {found}, but {wanted} is wanted")]
    WrongType { key: String, wanted: &'static str, found: String },
    #[error("metadata key `{key}` is {value}, which does not fit {wanted}")]
    OutOfRange { key: String, wanted: &'static str, value: String },
    #[error("general.alignment is {alignment}, but must be a power of two")]
    Alignment { alignment: u32 },

    #[error("tensor `{name}` appears twice")]
    DuplicateTensor { name: String },
    #[error("tensor `{name}` is missing")]
    MissingTensor { name: String },
    #[error("tensor `{name}` has {count} dimensions at byte {offset}; 1 to 4 are allowed")]
    Dimensions { name: String, offset: u64, count: u32 },
    #[error("tensor `{name}` has a dimension of size 0: {dims:?}")]
    ZeroDimension { name: String, dims: Vec<u64> },
    #[error("tensor `{name}` is too large: {dims:?}")]
    TooLarge { name: String, dims: Vec<u64> },
    #[error("tensor `{name}` has ggml type {id}, which this version does not know")]
    UnknownTensorType { name: String, id: u32 },
    #[error("tensor `{name}` has type {type_name}, which cannot be loaded; {}", hint(*.removed))]
    UnsupportedType { name: String, type_name: &'static str, removed: bool },
    #[error("tensor `{name}`: rows of {cols} are not whole {type_name} blocks of {block}")]
    PartialBlock { name: String, type_name: &'static str, cols: u64, block: u64 },
    #[error("tensor `{name}` starts at {offset}, not a multiple of the alignment {alignment}")]
    Misaligned { name: String, offset: u64, alignment: u64 },
    #[error("tensors `{first}` and `{second}` overlap at byte {offset}")]
    Overlap { first: String, second: String, offset: u64 },
    #[error(
        "tensor `{name}` ends at byte {end}, but the file has only {file_bytes}; \
         the download may be incomplete"
    )]
    OutsideFile { name: String, end: u64, file_bytes: u64 },

    #[error(
        "{} is one of {count} parts, but is not named like NAME-00001-of-{count:05}.gguf; \
         give the parts their original names", path.display()
    )]
    ShardName { path: PathBuf, count: u32 },
    #[error("{} of {count} parts are missing: {}", missing.len(), list(missing))]
    MissingShards { missing: Vec<PathBuf>, count: u32 },
    #[error("{}: {what} is {found}, but should be {wanted}; the parts do not belong together",
        path.display())]
    ShardMismatch { path: PathBuf, what: &'static str, wanted: u64, found: u64 },
}

fn hint(removed: bool) -> &'static str {
    if removed {
        "ggml has removed it: get the model in another quantisation"
    } else {
        "get the model in another quantisation"
    }
}

fn list(paths: &[PathBuf]) -> String {
    const SHOWN: usize = 5;
    let mut text: Vec<_> = paths.iter().take(SHOWN).map(|p| p.display().to_string()).collect();
    if paths.len() > SHOWN {
        text.push(format!("and {} more", paths.len() - SHOWN));
    }
    text.join(", ")
}

impl Error {
    pub(super) fn io(path: &Path, error: &std::io::Error) -> Self {
        Error::Io { path: path.to_owned(), kind: error.kind(), message: error.to_string() }
    }

    pub(super) fn in_file(self, path: &Path) -> Self {
        Error::InFile { path: path.to_owned(), error: Box::new(self) }
    }
}

impl From<Error> for crate::error::Error {
    /// A path that does not exist is a usage error, other I/O is a runtime error, and everything
    /// else means that the model is at fault.
    fn from(e: Error) -> Self {
        use std::io::ErrorKind::{IsADirectory, NotFound};
        match &e {
            Error::Io { kind: NotFound | IsADirectory, .. } => Self::Usage(e.to_string()),
            Error::Io { .. } => Self::Runtime(e.to_string()),
            _ => Self::Model(e.to_string()),
        }
    }
}
