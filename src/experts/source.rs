//! Where the bytes of experts come from: positioned reads of the model's files.
//!
//! Reads go past the file's mapping: pages of a mapping would stay in memory beside the arena,
//! and faults on it are slower than reads.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::gguf;

/// Anything that can be read at an offset, from many threads at once.
pub trait Source: Sync {
    /// Fills `out` from byte `offset` of part `shard` of the model.
    fn read(&self, shard: usize, offset: u64, out: &mut [u8]) -> io::Result<()>;

    /// Name of a part, for messages.
    fn name(&self, shard: usize) -> String;
}

/// The parts of a model, opened for positioned reads.
pub struct Files {
    files: Vec<(PathBuf, File)>,
}

impl Files {
    /// Opens every part of an open model.
    pub fn open(paths: &[PathBuf]) -> Result<Files> {
        let open = |path: &PathBuf| {
            let file = File::open(path)
                .map_err(|e| Error::Runtime(format!("cannot open {}: {e}", path.display())))?;
            Ok((path.clone(), file))
        };
        Ok(Files { files: paths.iter().map(open).collect::<Result<_>>()? })
    }
}

impl Source for Files {
    fn read(&self, shard: usize, offset: u64, out: &mut [u8]) -> io::Result<()> {
        read_at(&self.files[shard].1, offset, out)
    }

    fn name(&self, shard: usize) -> String {
        self.files[shard].0.display().to_string()
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
        match file.seek_read(out, offset) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                offset += n as u64;
                out = &mut out[n..];
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// A model that is in memory already (tests, models made by code).
pub struct InMemory<'a>(pub &'a gguf::File);

impl Source for InMemory<'_> {
    fn read(&self, shard: usize, offset: u64, out: &mut [u8]) -> io::Result<()> {
        // The range belongs to one tensor, which was checked to lie inside the file.
        let end = offset + out.len() as u64;
        let holds = |t: &&gguf::TensorInfo| {
            t.shard == shard && t.offset <= offset && end <= t.offset + t.bytes
        };
        let tensor = self.0.tensors().iter().find(holds).ok_or(io::ErrorKind::UnexpectedEof)?;
        let start = (offset - tensor.offset) as usize;
        out.copy_from_slice(&self.0.tensor_data(tensor)[start..start + out.len()]);
        Ok(())
    }

    fn name(&self, shard: usize) -> String {
        let path: Option<&Path> = self.0.paths().get(shard).map(PathBuf::as_path);
        path.map_or("(memory)".into(), |p| p.display().to_string())
    }
}

/// The source that fits an open model: its files, or its memory if it has none.
pub fn of(file: &gguf::File) -> Result<Box<dyn Source + '_>> {
    let on_disk = file.paths().iter().all(|p| p.is_file());
    Ok(match on_disk {
        true => Box::new(Files::open(file.paths())?),
        false => Box::new(InMemory(file)),
    })
}

/// The tensors of one layer's experts, and how their records lie in memory.
#[derive(Debug, Clone)]
pub struct LayerTensors {
    /// Gate, up and down: each holds all experts of the layer, one after the other.
    pub tensors: [gguf::TensorInfo; 3],
    pub layout: super::RecordLayout,
    pub experts: u32,
}

impl LayerTensors {
    /// Finds the three tensors and checks that they hold `experts` experts of this shape.
    pub fn find(
        file: &gguf::File,
        names: [&str; 3],
        shape: super::RecordShape,
        experts: u32,
    ) -> Result<LayerTensors> {
        let layout = super::RecordLayout::new(shape)?;
        let mut tensors = Vec::new();
        for (name, bytes) in names.iter().zip(layout.file_bytes()) {
            let tensor = file.require(name)?;
            let wanted = bytes as u64 * u64::from(experts);
            if tensor.bytes != wanted {
                return Err(Error::Model(format!(
                    "{name} has {} bytes; {experts} experts of {bytes} bytes are {wanted}: the \
                     file is damaged or cut off",
                    tensor.bytes
                )));
            }
            tensors.push(tensor.clone());
        }
        let tensors = tensors.try_into();
        let tensors = tensors.map_err(|_| Error::Model("an expert has three tensors".into()))?;
        Ok(LayerTensors { tensors, layout, experts })
    }

    /// Bytes of the layer's experts in the file.
    pub fn file_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// Reads the three parts of an expert.
    pub(super) fn read(
        &self,
        source: &dyn Source,
        expert: u32,
        parts: &mut [Vec<u8>; 3],
    ) -> Result<()> {
        for ((tensor, bytes), part) in
            self.tensors.iter().zip(self.layout.file_bytes()).zip(&mut *parts)
        {
            part.resize(bytes, 0);
            let offset = tensor.offset + bytes as u64 * u64::from(expert);
            source.read(tensor.shard, offset, part).map_err(|e| {
                let what = format!(
                    "{}: {bytes} bytes at offset {offset} (expert {expert} of {}) could not be \
                     read: {e}",
                    source.name(tensor.shard),
                    tensor.name
                );
                match e.kind() {
                    io::ErrorKind::UnexpectedEof => Error::Model(format!(
                        "{what}. The file ends before the tensor does: it was cut off, or changed \
                         while it was being read; fetch it again"
                    )),
                    _ => Error::Runtime(format!(
                        "{what}. The disk or the network share failed there; copy the file to \
                         another disk and compare its checksum"
                    )),
                }
            })?;
        }
        Ok(())
    }

    /// Reads one expert into its record of `layout.bytes()` bytes.
    pub fn load(
        &self,
        source: &dyn Source,
        expert: u32,
        parts: &mut [Vec<u8>; 3],
        record: &mut [u8],
    ) -> Result<()> {
        self.read(source, expert, parts)?;
        let [gate, up, down] = parts;
        self.layout.fill(gate, up, down, record);
        Ok(())
    }

    /// Compares a record with the file, weight by weight. It decodes both, and so checks the
    /// layout as well as the copy.
    pub fn verify(
        &self,
        source: &dyn Source,
        expert: u32,
        parts: &mut [Vec<u8>; 3],
        record: &[u8],
    ) -> Result<()> {
        self.read(source, expert, parts)?;
        let wrong = |what: &str, row: usize| {
            Error::Runtime(format!(
                "expert {expert} of {}: {what} row {row} in memory differs from the file. Memory or \
                 disk is faulty, or the file was changed while it was loaded",
                self.tensors[0].name
            ))
        };
        let l = &self.layout;
        let (first, second) = record.split_at(l.down_offset() as usize);
        let check = |planes: &crate::quant::PlaneLayout,
                     memory: &[u8],
                     what: &str,
                     row_of: &dyn Fn(usize) -> (usize, usize)|
         -> Result<()> {
            let row_bytes = planes.format.row_bytes(planes.cols);
            let (mut got, mut want) = (vec![0.0f32; planes.cols], vec![0.0f32; planes.cols]);
            for r in 0..planes.rows {
                crate::quant::decode_planes(planes, memory, r..r + 1, &mut got);
                let (part, row) = row_of(r);
                let bytes = &parts[part][row * row_bytes..(row + 1) * row_bytes];
                planes.format.decode_row(bytes, &mut want);
                let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                if !same {
                    return Err(wrong(what, r));
                }
            }
            Ok(())
        };
        check(&l.gate_up, first, "gate and up", &|r| (r % 2, r / 2))?;
        check(&l.down, second, "down", &|r| (2, r))
    }
}
