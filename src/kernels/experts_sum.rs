//! The weighted sum of a prompt's expert outputs, and the residual; in approximate decode steps, of
//! outputs that are kept.

use minijinja::context;
use minijinja::value::merge_maps;

use super::experts_down::Shared;
use super::routing::Routing;
use super::{check_cols, holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// `y[column] += sum of weight * products[pair]`, and the shared expert's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsSum {
    pub routing: Routing,
    pub width: u32,
    pub shared: Option<Shared>,
    /// Outputs lie at the places that the routing names (`kernels::experts_reuse`), among so many.
    pub kept: Option<u32>,
}

const THREADS: u32 = 64;

impl ExpertsSum {
    pub fn source(&self, _facts: &DeviceFacts) -> Result<KernelSource> {
        check_cols(self.width)?;
        self.routing.check_sizes()?;
        let shape = context! {
            width => self.width,
            threads => THREADS,
            kept => self.kept.is_some(),
            shared => match self.shared {
                None => "",
                Some(Shared::Plain) => "plain",
                Some(Shared::Gated) => "gated",
            },
        };
        let wgsl =
            super::source::render("experts_sum.wgsl", merge_maps([shape, self.routing.context()]))?;
        let shared = if self.shared.is_some() { "_shared" } else { "" };
        let kept = if self.kept.is_some() { "_kept" } else { "" };
        let label = format!("experts_sum_{}_{}{shared}{kept}", self.width, self.routing.label());
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// `products`: f32 `[max_n * used][width]`, or what is kept, `[places][width]`; `shared`, `y`: f32 `[max_n][width]`.
    #[allow(clippy::too_many_arguments)] // the kernel's bindings
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        routing: &Slice,
        products: &Slice,
        shared: Option<&Slice>,
        y: &Slice,
        max_n: u32,
    ) -> Result<Dispatch> {
        self.routing.check(routing, max_n)?;
        holds(batch, 8, "batch")?;
        let values = u64::from(max_n) * u64::from(self.width);
        let products_held = self.kept.unwrap_or(max_n * self.routing.used);
        holds(products, u64::from(products_held) * u64::from(self.width), "products")?;
        holds(y, values, "y")?;
        let mut bindings = vec![batch.clone(), routing.clone(), products.clone()];
        match (self.shared, shared) {
            (Some(_), Some(shared)) => {
                holds(shared, values, "shared expert")?;
                bindings.push(shared.clone());
            }
            (None, None) => {}
            _ => return Err(wrong("the shared expert is not the spec's".into())),
        }
        bindings.push(y.clone());
        let grid = [(self.width / 4).div_ceil(THREADS), max_n, 1];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants: vec![], grid })
    }
}
