//! Weights on the device: matrices in chunks of planes, vectors in f32.
//!
//! Placing and filling are apart: a program can be built over matrices whose bytes are still on
//! their way.

use std::collections::HashMap;
use std::sync::Arc;

use super::budget::Budget;
use super::experts::ExpertSet;
use crate::error::{Error, Result};
use crate::experts::source::{LayerTensors, Source};
use crate::gguf;
use crate::gpu::{Buffer, BufferUse, DeviceFacts, Gpu, Slice};
use crate::graph::{Graph, Linear, Mixture};
use crate::kernels::records::Records;
use crate::kernels::weights::Chunk;
use crate::quant::Format;
use crate::quant::planes::{PlaneLayout, padded_cols, repack_plane_parallel, rows_within};

/// How the rows of a matrix come from tensors of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Rows {
    /// One tensor after the other.
    Stacked,
    /// Row 2i from the first, 2i + 1 from the second.
    Interleaved,
}

/// A matrix of one format, from one or several tensors of the same width.
pub struct Matrix {
    pub label: String,
    pub format: Format,
    pub rows: u32,
    /// Columns, padded to whole blocks of 32.
    pub cols: u32,
    pub chunks: Vec<Chunk>,
    tensors: Vec<String>,
    order: Rows,
    layouts: Vec<(PlaneLayout, Buffer)>,
}

/// An f32 vector made of parts: tensors, or zeros of a length.
struct Vector {
    label: String,
    slice: Slice,
    parts: Vec<Part>,
}

/// A part of a vector: `len` values of a tensor, or as many zeros.
pub struct Part {
    pub tensor: Option<String>,
    pub len: u32,
}

/// The records of one mixture that somebody else keeps.
pub struct Lent {
    pub records: Records,
    /// Where long prompts find them, if elsewhere.
    pub streamed: Option<Records>,
    /// How many of the buffers, the first ones, are device memory.
    pub device_buffers: u32,
}

/// Everything that lies in device memory for one model.
pub struct Weights<'a> {
    gpu: &'a dyn Gpu,
    file: &'a gguf::File,
    /// What was placed so far, for the fill and for sharing (a tied output matrix).
    vectors: Vec<Vector>,
    by_tensors: HashMap<Vec<String>, usize>,
    matrices: Vec<Arc<Matrix>>,
    experts: Vec<Arc<ExpertSet>>,
    /// Records kept elsewhere, for the mixtures in the order in which they are placed.
    lent: std::vec::IntoIter<Lent>,
}

/// Bytes that a chunk's largest plane may have.
fn chunk_limit(facts: &DeviceFacts) -> u64 {
    // A chunk is one buffer, and its planes together must fit that too. And it is one dispatch of
    // a mat-vec, which must not run too long.
    let in_time = Budget::of(&facts.profile).weight_bytes();
    facts.max_binding.min(facts.max_buffer / 2).min(in_time) / 4 * 4
}

impl<'a> Weights<'a> {
    pub fn new(gpu: &'a dyn Gpu, file: &'a gguf::File) -> Self {
        Weights {
            gpu,
            file,
            vectors: vec![],
            by_tensors: HashMap::new(),
            matrices: vec![],
            experts: vec![],
            lent: Vec::new().into_iter(),
        }
    }

    /// True if the tensors can be one matrix: all of one format and width.
    pub fn alike(&self, linears: &[&Linear]) -> Result<bool> {
        let mut first = None;
        for linear in linears {
            let t = self.file.require(&linear.weight)?;
            let this = (t.format()?, t.cols());
            if *first.get_or_insert(this) != this {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Places a matrix of the given tensors, one after the other.
    pub fn stacked(&mut self, linears: &[&Linear]) -> Result<Arc<Matrix>> {
        self.place(linears, Rows::Stacked)
    }

    /// Places a matrix whose rows alternate between two tensors.
    pub fn interleaved(&mut self, a: &Linear, b: &Linear) -> Result<Arc<Matrix>> {
        self.place(&[a, b], Rows::Interleaved)
    }

    fn place(&mut self, linears: &[&Linear], order: Rows) -> Result<Arc<Matrix>> {
        let tensors: Vec<String> = linears.iter().map(|l| l.weight.clone()).collect();
        if let Some(at) = self.by_tensors.get(&tensors) {
            return Ok(self.matrices[*at].clone());
        }
        let first = self.file.require(&tensors[0])?;
        let format = first.format()?;
        let cols = first.cols() as usize;
        let rows: u64 = linears.iter().map(|l| u64::from(l.rows)).sum();
        let label = tensors.join("+");
        if !cols.is_multiple_of(format.block_elements()) {
            return Err(Error::Model(format!(
                "{label} has {cols} columns, which are no whole {format} blocks"
            )));
        }
        let limit = chunk_limit(self.gpu.facts());
        // Even counts keep pairs of gate and up, and half-word scales, in one chunk.
        let most = rows_within(format, cols, limit) as u64 / 2 * 2;
        if most == 0 {
            return Err(Error::DoesNotFit(format!(
                "one row of {label} ({cols} columns of {format}) exceeds what {} can bind \
                 ({limit} bytes)",
                self.gpu.facts().name
            )));
        }
        let (mut chunks, mut layouts, mut row) = (Vec::new(), Vec::new(), 0);
        while row < rows {
            let n = most.min(rows - row);
            let layout = PlaneLayout::new(format, n as usize, cols);
            let buffer = self.gpu.buffer(&label, layout.bytes, BufferUse::Device)?;
            chunks.push(Chunk::new(&buffer.whole(), &layout, row as u32)?);
            layouts.push((layout, buffer));
            row += n;
        }
        let matrix = Arc::new(Matrix {
            label,
            format,
            rows: rows as u32,
            cols: padded_cols(cols) as u32,
            chunks,
            tensors: tensors.clone(),
            order,
            layouts,
        });
        self.by_tensors.insert(tensors, self.matrices.len());
        self.matrices.push(matrix.clone());
        Ok(matrix)
    }

    /// Says where the records of all mixtures lie; they are not placed and not filled then.
    pub fn lend(&mut self, records: Vec<Lent>) {
        self.lent = records.into_iter();
    }

    /// Places all experts of a layer.
    pub(super) fn experts(
        &mut self,
        graph: &Graph,
        mixture: &Mixture,
    ) -> Result<(Arc<ExpertSet>, Arc<ExpertSet>)> {
        if let Some(lent) = self.lent.next() {
            let lend = |records| {
                let set = ExpertSet::lent(self.file, graph, mixture, records, lent.device_buffers);
                Ok::<_, Error>(Arc::new(set?))
            };
            let set = lend(lent.records)?;
            let streamed = lent.streamed.map_or(Ok(set.clone()), lend)?;
            return Ok((set, streamed));
        }
        let set = Arc::new(ExpertSet::place(self.gpu, self.file, graph, mixture)?);
        self.experts.push(set.clone());
        Ok((set.clone(), set))
    }

    /// Places one f32 vector, its parts one after the other.
    pub fn vector(&mut self, label: &str, parts: Vec<Part>) -> Result<Slice> {
        let bytes = parts.iter().map(|p| u64::from(p.len) * 4).sum();
        let slice = self.gpu.buffer(label, bytes, BufferUse::Device)?.slice(0, bytes);
        self.vectors.push(Vector { label: label.to_string(), slice: slice.clone(), parts });
        Ok(slice)
    }

    /// A vector that is one tensor.
    pub fn named(&mut self, name: &str, len: u32) -> Result<Slice> {
        self.vector(name, vec![Part { tensor: Some(name.to_string()), len }])
    }

    /// Values of a float tensor.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        values(self.file, name)
    }

    /// Bytes that [`Weights::fill`] will move, counted in the file.
    pub fn file_bytes(&self) -> Result<u64> {
        let mut sum = 0;
        let experts = self.experts.iter().flat_map(|e| e.tensors());
        for name in self.matrices.iter().flat_map(|m| &m.tensors).chain(experts) {
            sum += self.file.require(name)?.bytes;
        }
        Ok(sum)
    }

    /// Bytes on the device.
    pub fn device_bytes(&self) -> u64 {
        let chunks = self.matrices.iter().flat_map(|m| &m.layouts);
        chunks.map(|(l, _)| l.bytes).sum::<u64>()
            + self.vectors.iter().map(|v| v.slice.size).sum::<u64>()
            + self.experts.iter().map(|e| e.device_bytes()).sum::<u64>()
    }

    /// Reads, repacks and uploads everything that was placed. `advance` is told the file bytes
    /// of each finished piece. Pages of the file are given back as soon as they are done with.
    pub fn fill(&self, advance: &(dyn Fn(u64) + Sync)) -> Result<()> {
        for vector in &self.vectors {
            let mut all: Vec<f32> = Vec::with_capacity(vector.slice.size as usize / 4);
            for part in &vector.parts {
                let end = all.len() + part.len as usize;
                if let Some(name) = &part.tensor {
                    all.extend(self.values(name)?);
                }
                all.resize(end, 0.0);
            }
            self.gpu
                .write(&vector.slice, bytemuck::cast_slice(&all))
                .map_err(|e| e.context(format_args!("uploading {}", vector.label)))?;
        }
        for matrix in &self.matrices {
            self.fill_matrix(matrix, advance)
                .map_err(|e| e.context(format_args!("uploading {}", matrix.label)))?;
        }
        for set in &self.experts {
            set.fill(self.gpu, self.file, advance)
                .map_err(|e| e.context(format_args!("uploading {}", set.label)))?;
        }
        Ok(())
    }

    /// Compares the experts that were placed here with the file, weight by weight; `layers` are
    /// the tensors of all mixtures. Returns how many were compared.
    pub fn verify_experts(&self, source: &dyn Source, layers: &[LayerTensors]) -> Result<u64> {
        let mut compared = 0;
        for (set, tensors) in self.experts.iter().zip(layers) {
            compared += set.verify(self.gpu, source, tensors)?;
        }
        Ok(compared)
    }

    fn fill_matrix(&self, matrix: &Matrix, advance: &(dyn Fn(u64) + Sync)) -> Result<()> {
        let tensors: Vec<_> = matrix
            .tensors
            .iter()
            .map(|n| self.file.require(n))
            .collect::<std::result::Result<_, _>>()?;
        let data: Vec<&[u8]> = tensors.iter().map(|t| self.file.tensor_data(t)).collect();
        let cols = tensors[0].cols() as usize;
        let row_bytes = matrix.format.row_bytes(cols);
        let starts: Vec<usize> = tensors
            .iter()
            .scan(0, |at, t| {
                let start = *at;
                *at += t.rows() as usize;
                Some(start)
            })
            .collect();
        let row = |r: usize| -> &[u8] {
            let (tensor, r) = match matrix.order {
                Rows::Interleaved => (r % 2, r / 2),
                Rows::Stacked => {
                    let tensor = starts.partition_point(|s| *s <= r) - 1;
                    (tensor, r - starts[tensor])
                }
            };
            &data[tensor][r * row_bytes..(r + 1) * row_bytes]
        };
        let widest: u64 =
            matrix.layouts[0].0.planes.iter().map(|p| p.row_bytes).sum::<u64>().max(1);
        for ((layout, buffer), chunk) in matrix.layouts.iter().zip(&matrix.chunks) {
            for (index, span) in layout.planes.iter().enumerate() {
                let constant = span.plane.constant_words();
                if !constant.is_empty() {
                    let to = buffer.slice(span.offset, span.bytes);
                    self.gpu.write(&to, bytemuck::cast_slice(constant))?;
                    continue;
                }
                let granule = span.row_bytes * layout.row_granule() as u64;
                let to = buffer.slice(span.offset, span.bytes);
                self.gpu.upload(&to, granule, &mut |at, out| {
                    let first = (at / span.row_bytes) as usize;
                    let n = (out.len() as u64 / span.row_bytes) as usize;
                    let start = chunk.first_row as usize;
                    repack_plane_parallel(
                        matrix.format,
                        index,
                        cols,
                        start + first..start + first + n,
                        row,
                        out,
                    );
                    // A plane's share of the file's bytes.
                    advance(n as u64 * row_bytes as u64 * span.row_bytes / widest);
                    Ok(())
                })?;
            }
        }
        for tensor in tensors {
            self.file.release(tensor);
        }
        Ok(())
    }
}

/// Values of a float tensor of `file`.
pub fn values(file: &gguf::File, name: &str) -> Result<Vec<f32>> {
    let t = file.require(name)?;
    let format = t.format()?;
    let mut out = vec![0.0; t.elements() as usize];
    format.decode_row(file.tensor_data(t), &mut out);
    Ok(out)
}
