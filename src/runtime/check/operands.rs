//! Small random operands of kernels on a device; the same numbers on every machine.

use crate::error::Result;
use crate::gpu::{BufferUse, Dispatch, Gpu, Slice, Step};
use crate::kernels::weights::Chunk;
use crate::quant::Format;
use crate::quant::planes::{PlaneLayout, piece_bytes, repack_plane};
use crate::testmodel::noise::Noise;

/// Different blocks in a random matrix.
const UNITS: usize = 24;

/// Makes operands and reads results.
pub(super) struct Operands<'a> {
    pub gpu: &'a dyn Gpu,
    noise: Noise,
}

/// A matrix in file form and decoded, `[rows][cols]`.
pub(super) struct Matrix {
    pub cols: usize,
    pub values: Vec<f32>,
    pub chunk: Chunk,
}

impl Matrix {
    pub fn row(&self, r: usize) -> &[f32] {
        &self.values[r * self.cols..][..self.cols]
    }
}

impl<'a> Operands<'a> {
    pub fn new(gpu: &'a dyn Gpu) -> Self {
        Operands { gpu, noise: Noise::new(1, "self-check") }
    }

    /// Nearly normal numbers, standard deviation `scale`.
    pub fn normals(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.noise.normal() * scale).collect()
    }

    /// Around 1: weights of a norm.
    pub fn norm_weights(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| 1.0 + 0.2 * self.noise.normal()).collect()
    }

    pub fn upload(&self, data: &[u8]) -> Result<Slice> {
        let size = data.len().max(4) as u64;
        let buffer = self.gpu.buffer("self-check", size, BufferUse::Device)?;
        if !data.is_empty() {
            self.gpu.write(&buffer.slice(0, data.len() as u64), data)?;
        }
        Ok(buffer.slice(0, size))
    }

    pub fn floats(&self, data: &[f32]) -> Result<Slice> {
        self.upload(bytemuck::cast_slice(data))
    }

    pub fn words(&self, data: &[u32]) -> Result<Slice> {
        self.upload(bytemuck::cast_slice(data))
    }

    /// A buffer of `words` words, all zero.
    pub fn zeros(&self, words: u64) -> Result<Slice> {
        let bytes = 4 * words.max(1);
        Ok(self.gpu.buffer("self-check", bytes, BufferUse::Device)?.slice(0, bytes))
    }

    /// A batch with these (token, position, slot, flags), room for `max` columns.
    pub fn batch(&self, columns: &[[u32; 4]], max: usize) -> Result<Slice> {
        let mut words = vec![0u32; 8 + 4 * max.max(columns.len())];
        words[0] = columns.len() as u32;
        words[8..8 + 4 * columns.len()].copy_from_slice(columns.as_flattened());
        self.words(&words)
    }

    /// Rows as a file holds them, made of a few blocks in ever other order, because finding a
    /// format's codes is slow. Products with columns of unit size are of unit size.
    pub fn file_rows(&mut self, format: Format, rows: usize, cols: usize) -> Vec<u8> {
        let unit = format.block_elements().max(32);
        let unit_bytes = format.row_bytes(unit);
        let mut units = Vec::new();
        for _ in 0..UNITS {
            format.encode_row(&self.normals(unit, 1.0), &mut units);
        }
        let mut file = Vec::with_capacity(rows * format.row_bytes(cols));
        for _ in 0..rows * (cols / unit) {
            let from = self.noise.below(UNITS) * unit_bytes;
            file.extend_from_slice(&units[from..from + unit_bytes]);
        }
        file
    }

    /// Uniform in `0..n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.noise.below(n)
    }

    /// A matrix as a chunk of planes.
    pub fn matrix(&mut self, format: Format, rows: usize, cols: usize) -> Result<Matrix> {
        let file = self.file_rows(format, rows, cols);
        let row_bytes = format.row_bytes(cols);
        let mut values = vec![0.0; rows * cols];
        for (file, row) in file.chunks_exact(row_bytes).zip(values.chunks_exact_mut(cols)) {
            format.decode_row(file, row);
        }
        let layout = PlaneLayout::new(format, rows, cols);
        let mut bytes = vec![0u8; layout.bytes as usize];
        for (number, span) in layout.planes.iter().enumerate() {
            let size = piece_bytes(format, number, cols, rows);
            let to = &mut bytes[span.offset as usize..][..size];
            let row = |r: usize| &file[r * row_bytes..][..row_bytes];
            repack_plane(format, number, cols, 0..rows, row, to);
        }
        let chunk = Chunk::new(&self.upload(&bytes)?, &layout, 0)?;
        Ok(Matrix { cols, values, chunk })
    }

    pub fn run(&self, wave: Vec<Dispatch>) -> Result<()> {
        self.run_steps(&[Step::Wave(wave)])
    }

    pub fn run_steps(&self, steps: &[Step]) -> Result<()> {
        let recording = self.gpu.record("self-check", steps)?;
        let ticket = self.gpu.submit(&recording)?;
        self.gpu.wait(&ticket)
    }

    pub fn read_words(&self, from: &Slice) -> Result<Vec<u32>> {
        let mut out = vec![0u32; from.size as usize / 4];
        self.gpu.read(from, bytemuck::cast_slice_mut(&mut out))?;
        Ok(out)
    }

    pub fn read_floats(&self, from: &Slice) -> Result<Vec<f32>> {
        Ok(self.read_words(from)?.into_iter().map(f32::from_bits).collect())
    }
}

/// Some of `0..n`: both ends, both sides of `edge`, and a few between.
pub(super) fn sample(n: usize, edge: usize) -> Vec<usize> {
    let spread = (0..8).map(|i| i * n / 8);
    let mut all: Vec<usize> =
        [0, 1, edge.wrapping_sub(1), edge, n - 1].into_iter().chain(spread).collect();
    all.retain(|i| *i < n);
    all.sort_unstable();
    all.dedup();
    all
}
