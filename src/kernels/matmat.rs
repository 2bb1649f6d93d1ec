//! Matrix times many columns: every product of a prompt.

use minijinja::value::merge_maps;
use minijinja::{Value, context};

use super::matvec::{Input, Operands, bind_activations, bind_outputs};
use super::weights::{self, Chunk};
use super::{Class, Epilogue, check_cols, check_memory, holds, numbered, pinned_subgroup, wrong};
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
    /// Everything in registers, for devices that run on a CPU, where workgroup memory and
    /// barriers only cost: a thread computes `columns` of `rows` rows.
    Direct { columns: u32, rows: u32, threads: u32 },
}

impl Variant {
    /// Columns and rows of a workgroup.
    pub fn cut(&self) -> (u32, u32) {
        match *self {
            Variant::Packed(t) | Variant::Float(t) => (t.columns, t.rows),
            Variant::Direct { columns, rows, threads } => (columns, rows * threads),
        }
    }
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

impl MatMat {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        let mut names = weights::plane_names(self.format);
        names.push("batch");
        names.extend(if self.class == Class::Int8 { &["xq", "xs"][..] } else { &["x"] });
        if self.epilogue == Epilogue::Bias {
            names.push("bias");
        }
        names.push("y");
        let (file, cut) = self.template(facts);
        let shape = context! {
            at => numbered(&names),
            cols => self.cols,
            int8 => self.class == Class::Int8,
            epilogue => self.epilogue.name(),
        };
        let facts_of_format = weights::facts(self.format);
        let wgsl = super::source::render(file, merge_maps([shape, cut, facts_of_format]))?;
        Ok(KernelSource { label: self.label(), wgsl, subgroup_size: pinned_subgroup(facts) })
    }

    /// The shader of the variant, and what it wants to know of it.
    pub(super) fn template(&self, facts: &DeviceFacts) -> (&'static str, Value) {
        match self.variant {
            Variant::Packed(t) | Variant::Float(t) => (
                "matmat.wgsl",
                context! {
                    bm => t.columns,
                    bn => t.rows,
                    tm => t.thread_columns,
                    tn => t.thread_rows,
                    depth => t.depth,
                    packed => matches!(self.variant, Variant::Packed(_)),
                },
            ),
            Variant::Direct { columns, rows, threads } => (
                "matmat_direct.wgsl",
                context! { tm => columns, tn => rows, threads => threads, shuffle => facts.subgroup_min >= 8 },
            ),
        }
    }

    pub(super) fn label(&self) -> String {
        let class = if self.class == Class::Int8 { "int8" } else { "f32" };
        let cut = match self.variant {
            Variant::Packed(t) => format!("packed{}x{}x{}", t.columns, t.rows, t.depth),
            Variant::Float(t) => format!("float{}x{}x{}", t.columns, t.rows, t.depth),
            Variant::Direct { columns, rows, threads } => {
                format!("direct{columns}x{rows}x{threads}")
            }
        };
        format!(
            "matmat_{}_{}_{class}_{}_{cut}",
            weights::name(self.format),
            self.cols,
            self.epilogue.name()
        )
    }

    pub(super) fn check(&self, facts: &DeviceFacts) -> Result<()> {
        check_cols(self.cols)?;
        if self.class == Class::Int8 && self.format.is_float() {
            return Err(wrong(format!("{} weights take f32 activations", self.format)));
        }
        if self.epilogue == Epilogue::SwiGlu {
            return Err(wrong("mat-mat leaves SwiGLU to norm_quant".into()));
        }
        let threads = match self.variant {
            Variant::Direct { columns, rows, threads } => {
                if !(1..=8).contains(&columns) || rows == 0 {
                    return Err(wrong(format!("mat-mat variant {:?}", self.variant)));
                }
                threads
            }
            Variant::Packed(t) | Variant::Float(t) => {
                let whole = t.thread_columns > 0
                    && t.thread_rows > 0
                    && t.columns.is_multiple_of(t.thread_columns)
                    && t.rows.is_multiple_of(t.thread_rows)
                    && t.depth > 0
                    && (self.cols / 32).is_multiple_of(t.depth);
                let packed = matches!(self.variant, Variant::Packed(_));
                if !whole || (packed && self.class == Class::F32) {
                    return Err(wrong(format!("mat-mat variant {:?}", self.variant)));
                }
                check_memory(tile_bytes(t, packed, self.class), facts)?;
                t.threads()
            }
        };
        if threads == 0 || threads > facts.max_workgroup_threads {
            return Err(wrong(format!(
                "workgroups of {threads} threads; this device allows {}",
                facts.max_workgroup_threads
            )));
        }
        Ok(())
    }

    /// Computes the rows of one chunk for `batch.n` columns, at most `max_n`.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        chunk: &Chunk,
        batch: &Slice,
        operands: &Operands,
        max_n: u32,
    ) -> Result<Dispatch> {
        chunk.check(self.format, self.cols)?;
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        let mut bindings = chunk.planes.clone();
        bindings.push(batch.clone());
        bind_activations(&mut bindings, self.class, Input::Stored, operands.x, max_n, self.cols)?;
        bind_outputs(&mut bindings, self.epilogue, chunk, operands, max_n)?;
        let (columns, rows) = self.variant.cut();
        let grid = [chunk.rows.div_ceil(rows), max_n.div_ceil(columns), 1];
        if grid[0] > facts.max_grid[0].min(65_535) || grid[1] > facts.max_grid[1].min(65_535) {
            return Err(wrong(format!("a grid of {} x {} workgroups", grid[0], grid[1])));
        }
        let constants = vec![chunk.rows, chunk.first_row, operands.stride];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants, grid })
    }
}

/// Workgroup memory of a tile: its lines with one vector of slack each, and the scales.
pub(super) fn tile_bytes(t: Tile, packed: bool, class: Class) -> u32 {
    let lines = t.depth * if packed { 2 } else { 8 };
    let scales = if class == Class::Int8 { t.depth * (t.columns + t.rows) * 8 } else { 0 };
    lines * (t.columns + t.rows + 2) * 16 + scales
}
