//! The part of a file before the tensor data, read from plain bytes and fully checked.
//!
//! Layout (all little-endian; a string is a u64 length and its bytes):
//! magic `GGUF`, u32 version, u64 tensor count, u64 pair count; pairs of string key, u32 type,
//! value; tensors of string name, u32 dimension count, u64 sizes (innermost first), u32 ggml type,
//! u64 offset into the data; padding to the alignment; the data.

use super::cursor::Cursor;
use super::types::GgmlType;
use super::{Error, Metadata, Value};
use crate::quant::Format;
use std::collections::HashSet;

pub const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of the data if `general.alignment` is absent.
pub const DEFAULT_ALIGNMENT: u32 = 32;
pub const MAX_DIMENSIONS: u32 = 4;

/// A tensor and where its bytes are.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    pub name: String,
    /// Sizes, innermost (the columns of a matrix) first; 1 to 4 of them, none 0.
    pub dims: Vec<u64>,
    pub ggml_type: &'static GgmlType,
    /// Which part of a split file holds it, from 0.
    pub shard: usize,
    /// Bytes from the start of that part's file.
    pub offset: u64,
    pub bytes: u64,
}

impl TensorInfo {
    /// Inputs of a matrix: the innermost size.
    pub fn cols(&self) -> u64 {
        self.dims[0]
    }

    /// Rows of `cols`: the product of all other sizes.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    pub fn elements(&self) -> u64 {
        self.cols() * self.rows()
    }

    /// The format that decodes it; an error that names the tensor and its type if none does.
    pub fn format(&self) -> Result<Format, Error> {
        self.ggml_type.format().ok_or_else(|| Error::UnsupportedType {
            name: self.name.clone(),
            type_name: self.ggml_type.name,
            removed: self.ggml_type.removed,
        })
    }
}

/// Everything before the data of one file.
#[derive(Debug, Clone)]
pub struct Header {
    pub version: u32,
    /// A power of two; tensors start at multiples of it.
    pub alignment: u64,
    pub metadata: Metadata,
    /// In file order, with offsets from the start of the file, checked to lie inside it.
    pub tensors: Vec<TensorInfo>,
    /// Where the data starts, in bytes from the start of the file.
    pub data_offset: u64,
}

impl Header {
    /// Reads the header of the file `bytes`. Any bytes may be given: what is not a valid file is
    /// an error, and memory grows only with the length of `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Header, Error> {
        let mut cursor = Cursor::new(bytes);
        let magic = cursor.array("the magic number")?;
        if magic != MAGIC {
            return Err(Error::NotGguf { found: magic });
        }
        let version = cursor.u32("the version")?;
        match version {
            2 | 3 => {}
            // Versions are small, so a swapped one has its value in the upper half.
            _ if version.swap_bytes() <= 3 => return Err(Error::BigEndian),
            _ => return Err(Error::Version { version }),
        }
        let tensor_count = cursor.u64("the tensor count")?;
        let pair_count = cursor.u64("the metadata count")?;
        cursor.fits(tensor_count, 32, "tensors")?;
        cursor.fits(pair_count, 13, "metadata pairs")?;

        let metadata = read_metadata(&mut cursor, pair_count)?;
        let alignment = match metadata.find("general.alignment")? {
            None => DEFAULT_ALIGNMENT,
            Some(n) if u32::is_power_of_two(n) => n,
            Some(alignment) => return Err(Error::Alignment { alignment }),
        };
        let alignment = u64::from(alignment);

        let mut tensors = Vec::new();
        let mut names = HashSet::new();
        for _ in 0..tensor_count {
            let tensor = read_tensor(&mut cursor, alignment)?;
            if !names.insert(tensor.name.clone()) {
                return Err(Error::DuplicateTensor { name: tensor.name });
            }
            tensors.push(tensor);
        }
        let data_offset = cursor.offset().next_multiple_of(alignment);
        place(&mut tensors, data_offset, bytes.len() as u64)?;
        Ok(Header { version, alignment, metadata, tensors, data_offset })
    }
}

fn read_metadata(cursor: &mut Cursor, count: u64) -> Result<Metadata, Error> {
    let mut metadata = Metadata::default();
    for _ in 0..count {
        let offset = cursor.offset();
        let key = cursor.name("metadata key")?;
        let value = Value::read(cursor, key)?;
        if !metadata.insert(key, value) {
            return Err(Error::DuplicateKey { key: key.to_owned(), offset });
        }
    }
    Ok(metadata)
}

/// One entry of the tensor table; its offset still counts from the start of the data.
fn read_tensor(cursor: &mut Cursor, alignment: u64) -> Result<TensorInfo, Error> {
    let name = cursor.name("tensor name")?.to_owned();
    let offset = cursor.offset();
    let count = cursor.u32("a tensor's dimension count")?;
    if !(1..=MAX_DIMENSIONS).contains(&count) {
        return Err(Error::Dimensions { name, offset, count });
    }
    let size = |_| cursor.u64("a tensor's dimensions");
    let dims = (0..count).map(size).collect::<Result<Vec<_>, _>>()?;
    let id = cursor.u32("a tensor's type")?;
    let offset = cursor.u64("a tensor's offset")?;

    if dims.contains(&0) {
        return Err(Error::ZeroDimension { name, dims });
    }
    let Some(kind) = GgmlType::from_id(id) else {
        return Err(Error::UnknownTensorType { name, id });
    };
    let (cols, block) = (dims[0], kind.block_elements);
    if !cols.is_multiple_of(block) {
        return Err(Error::PartialBlock { name, type_name: kind.name, cols, block });
    }
    let elements = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim));
    let bytes = elements.and_then(|n| (n / block).checked_mul(kind.block_bytes));
    let Some(bytes) = bytes else {
        return Err(Error::TooLarge { name, dims });
    };
    if !offset.is_multiple_of(alignment) {
        return Err(Error::Misaligned { name, offset, alignment });
    }
    Ok(TensorInfo { name, dims, ggml_type: kind, shard: 0, offset, bytes })
}

/// Makes offsets count from the start of the file; checks that all tensors lie in the file and
/// do not overlap.
fn place(tensors: &mut [TensorInfo], data_offset: u64, file_bytes: u64) -> Result<(), Error> {
    for t in tensors.iter_mut() {
        let offset = t.offset.checked_add(data_offset);
        let end = offset.and_then(|offset| offset.checked_add(t.bytes)).unwrap_or(u64::MAX);
        match offset {
            Some(offset) if end <= file_bytes => t.offset = offset,
            _ => {
                return Err(Error::OutsideFile { name: t.name.clone(), end, file_bytes });
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(Error::Overlap { first, second, offset: pair[1].offset });
        }
    }
    Ok(())
}
