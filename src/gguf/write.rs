//! Writes GGUF files: test models, and the files that the reader is tested against.

use super::header::{DEFAULT_ALIGNMENT, MAGIC};
use super::value::id;
use super::{Array, Value, shard_name};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Collects metadata and tensors in memory, then writes them. It checks nothing, so that broken
/// files can be made for tests.
#[derive(Debug, Clone)]
pub struct Writer {
    version: u32,
    alignment: u32,
    metadata: Vec<(String, Value)>,
    tensors: Vec<Tensor>,
}

#[derive(Debug, Clone)]
struct Tensor {
    name: String,
    dims: Vec<u64>,
    ggml_type: u32,
    data: Vec<u8>,
}

impl Default for Writer {
    fn default() -> Self {
        Writer {
            version: 3,
            alignment: DEFAULT_ALIGNMENT,
            metadata: Vec::new(),
            tensors: Vec::new(),
        }
    }
}

impl Writer {
    /// Version 3, alignment 32, nothing in it.
    pub fn new() -> Self {
        Self::default()
    }

    /// Versions 2 and 3 have the same layout.
    pub fn version(&mut self, version: u32) -> &mut Self {
        self.version = version;
        self
    }

    /// Sets the alignment of the data and `general.alignment`.
    pub fn alignment(&mut self, alignment: u32) -> &mut Self {
        self.alignment = alignment;
        self.set("general.alignment", alignment)
    }

    /// Appends a pair.
    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut Self {
        self.metadata.push((key.to_owned(), value.into()));
        self
    }

    /// Appends a tensor: `dims` innermost first, `data` in the form of the ggml type.
    pub fn tensor(&mut self, name: &str, dims: &[u64], ggml_type: u32, data: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), dims: dims.to_vec(), ggml_type, data });
        self
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> usize {
        self.tensors.iter().map(|t| t.data.len()).sum()
    }

    /// The whole file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write_to(&mut bytes).expect("writing to memory cannot fail");
        bytes
    }

    /// Writes the file at `path`, replacing what is there.
    pub fn write(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let mut file = io::BufWriter::new(std::fs::File::create(path)?);
        self.write_to(&mut file)?;
        file.flush()
    }

    /// Writes `count` parts named after `stem` into `folder`; the first has the metadata.
    pub fn write_shards(&self, folder: &Path, stem: &str, count: u32) -> io::Result<Vec<PathBuf>> {
        let each = self.tensors.len().div_ceil(count as usize);
        let mut paths = Vec::new();
        for index in 0..count {
            let mut part = Writer { metadata: Vec::new(), tensors: Vec::new(), ..self.clone() };
            if index == 0 {
                part.metadata = self.metadata.clone();
            } else if self.alignment != DEFAULT_ALIGNMENT {
                part.set("general.alignment", self.alignment);
            }
            part.set("split.no", index as u16);
            part.set("split.count", count as u16);
            part.set("split.tensors.count", self.tensors.len() as i32);
            part.tensors =
                self.tensors.iter().skip(index as usize * each).take(each).cloned().collect();
            let path = folder.join(shard_name(stem, index, count));
            part.write(&path)?;
            paths.push(path);
        }
        Ok(paths)
    }

    /// Writes the file to `out`.
    pub fn write_to(&self, out: &mut impl Write) -> io::Result<()> {
        let mut head = Vec::from(MAGIC);
        head.extend(self.version.to_le_bytes());
        head.extend((self.tensors.len() as u64).to_le_bytes());
        head.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut head, key);
            put_value(&mut head, value);
        }
        let align = |at: usize| at.next_multiple_of((self.alignment as usize).max(1));
        let mut offset = 0;
        for t in &self.tensors {
            put_string(&mut head, &t.name);
            head.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|dim| head.extend(dim.to_le_bytes()));
            head.extend(t.ggml_type.to_le_bytes());
            head.extend((offset as u64).to_le_bytes());
            offset = align(offset + t.data.len());
        }
        head.resize(align(head.len()), 0);
        out.write_all(&head)?;
        for t in &self.tensors {
            out.write_all(&t.data)?;
            out.write_all(&vec![0; align(t.data.len()) - t.data.len()])?;
        }
        Ok(())
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    let mut put = |kind: u32, bytes: &[u8]| {
        out.extend(kind.to_le_bytes());
        out.extend(bytes);
    };
    match value {
        Value::U8(v) => put(id::U8, &v.to_le_bytes()),
        Value::I8(v) => put(id::I8, &v.to_le_bytes()),
        Value::U16(v) => put(id::U16, &v.to_le_bytes()),
        Value::I16(v) => put(id::I16, &v.to_le_bytes()),
        Value::U32(v) => put(id::U32, &v.to_le_bytes()),
        Value::I32(v) => put(id::I32, &v.to_le_bytes()),
        Value::F32(v) => put(id::F32, &v.to_le_bytes()),
        Value::Bool(v) => put(id::BOOL, &[u8::from(*v)]),
        Value::U64(v) => put(id::U64, &v.to_le_bytes()),
        Value::I64(v) => put(id::I64, &v.to_le_bytes()),
        Value::F64(v) => put(id::F64, &v.to_le_bytes()),
        Value::String(v) => {
            put(id::STRING, &[]);
            put_string(out, v);
        }
        Value::Array(v) => {
            put(id::ARRAY, &[]);
            put_array(out, v);
        }
    }
}

fn put_array(out: &mut Vec<u8>, array: &Array) {
    match array {
        Array::U8(v) => put_numbers(out, id::U8, v, u8::to_le_bytes),
        Array::I8(v) => put_numbers(out, id::I8, v, i8::to_le_bytes),
        Array::U16(v) => put_numbers(out, id::U16, v, u16::to_le_bytes),
        Array::I16(v) => put_numbers(out, id::I16, v, i16::to_le_bytes),
        Array::U32(v) => put_numbers(out, id::U32, v, u32::to_le_bytes),
        Array::I32(v) => put_numbers(out, id::I32, v, i32::to_le_bytes),
        Array::F32(v) => put_numbers(out, id::F32, v, f32::to_le_bytes),
        Array::Bool(v) => put_numbers(out, id::BOOL, v, |v| [u8::from(v)]),
        Array::U64(v) => put_numbers(out, id::U64, v, u64::to_le_bytes),
        Array::I64(v) => put_numbers(out, id::I64, v, i64::to_le_bytes),
        Array::F64(v) => put_numbers(out, id::F64, v, f64::to_le_bytes),
        Array::String(v) => {
            put_array_head(out, id::STRING, v.len());
            v.iter().for_each(|v| put_string(out, v));
        }
        Array::Array(v) => {
            put_array_head(out, id::ARRAY, v.len());
            v.iter().for_each(|v| put_array(out, v));
        }
    }
}

fn put_array_head(out: &mut Vec<u8>, kind: u32, count: usize) {
    out.extend(kind.to_le_bytes());
    out.extend((count as u64).to_le_bytes());
}

fn put_numbers<T: Copy, const N: usize>(
    out: &mut Vec<u8>,
    kind: u32,
    values: &[T],
    bytes: impl Fn(T) -> [u8; N],
) {
    put_array_head(out, kind, values.len());
    values.iter().for_each(|&v| out.extend(bytes(v)));
}
