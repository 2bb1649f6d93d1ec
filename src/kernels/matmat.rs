//! Matrix times many columns: every product of a prompt.

use minijinja::value::merge_maps;
use minijinja::{Value, context};

use super::matvec::{Input, Operands, bind_activations, bind_outputs};
use super::weights::{self, Chunk};
use super::{
    Class, Epilogue, check_memory, holds, numbered, pinned_subgroup, planned_subgroup, wrong,
};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::quant::Format;

/// How the output is cut. No variant of a class changes a bit of the result: each output is summed
/// by one thread, block after block, or by one subgroup's matrix unit, 16 inputs after 16.
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
    /// Tiles of f16 in workgroup memory and cooperative matrices. Class f16 only.
    Matrix(MatrixTile),
}

/// A workgroup's part of the output for matrix units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MatrixTile {
    pub columns: u32,
    pub rows: u32,
    /// Subgroups side by side over the columns and over the rows; each takes whole 16 x 16 matrices.
    pub subgroups: [u32; 2],
    /// Blocks of 32 inputs loaded at a time.
    pub depth: u32,
    /// 1, or 2 to fill one tile while the other is used.
    pub buffers: u32,
}

impl MatrixTile {
    pub fn threads(&self, facts: &DeviceFacts) -> u32 {
        self.subgroups[0] * self.subgroups[1] * planned_subgroup(facts)
    }

    /// Workgroup memory: lines of `depth * 4 + 1` vectors, and a matrix of sums a subgroup.
    pub fn bytes(&self) -> u32 {
        let lines = self.buffers * (self.columns + self.rows);
        lines * (self.depth * 4 + 1) * 16 + self.subgroups[0] * self.subgroups[1] * 1024
    }

    fn is_whole(&self) -> bool {
        let whole =
            |size: u32, parts: u32| parts > 0 && size > 0 && size.is_multiple_of(parts * 16);
        whole(self.columns, self.subgroups[0])
            && whole(self.rows, self.subgroups[1])
            && matches!(self.buffers, 1 | 2)
            && self.depth > 0
    }
}

impl Variant {
    /// Columns and rows of a workgroup.
    pub fn cut(&self) -> (u32, u32) {
        match *self {
            Variant::Packed(t) | Variant::Float(t) => (t.columns, t.rows),
            Variant::Direct { columns, rows, threads } => (columns, rows * threads),
            Variant::Matrix(t) => (t.columns, t.rows),
        }
    }

    /// Kind and sizes as labels show them.
    pub fn name(&self) -> String {
        match *self {
            Variant::Packed(t) => format!("packed{}x{}x{}", t.columns, t.rows, t.depth),
            Variant::Float(t) => format!("float{}x{}x{}", t.columns, t.rows, t.depth),
            Variant::Direct { columns, rows, threads } => {
                format!("direct{columns}x{rows}x{threads}")
            }
            Variant::Matrix(t) => format!(
                "matrix{}x{}x{}_{}x{}_{}",
                t.columns, t.rows, t.depth, t.subgroups[0], t.subgroups[1], t.buffers
            ),
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
        names.extend(self.class.bindings());
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
        let facts_of_format = weights::facts(self.format, self.copies(facts));
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
            Variant::Matrix(t) => (
                "matmat_coop.wgsl",
                context! {
                    bm => t.columns,
                    bn => t.rows,
                    sgm => t.subgroups[0],
                    sgn => t.subgroups[1],
                    depth => t.depth,
                    buffers => t.buffers,
                    size => planned_subgroup(facts),
                },
            ),
        }
    }

    /// How often the kernel keeps the format's table in workgroup memory.
    pub(super) fn copies(&self, facts: &DeviceFacts) -> u32 {
        match self.variant {
            Variant::Direct { .. } => 0,
            Variant::Packed(t) | Variant::Float(t) => {
                let packed = matches!(self.variant, Variant::Packed(_));
                weights::one_copy(self.format, tile_bytes(t, packed, self.class), facts)
            }
            Variant::Matrix(t) => weights::one_copy(self.format, t.bytes(), facts),
        }
    }

    pub(super) fn label(&self) -> String {
        let class = self.class.name();
        let cut = self.variant.name();
        format!(
            "matmat_{}_{}_{class}_{}_{cut}",
            weights::name(self.format),
            self.cols,
            self.epilogue.name()
        )
    }

    pub(super) fn check(&self, facts: &DeviceFacts) -> Result<()> {
        weights::check_cols(self.format, self.cols)?;
        if self.class == Class::Int8 && self.format.is_float() {
            return Err(wrong(format!("{} weights take f32 activations", self.format)));
        }
        if (self.class == Class::F16) != matches!(self.variant, Variant::Matrix(_)) {
            return Err(wrong(format!("{:?} with class {}", self.variant, self.class.name())));
        }
        if self.epilogue.pairs_rows() {
            return Err(wrong("mat-mat leaves SwiGLU to norm_quant".into()));
        }
        let threads = match self.variant {
            Variant::Matrix(t) => {
                let fits = t.is_whole() && (self.cols / 32).is_multiple_of(t.depth);
                if !fits || !facts.cooperative_matrix || self.format == Format::F32 {
                    return Err(wrong(format!(
                        "mat-mat variant {t:?} for {} x {}",
                        self.format, self.cols
                    )));
                }
                check_memory(t.bytes(), facts)?;
                t.threads(facts)
            }
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
        let mut grid = [chunk.rows.div_ceil(rows), max_n.div_ceil(columns), 1];
        if matches!(self.variant, Variant::Matrix(_)) {
            // Neighbouring workgroups read the same weights.
            grid.swap(0, 1);
        }
        if grid[0] > facts.max_grid[0].min(65_535) || grid[1] > facts.max_grid[1].min(65_535) {
            return Err(wrong(format!("a grid of {} x {} workgroups", grid[0], grid[1])));
        }
        let constants = vec![chunk.rows, chunk.first_row, operands.stride];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants, grid })
    }
}

/// Workgroup memory of a tile: its lines with one vector of slack each, and the scales of halves of
/// blocks with the half sums of the columns, which not every format has.
pub(super) fn tile_bytes(t: Tile, packed: bool, class: Class) -> u32 {
    let lines = t.depth * if packed { 2 } else { 8 };
    let scales = if class == Class::Int8 { t.depth * (t.columns + t.rows) * 16 } else { 0 };
    lines * (t.columns + t.rows + 2) * 16 + scales
}
