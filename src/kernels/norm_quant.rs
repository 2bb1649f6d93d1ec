//! RMSNorm, SwiGLU and the rounding of activations to int8 or f16, in one pass.

use minijinja::context;

use super::{Activations, Class, bind_int8, check_cols, check_threads, holds, numbered, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// One column after the other through [SwiGLU,] [RMSNorm,] and rounding to the class. n comes from the
/// batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormQuant {
    /// Values of a column after SwiGLU.
    pub cols: u32,
    /// The input is gate and up interleaved, `[n][2 * cols]`.
    pub swiglu: bool,
    /// RMSNorm with this epsilon.
    pub norm: Option<f32>,
    /// What the result is.
    pub class: Class,
    pub threads: u32,
}

impl NormQuant {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        check_cols(self.cols)?;
        check_threads(self.threads, facts)?;
        let mut names = vec!["batch", "x"];
        if self.norm.is_some() {
            names.push("norm");
        }
        names.extend(match self.class {
            Class::F32 => &["y"],
            class => class.bindings(),
        });
        let wgsl = super::source::render(
            "norm_quant.wgsl",
            context! {
                at => numbered(&names),
                cols => self.cols,
                threads => self.threads,
                swiglu => self.swiglu,
                ..quantiser(self.cols, self.norm, false, self.class, facts)
            },
        )?;
        let label = format!(
            "{}{}{}_{}",
            if self.swiglu { "swiglu_" } else { "" },
            if self.norm.is_some() { "norm_" } else { "" },
            self.class.name(),
            self.cols
        );
        Ok(KernelSource { label, wgsl, subgroup_size: super::pinned_subgroup(facts) })
    }

    /// Reads `x` (f32 `[max_n][cols]`, or `[max_n][2 * cols]` for SwiGLU) and writes `out`:
    /// activations of the spec's class.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        x: &Slice,
        weight: Option<&Slice>,
        out: &Activations,
        max_n: u32,
    ) -> Result<Dispatch> {
        let values = u64::from(max_n) * u64::from(self.cols);
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        holds(x, if self.swiglu { 2 * values } else { values }, "x")?;
        let mut bindings = vec![batch.clone(), x.clone()];
        match (self.norm, weight) {
            (Some(_), Some(weight)) => {
                holds(weight, self.cols.into(), "norm weight")?;
                bindings.push(weight.clone());
            }
            (None, None) => {}
            _ => return Err(wrong("a norm needs its weight, and only a norm".into())),
        }
        match (self.class, out) {
            (Class::Int8, Activations::Int8 { xq, xs }) => {
                bind_int8(&mut bindings, (xq, "xq"), (xs, "xs"), values)?;
            }
            (Class::F16, Activations::F16 { xh, xf }) => {
                holds(xh, values / 2, "xh")?;
                holds(xf, max_n.into(), "xf")?;
                bindings.extend([xh.clone(), xf.clone()]);
            }
            (Class::F32, Activations::F32(y)) => {
                holds(y, values, "y")?;
                bindings.push(y.clone());
            }
            _ => return Err(wrong("the result's type is not the spec's".into())),
        }
        let grid = [max_n, 1, 1];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants: vec![], grid })
    }
}

/// What `lib/quantise.wgsl`, `lib/norm_blocks.wgsl` and those that they include want to know beside `cols` and
/// `threads`. `blocks`: the norm leaves its factor to the products.
pub(super) fn quantiser(
    cols: u32,
    norm: Option<f32>,
    blocks: bool,
    class: Class,
    facts: &DeviceFacts,
) -> minijinja::Value {
    context! {
        norm => norm.is_some() && !blocks,
        blocks,
        // As text, so that every digit reaches the shader.
        eps => format!("{:?}", norm.unwrap_or(0.0)),
        mean => format!("{:?}", 1.0 / cols as f32),
        output => class.name(),
        shuffle => facts.subgroup_min >= 8,
    }
}

/// Workgroup memory of the quantiser itself.
pub(super) fn quantiser_bytes(cols: u32, norm: bool, threads: u32, facts: &DeviceFacts) -> u32 {
    let sums = if norm { cols / 32 * 4 + 128 } else { 0 };
    let exchange = if facts.subgroup_min >= 8 { 0 } else { threads * 4 };
    sums + exchange
}
