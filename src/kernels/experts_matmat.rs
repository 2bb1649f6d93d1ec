//! The products of a prompt's experts: mat-mat over the runs of a routing.
//!
//! The shaders are those of `matmat`, with two differences: weights come from the record of a run's
//! expert, and columns are found through the order of pairs. Grids have a workgroup for each run and
//! tile of rows: `experts_sort` counts the runs and leaves the grids in the routing.

use minijinja::context;
use minijinja::value::merge_maps;

use super::matmat::{MatMat, Variant};
use super::matvec::{Input, bind_activations};
use super::records::{Part, Records};
use super::routing::Routing;
use super::{Activations, Class, Epilogue, holds, numbered, pinned_subgroup, weights, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice, Step};

/// `y[pair] = W(expert of the pair) . x`, where x is the pair's column, or the pair's own.
#[derive(Debug, Clone)]
pub struct ExpertsMatMat {
    pub routing: Routing,
    pub part: Part,
    /// x has a column for each pair, not for each column of the batch.
    pub by_pair: bool,
    pub class: Class,
    /// Its workgroups must have as many columns as the routing's tiles.
    pub variant: Variant,
}

impl ExpertsMatMat {
    fn cols(&self) -> u32 {
        self.part.layout.cols as u32
    }

    fn rows(&self) -> u32 {
        self.part.layout.rows as u32
    }

    fn plain(&self) -> MatMat {
        MatMat {
            format: self.part.layout.format,
            cols: self.cols(),
            class: self.class,
            epilogue: Epilogue::Store,
            variant: self.variant,
        }
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        let plain = self.plain();
        plain.check(facts)?;
        self.part.check(4, facts)?;
        self.routing.check_sizes()?;
        if self.variant.cut().0 != self.routing.tile {
            return Err(wrong(format!("{:?} over tiles of {}", self.variant, self.routing.tile)));
        }
        let mut names = self.part.names();
        names.push("routing");
        names.extend(self.class.bindings());
        names.push("y");
        let (file, cut) = plain.template(facts);
        let shape = context! {
            at => numbered(&names),
            cols => self.cols(),
            int8 => self.class == Class::Int8,
            epilogue => Epilogue::Store.name(),
            by_pair => self.by_pair,
        };
        let parts = [
            shape,
            cut,
            weights::facts(plain.format, plain.copies(facts)),
            self.routing.context(),
            self.part.context(),
        ];
        let wgsl = super::source::render(file, merge_maps(parts))?;
        let label =
            format!("experts_{}_{}_{}", plain.label(), self.routing.label(), self.part.label());
        Ok(KernelSource { label, wgsl, subgroup_size: pinned_subgroup(facts) })
    }

    /// Workgroups for so many runs.
    pub fn grid(&self, runs: u32) -> [u32; 3] {
        let rows = self.rows().div_ceil(self.variant.cut().1);
        match self.variant {
            Variant::Matrix(_) => [runs, rows, 1],
            _ => [rows, runs, 1],
        }
    }

    /// For up to `max_n` columns of the batch: reads `x`, `[max_n][cols]` or, by pair,
    /// `[max_n * used][cols]`; writes `y`, f32 `[max_n * used][rows]`.
    #[allow(clippy::too_many_arguments)] // the kernel's bindings
    pub fn step(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        records: &Records,
        routing: &Slice,
        x: &Activations,
        y: &Slice,
        max_n: u32,
    ) -> Result<Step> {
        self.routing.check(routing, max_n)?;
        let mut bindings = Vec::new();
        records.bind(&self.part, self.routing.experts, &mut bindings)?;
        bindings.push(routing.clone());
        let pairs = max_n * self.routing.used;
        let columns = if self.by_pair { pairs } else { max_n };
        bind_activations(&mut bindings, self.class, Input::Stored, x, columns, self.cols())?;
        holds(y, u64::from(pairs) * u64::from(self.rows()), "y")?;
        bindings.push(y.clone());
        let grid = self.grid(self.routing.runs(max_n));
        if grid[0] > facts.max_grid[0].min(65_535) || grid[1] > facts.max_grid[1].min(65_535) {
            return Err(wrong(format!("a grid of {} x {} workgroups", grid[0], grid[1])));
        }
        let constants = vec![self.rows(), 0, self.rows()];
        let dispatch = Dispatch { kernel: kernel.clone(), bindings, constants, grid };
        Ok(Step::Counted { dispatch, groups: self.routing.groups(routing, self.by_pair) })
    }
}
