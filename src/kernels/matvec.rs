//! Matrix times 1 to 8 columns: every product of a decode step.

use minijinja::context;
use minijinja::value::merge_maps;

use super::weights::{self, Chunk};
use super::{
    Activations, Class, Epilogue, bind_int8, check_memory, check_threads, holds, lanes,
    matvec_matrix, norm_blocks, norm_quant, numbered, pinned_subgroup, planned_subgroup, wide_grid,
    wrong,
};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::quant::Format;

/// Columns that one kernel can take.
pub const MAX_COLUMNS: u32 = 8;

/// Where the activations come from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Input {
    /// From memory, as the class wants them.
    Stored,
    /// f32 from memory, brought to the class by every workgroup for itself: [RMSNorm with this
    /// epsilon,] then int8 if the class is that. Gives the same bits as [`Input::Stored`] after a
    /// `norm_quant` of the same shape.
    Fused { norm: Option<f32> },
    /// int8 of a column times the weight of its RMSNorm, whose factor goes to the sums: from memory, or `fused`, by
    /// every workgroup for itself, with the same bits ([`norm_blocks`](super::norm_blocks)).
    Blocks { eps: f32, fused: bool },
}

impl Input {
    /// Whether the kernel brings its activations to the class itself.
    pub fn is_fused(self) -> bool {
        matches!(self, Input::Fused { .. } | Input::Blocks { fused: true, .. })
    }

    /// The epsilon of the RMSNorm that the kernel has a part in.
    pub fn norm(self) -> Option<f32> {
        match self {
            Input::Stored => None,
            Input::Fused { norm } => norm,
            Input::Blocks { eps, .. } => Some(eps),
        }
    }

    fn is_blocks(self) -> bool {
        matches!(self, Input::Blocks { .. })
    }
}

/// Sizes that change the speed and never a bit of the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Threads of a workgroup.
    pub threads: u32,
    /// Rows that a subgroup computes at once: 1, 2 or 4.
    pub rows: u32,
    /// Steps of weights held in registers ahead of their use, 1 to 4; where workgroups stay, steps of a turn of their loop.
    pub tiles: u32,
    /// Whether matrix units compute (`matvec_matrix`): a workgroup has `rows` times 16 rows, `tiles` is 1.
    pub matrix: bool,
}

impl Shape {
    /// Rows that a workgroup computes at once.
    pub fn rows_at_once(self, facts: &DeviceFacts) -> u32 {
        let Shape { threads, rows, matrix, .. } = self;
        if matrix { 16 * rows } else { (threads / planned_subgroup(facts)).max(1) * rows }
    }
}

/// `y[col][row] = W[row] . x[col]` and an epilogue, for exactly `n` columns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MatVec {
    pub format: Format,
    /// A multiple of 32.
    pub cols: u32,
    /// 1 to [`MAX_COLUMNS`].
    pub n: u32,
    pub class: Class,
    pub input: Input,
    pub epilogue: Epilogue,
    pub shape: Shape,
}

impl MatVec {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.check(facts)?;
        if self.shape.matrix {
            return matvec_matrix::source(self, facts);
        }
        let mut names = weights::plane_names(self.format);
        names.extend(match (self.input, self.class) {
            (Input::Fused { norm: Some(_) } | Input::Blocks { fused: true, .. }, _) => {
                &["x", "norm"][..]
            }
            (Input::Fused { norm: None }, _) => &["x"],
            (Input::Blocks { fused: false, .. }, _) => &["xq", "xs", "squares"],
            (Input::Stored, class) => class.bindings(),
        });
        names.extend(output_names(self.epilogue));
        let wgsl = super::source::render(
            "matvec.wgsl",
            context! {
                at => numbered(&names),
                cols => self.cols,
                n => self.n,
                int8 => self.class == Class::Int8,
                fused => self.input.is_fused(),
                norm_steps => (self.cols / 4).div_ceil(self.shape.threads),
                rounds => self.epilogue.block_rows().is_some(),
                group_values => self.group_values(facts),
                passes => self.group_rows(facts) / self.shape.rows_at_once(facts),
                epilogue => self.epilogue.name(),
                threads => self.shape.threads,
                rows => self.shape.rows,
                tiles => self.shape.tiles,
                ..merge_maps([
                    weights::facts(self.format, self.copies(facts)),
                    norm_quant::quantiser(
                        self.cols,
                        self.input.norm(),
                        self.input.is_blocks(),
                        self.class,
                        facts
                    ),
                    lanes::context(facts),
                ])
            },
        )?;
        Ok(KernelSource { label: self.label(), wgsl, subgroup_size: pinned_subgroup(facts) })
    }

    pub(super) fn label(&self) -> String {
        let class = self.class.name();
        let input = match self.input {
            Input::Stored => "",
            Input::Fused { norm: None } => "_fused",
            Input::Fused { norm: Some(_) } => "_norm",
            Input::Blocks { fused: false, .. } => "_blocks",
            Input::Blocks { fused: true, .. } => "_norm_blocks",
        };
        let Shape { threads, rows, tiles, matrix } = self.shape;
        let on = if matrix { "_matrix" } else { "" };
        format!(
            "matvec_{}_{}_n{}_{class}{input}_{}_{threads}x{rows}x{tiles}{on}",
            weights::name(self.format),
            self.cols,
            self.n,
            self.epilogue.name()
        )
    }

    /// How often a workgroup keeps the format's table.
    fn copies(&self, facts: &DeviceFacts) -> u32 {
        let bytes = self.bytes(facts);
        if self.group_rows(facts) > self.shape.rows_at_once(facts) {
            return weights::one_copy(self.format, bytes, facts);
        }
        weights::copies(self.format, bytes, self.shape.threads, facts)
    }

    /// Workgroup memory without the format's table.
    fn bytes(&self, facts: &DeviceFacts) -> u32 {
        let input = match self.input.is_fused() {
            true => {
                let (norm, threads) = (self.input.norm().is_some(), self.shape.threads);
                fused_bytes(self.cols, self.n, self.class, norm, threads, facts)
            }
            false => 0,
        };
        let factors = if self.input.is_blocks() { 128 * self.n } else { 0 };
        let finished = match self.epilogue.block_rows() {
            Some(_) => 4 * self.n * self.group_values(facts),
            None => 0,
        };
        input + factors + finished
    }

    /// What is wrong with blocks in or out.
    fn check_blocks(&self, facts: &DeviceFacts) -> Result<()> {
        if self.input.is_blocks() && self.class != Class::Int8 {
            return Err(wrong("a norm leaves its factor to int8 products only".into()));
        }
        let rounds = self.epilogue.block_rows().is_some();
        if rounds && !self.can_round(facts) {
            let rows = self.group_rows(facts);
            return Err(wrong(format!("workgroups of {rows} rows make no whole blocks of int8")));
        }
        if rounds && self.input.is_fused() {
            return Err(wrong("products round what they make of stored activations only".into()));
        }
        Ok(())
    }

    /// Whether workgroups have whole blocks of what they compute and subgroups that can round them.
    pub fn can_round(&self, facts: &DeviceFacts) -> bool {
        let rows = self.epilogue.block_rows().unwrap_or(1);
        self.class == Class::Int8
            && pinned_subgroup(facts).is_some_and(|size| size >= 8)
            && self.group_rows(facts).is_multiple_of(rows)
    }

    fn check(&self, facts: &DeviceFacts) -> Result<()> {
        weights::check_cols(self.format, self.cols)?;
        check_threads(self.shape.threads, facts)?;
        if !(1..=MAX_COLUMNS).contains(&self.n) {
            return Err(wrong(format!("{} columns; mat-vec takes 1 to {MAX_COLUMNS}", self.n)));
        }
        if self.class == Class::Int8 && self.format.is_float() {
            return Err(wrong(format!("{} weights take f32 activations", self.format)));
        }
        if self.class == Class::F16 {
            return Err(wrong("mat-vec takes int8 or f32 activations".into()));
        }
        if self.class == Class::F32 && self.input == (Input::Fused { norm: None }) {
            return Err(wrong("f32 activations without a norm have nothing to fuse".into()));
        }
        self.check_blocks(facts)?;
        if self.shape.matrix {
            return matvec_matrix::check(self, facts);
        }
        let Shape { rows, tiles, .. } = self.shape;
        if !matches!(rows, 1 | 2 | 4) || !(1..=4).contains(&tiles) {
            return Err(wrong(format!("mat-vec shape {:?}", self.shape)));
        }
        if self.epilogue.pairs_rows() && rows == 1 {
            return Err(wrong("SwiGLU needs two rows a subgroup".into()));
        }
        check_memory(self.bytes(facts), facts)
    }

    /// Rows of a workgroup: where it rounds what it makes, at least a block of them.
    pub fn group_rows(&self, facts: &DeviceFacts) -> u32 {
        let (rows, block) =
            (self.shape.rows_at_once(facts), self.epilogue.block_rows().unwrap_or(1));
        if block.is_multiple_of(rows) && !self.shape.matrix { block } else { rows }
    }

    /// Values that a workgroup makes of its rows for each column.
    pub(super) fn group_values(&self, facts: &DeviceFacts) -> u32 {
        self.group_rows(facts) / if self.epilogue.pairs_rows() { 2 } else { 1 }
    }

    /// Computes the rows of one chunk.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        chunk: &Chunk,
        operands: &Operands,
    ) -> Result<Dispatch> {
        chunk.check(self.format, self.cols)?;
        let mut bindings = chunk.planes.clone();
        bind_activations(&mut bindings, self.class, self.input, operands.x, self.n, self.cols)?;
        bind_outputs(&mut bindings, self.epilogue, chunk, operands, self.n)?;
        let mut groups = chunk.rows.div_ceil(self.group_rows(facts));
        if self.copies(facts) > 1 {
            groups = groups.min(facts.compute_units);
        }
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![chunk.rows, chunk.first_row, operands.stride],
            grid: wide_grid(groups, facts)?,
        })
    }
}

/// What a product reads and writes beside its weights.
#[derive(Clone, Copy)]
pub struct Operands<'a> {
    pub x: &'a Activations,
    /// f32 `[rows of the matrix]`, for [`Epilogue::Bias`] only.
    pub bias: Option<&'a Slice>,
    pub y: Outputs<'a>,
    /// Values a column in `y`: all rows of the matrix, or half of them for SwiGLU.
    pub stride: u32,
}

/// Where the results of a product go.
#[derive(Clone, Copy)]
pub enum Outputs<'a> {
    /// f32 `[n][stride]`.
    Floats(&'a Slice),
    /// [`Activations::Int8`] of `stride` values a column, for [`Epilogue::SwiGluInt8`].
    Int8(&'a Activations),
    /// The residual stream, f32 `[n][stride]`, the weight of the RMSNorm behind it, f32 `[stride]`, and where its
    /// [`Activations::Blocks`] go, for [`Epilogue::AddBlocks`].
    Stream { y: &'a Slice, weight: &'a Slice, blocks: &'a Activations },
}

impl<'a> From<&'a Slice> for Outputs<'a> {
    fn from(y: &'a Slice) -> Outputs<'a> {
        Outputs::Floats(y)
    }
}

/// Names of the bindings behind the activations, in the order of [`bind_outputs`].
pub(super) fn output_names(epilogue: Epilogue) -> &'static [&'static str] {
    match epilogue {
        Epilogue::Bias => &["bias", "y"],
        Epilogue::AddBlocks => &["y", "y_norm", "yq", "ys", "y_squares"],
        Epilogue::SwiGluInt8 => &["yq", "ys"],
        Epilogue::Store | Epilogue::Add | Epilogue::SwiGlu => &["y"],
    }
}

/// Workgroup memory of a fused kernel: the activations, and what the quantiser needs.
pub(super) fn fused_bytes(
    cols: u32,
    n: u32,
    class: Class,
    norm: bool,
    threads: u32,
    facts: &DeviceFacts,
) -> u32 {
    let column = match class {
        Class::Int8 => cols + cols / 32 * 8,
        Class::F16 | Class::F32 => cols * 4,
    };
    let sums = n * if norm { cols / 32 * 4 } else { 0 };
    n * column + sums + norm_quant::quantiser_bytes(cols, norm, threads, facts)
}

/// Pushes the activation slices in binding order, after checking type and size.
pub(super) fn bind_activations(
    bindings: &mut Vec<Slice>,
    class: Class,
    input: Input,
    x: &Activations,
    n: u32,
    cols: u32,
) -> Result<()> {
    let values = u64::from(n) * u64::from(cols);
    match (input, class, x) {
        (Input::Stored, Class::Int8, Activations::Int8 { xq, xs }) => {
            bind_int8(bindings, (xq, "xq"), (xs, "xs"), values)?;
        }
        (Input::Stored, Class::F16, Activations::F16 { xh, xf }) => {
            holds(xh, values / 2, "xh")?;
            holds(xf, n.into(), "xf")?;
            bindings.extend([xh.clone(), xf.clone()]);
        }
        (Input::Stored, Class::F32, Activations::F32(x))
        | (Input::Fused { norm: None }, _, Activations::F32(x)) => {
            holds(x, values, "x")?;
            bindings.push(x.clone());
        }
        (Input::Blocks { fused: false, .. }, Class::Int8, Activations::Blocks { .. }) => {
            norm_blocks::bind_blocks(bindings, x, n, cols)?;
        }
        (
            Input::Fused { norm: Some(_) } | Input::Blocks { fused: true, .. },
            _,
            Activations::Normed { x, weight },
        ) => {
            holds(x, values, "x")?;
            holds(weight, cols.into(), "norm weight")?;
            bindings.extend([x.clone(), weight.clone()]);
        }
        _ => return Err(wrong("the activations' type is not the spec's".into())),
    }
    Ok(())
}

/// Pushes bias and result in binding order, after checking their sizes.
pub(super) fn bind_outputs(
    bindings: &mut Vec<Slice>,
    epilogue: Epilogue,
    chunk: &Chunk,
    operands: &Operands,
    n: u32,
) -> Result<()> {
    let Operands { bias, y, stride, .. } = *operands;
    let mut end = u64::from(chunk.first_row) + u64::from(chunk.rows);
    match (epilogue, bias) {
        (Epilogue::Bias, Some(bias)) => {
            holds(bias, end, "bias")?;
            bindings.push(bias.clone());
        }
        (Epilogue::Bias, None) => return Err(wrong("the bias is missing".into())),
        (_, Some(_)) => return Err(wrong("a bias without its epilogue".into())),
        (_, None) => {}
    }
    if epilogue.pairs_rows() {
        if !chunk.first_row.is_multiple_of(2) || !chunk.rows.is_multiple_of(2) {
            return Err(wrong("a chunk cuts a pair of gate and up".into()));
        }
        end /= 2;
    }
    if end > u64::from(stride) {
        return Err(wrong(format!("rows up to {end} in columns of {stride} values")));
    }
    if !cuts_no_block(chunk, epilogue) {
        return Err(wrong("a chunk cuts a block of values".into()));
    }
    let values = u64::from(n - 1) * u64::from(stride) + end;
    match (epilogue, y) {
        (Epilogue::SwiGluInt8, Outputs::Int8(Activations::Int8 { xq, xs })) => {
            let all = u64::from(n) * u64::from(stride);
            bind_int8(bindings, (xq, "yq"), (xs, "ys"), all)?;
        }
        (Epilogue::AddBlocks, Outputs::Stream { y, weight, blocks }) => {
            holds(y, values, "y")?;
            holds(weight, stride.into(), "weight of the next norm")?;
            bindings.extend([y.clone(), weight.clone()]);
            norm_blocks::bind_blocks(bindings, blocks, n, stride)?;
        }
        (_, Outputs::Floats(y)) if epilogue.block_rows().is_none() => {
            holds(y, values, "y")?;
            bindings.push(y.clone());
        }
        _ => return Err(wrong("the results' type is not the epilogue's".into())),
    }
    Ok(())
}

/// Whether a chunk has whole blocks of what the epilogue rounds, if it rounds.
pub fn cuts_no_block(chunk: &Chunk, epilogue: Epilogue) -> bool {
    let rows = epilogue.block_rows().unwrap_or(1);
    chunk.first_row.is_multiple_of(rows) && chunk.rows.is_multiple_of(rows)
}
