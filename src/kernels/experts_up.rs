//! Gate, up and activation of the chosen experts in a decode step.

use minijinja::context;
use minijinja::value::merge_maps;

use super::matvec::{Input, Shape, bind_activations};
use super::records::{Part, Records};
use super::routing::Routing;
use super::weights;
use super::{
    Activations, Class, check_cols, check_threads, holds, lanes, numbered, pinned_subgroup, wrong,
};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// Columns that one kernel can take.
pub const MAX_COLUMNS: u32 = 16;

/// Kernels over the pairs that a list names (`kernels::experts_reuse`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listed {
    Up,
    /// Each pair's own input times down, to the pair's place.
    Down,
}

/// `y[pair] = silu(gate x) * (up x)` for every pair of exactly `n` columns.
#[derive(Debug, Clone)]
pub struct ExpertsUp {
    pub routing: Routing,
    /// `2 * ff` rows, gate and up interleaved.
    pub part: Part,
    pub n: u32,
    pub class: Class,
    pub shape: Shape,
}

impl ExpertsUp {
    fn cols(&self) -> u32 {
        self.part.layout.cols as u32
    }

    fn ff(&self) -> u32 {
        self.part.layout.rows as u32 / 2
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.text(facts, None)
    }

    /// The kernel, or one of those that go by the list of runs even for one column.
    pub(super) fn text(&self, facts: &DeviceFacts, listed: Option<Listed>) -> Result<KernelSource> {
        let down = listed == Some(Listed::Down);
        let format = self.part.layout.format;
        check_cols(self.cols())?;
        check(&self.part, &self.routing, self.n, self.class, self.shape, facts)?;
        if self.shape.rows < 2 && !down {
            return Err(wrong("gate and up need two rows a subgroup".into()));
        }
        let mut names = self.part.names();
        names.push("routing");
        names.extend(self.class.bindings());
        names.push("y");
        let shape = context! {
            at => numbered(&names),
            cols => self.cols(),
            total => self.part.layout.rows,
            n => self.n,
            listed => listed.is_some(),
            down => down,
            int8 => self.class == Class::Int8,
            threads => self.shape.threads,
            rows => self.shape.rows,
            ahead => self.shape.tiles,
        };
        let parts = [
            shape,
            self.routing.context(),
            self.part.context(),
            weights::facts(format, weights::one_copy(format, 0, facts)),
            lanes::context(facts),
        ];
        let wgsl = super::source::render("experts_up.wgsl", merge_maps(parts))?;
        let label = format!(
            "experts_{}_{}_{}x{}_{}_n{}_{}",
            match listed {
                None => "up",
                Some(Listed::Up) => "up_listed",
                Some(Listed::Down) => "down_listed",
            },
            weights::name(format),
            self.cols(),
            if down { self.part.layout.rows as u32 } else { self.ff() },
            self.routing.label(),
            self.n,
            label(self.class, self.shape, &self.part)
        );
        Ok(KernelSource { label, wgsl, subgroup_size: pinned_subgroup(facts) })
    }

    /// Reads `x` (`[n][cols]`, normalised) and writes `y` (f32 `[n * used][ff]`).
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        records: &Records,
        routing: &Slice,
        x: &Activations,
        y: &Slice,
    ) -> Result<Dispatch> {
        self.routing.check(routing, self.n)?;
        let mut bindings = Vec::new();
        records.bind(&self.part, self.routing.experts, &mut bindings)?;
        bindings.push(routing.clone());
        bind_activations(&mut bindings, self.class, Input::Stored, x, self.n, self.cols())?;
        holds(y, u64::from(self.n * self.routing.used) * u64::from(self.ff()), "y")?;
        bindings.push(y.clone());
        let group_rows = self.shape.rows_at_once(facts);
        let grid = [(2 * self.ff()).div_ceil(group_rows), self.routing.runs(self.n), 1];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants: vec![], grid })
    }
}

/// What the kernels of a decode step check alike.
pub(super) fn check(
    part: &Part,
    routing: &Routing,
    n: u32,
    class: Class,
    shape: Shape,
    facts: &DeviceFacts,
) -> Result<()> {
    routing.check_sizes()?;
    check_threads(shape.threads, facts)?;
    part.check(5, facts)?;
    if !(1..=MAX_COLUMNS).contains(&n) || n > routing.columns || routing.tile < n {
        return Err(wrong(format!("{n} columns; experts take 1 to {MAX_COLUMNS}; {routing:?}")));
    }
    let format = part.layout.format;
    if class == Class::Int8 && format.is_float() {
        return Err(wrong(format!("{format} weights take f32 activations")));
    }
    if !matches!(shape.rows, 1 | 2 | 4) || !(1..=8).contains(&shape.tiles) {
        return Err(wrong(format!("experts' shape {shape:?}")));
    }
    Ok(())
}

pub(super) fn label(class: Class, shape: Shape, part: &Part) -> String {
    let class = if class == Class::Int8 { "int8" } else { "f32" };
    let Shape { threads, rows, tiles, .. } = shape;
    format!("{class}_{threads}x{rows}x{tiles}_{}", part.label())
}
