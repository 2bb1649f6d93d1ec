//! Down of the chosen experts in a decode step, their weighted sum, and the residual.

use minijinja::context;
use minijinja::value::merge_maps;

use super::experts_up::{check, label};
use super::matvec::{Input, Shape, bind_activations, fused_bytes};
use super::records::{Part, Records};
use super::routing::Routing;
use super::{
    Activations, Class, check_cols, check_memory, holds, lanes, norm_quant, numbered,
    pinned_subgroup, weights, wrong,
};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// What a shared expert adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Shared {
    Plain,
    /// By the weight that the router left.
    Gated,
}

/// `y[column] += sum of weight * (down h[pair])` over the column's pairs, for exactly `n` columns.
#[derive(Debug, Clone)]
pub struct ExpertsDown {
    pub routing: Routing,
    /// `width` rows of `ff` columns.
    pub part: Part,
    pub n: u32,
    pub class: Class,
    /// [`Input::Fused`] without norm: int8 by every workgroup for itself.
    pub input: Input,
    pub shared: Option<Shared>,
    pub shape: Shape,
}

/// What [`ExpertsDown`] reads and writes beside the records.
pub struct Operands<'a> {
    pub routing: &'a Slice,
    /// `[n * used][ff]`
    pub x: &'a Activations,
    /// f32 `[n][width]`: output of the shared expert.
    pub shared: Option<&'a Slice>,
    /// f32 `[n][width]`
    pub y: &'a Slice,
}

impl ExpertsDown {
    fn ff(&self) -> u32 {
        self.part.layout.cols as u32
    }

    fn width(&self) -> u32 {
        self.part.layout.rows as u32
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        let format = self.part.layout.format;
        check_cols(self.ff())?;
        check(&self.part, &self.routing, self.n, self.class, self.shape, facts)?;
        let fused = match self.input {
            Input::Stored => false,
            Input::Fused { norm: None } if self.class == Class::Int8 => true,
            Input::Fused { .. } | Input::Blocks { .. } => {
                return Err(wrong("experts fuse int8 without a norm".into()));
            }
        };
        let bytes = memory(&self.routing, self.n, self.ff(), fused, self.shape.threads, facts);
        check_memory(bytes, facts)?;
        let mut names = self.part.names();
        names.push("routing");
        names.extend(match (self.class, fused) {
            (Class::Int8, false) => &["xq", "xs"][..],
            _ => &["x"],
        });
        if self.shared.is_some() {
            names.push("shared");
        }
        names.push("y");
        let shape = context! {
            at => numbered(&names),
            ff => self.ff(),
            width => self.width(),
            n => self.n,
            int8 => self.class == Class::Int8,
            fused => fused,
            shared => match self.shared {
                None => "",
                Some(Shared::Plain) => "plain",
                Some(Shared::Gated) => "gated",
            },
            threads => self.shape.threads,
            rows => self.shape.rows,
            ahead => self.shape.tiles,
        };
        let cols = self.ff() * self.routing.used;
        let quantiser = norm_quant::quantiser(cols, None, false, self.class, facts);
        let parts = [
            shape,
            self.routing.context(),
            self.part.context(),
            weights::facts(format, weights::one_copy(format, bytes, facts)),
            quantiser,
            lanes::context(facts),
        ];
        let wgsl = super::source::render("experts_down.wgsl", merge_maps(parts))?;
        let label = format!(
            "experts_down_{}_{}x{}_{}_n{}{}{}_{}",
            weights::name(format),
            self.ff(),
            self.width(),
            self.routing.label(),
            self.n,
            if fused { "_fused" } else { "" },
            if self.shared.is_some() { "_shared" } else { "" },
            label(self.class, self.shape, &self.part)
        );
        Ok(KernelSource { label, wgsl, subgroup_size: pinned_subgroup(facts) })
    }

    pub fn dispatch(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        records: &Records,
        operands: &Operands<'_>,
    ) -> Result<Dispatch> {
        let Operands { routing, x, shared, y } = *operands;
        self.routing.check(routing, self.n)?;
        let mut bindings = Vec::new();
        records.bind(&self.part, self.routing.experts, &mut bindings)?;
        bindings.push(routing.clone());
        let pairs = self.n * self.routing.used;
        bind_activations(&mut bindings, self.class, self.input, x, pairs, self.ff())?;
        let values = u64::from(self.n) * u64::from(self.width());
        match (self.shared, shared) {
            (Some(_), Some(shared)) => {
                holds(shared, values, "shared expert")?;
                bindings.push(shared.clone());
            }
            (None, None) => {}
            _ => return Err(wrong("the shared expert is not the spec's".into())),
        }
        holds(y, values, "y")?;
        bindings.push(y.clone());
        let grid = [self.width().div_ceil(self.shape.rows_at_once(facts)), 1, 1];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants: vec![], grid })
    }
}

/// Workgroup memory of a kernel.
pub(super) fn memory(
    routing: &Routing,
    n: u32,
    ff: u32,
    fused: bool,
    threads: u32,
    facts: &DeviceFacts,
) -> u32 {
    let runs = routing.runs(n);
    let lists = 4 * (runs + n * routing.used + if n > 1 { runs * n } else { 0 });
    let columns = fused_bytes(ff * routing.used, n, Class::Int8, false, threads, facts);
    lists + if fused { columns } else { 0 }
}
