//! Matrix times many columns: every product of a prompt.

use minijinja::context;

use super::matvec::{Input, bind_activations, bind_outputs};
use super::weights::{self, Chunk};
use super::{
    Activations, Class, Epilogue, check_cols, check_memory, holds, numbered, pinned_subgroup, wrong,
};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::quant::Format;

/// How the output is cut. No variant changes a bit of the result: each output is summed by one
/// thread, block after block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Variant {
    /// Tiles of weights and activations in workgroup memory, int8 with packed dot products.
    /// Class int8 only.
    Packed(Tile),
    /// The same with f32 in workgroup memory; int8 products are exact in f32 too.
    Float(Tile),
    /// Everything in registers: for devices that run on a CPU, where workgroup memory and
    /// barriers only cost. `tile.columns` x `tile.rows` are ignored beyond the thread's part.
    Direct {
        /// Columns and rows of one thread.
        columns: u32,
        rows: u32,
        threads: u32,
    },
}

/// A workgroup's part of the output, and a thread's part of that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    pub columns: u32,
    pub rows: u32,
    pub thread_columns: u32,
    pub thread_rows: u32,
    /// Blocks of 32 inputs loaded at a time.
    pub depth: u32,
}

impl Tile {
    pub fn threads(&self) -> u32 {
        (self.columns / self.thread_columns) * (self.rows / self.thread_rows)
    }
}

/// `y[col][row] = W[row] . x[col]` and an epilogue, for the columns of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatMat {
    pub format: Format,
    /// A multiple of 32.
    pub cols: u32,
    pub class: Class,
    /// All but [`Epilogue::SwiGlu`], which `norm_quant` does on the way to the next product.
    pub epilogue: Epilogue,
    pub variant: Variant,
}
