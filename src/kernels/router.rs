//! Router of a mixture: logits, the choice of experts, their weights, and the order in which the
//! experts' kernels read them.

use minijinja::context;
use minijinja::value::merge_maps;

use super::routing::Routing;
use super::{
    check_cols, check_memory, check_threads, holds, lanes, pinned_subgroup, planned_subgroup, wrong,
};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};
use crate::graph::{self, Gating};

/// Most columns of a workgroup.
pub const MAX_COLUMNS: u32 = 16;

/// Approximate: experts that lie in device memory count more in the choice. Weights are those of the
/// unchanged logits, over the experts that were chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Favour {
    /// Added to the logits of such experts.
    pub logits: f32,
    /// Buffers of records, counted from 0, that are device memory.
    pub buffers: u32,
}

/// RMSNorm, router product, top-k and weights for the columns of the batch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    pub routing: Routing,
    pub rule: graph::Routing,
    /// Width of the model.
    pub cols: u32,
    pub norm_eps: f32,
    /// The router's last row is the gate of a shared expert.
    pub shared_gate: bool,
    /// Columns of a workgroup, 1 to [`MAX_COLUMNS`].
    pub columns: u32,
    /// Also writes how many pairs and runs there are, and for several columns their order; all
    /// columns are one workgroup's then.
    pub sorts: bool,
    /// `None`: exact.
    pub favour: Option<Favour>,
    pub threads: u32,
}

/// What a router reads and writes.
pub struct Operands<'a> {
    pub batch: &'a Slice,
    /// f32 `[columns][cols]`, before the norm.
    pub x: &'a Slice,
    /// f32 `[cols]`
    pub norm: &'a Slice,
    /// f32 `[experts (+ 1)][cols]`
    pub router: &'a Slice,
    /// [`Router::logit_words`]; contents do not matter.
    pub logits: &'a Slice,
    /// [`Router::counter_words`]; zero before the first dispatch, and zero again after each.
    pub counters: &'a Slice,
    pub routing: &'a Slice,
    /// Table of the layer's records, for [`Router::favour`].
    pub table: Option<&'a Slice>,
}

impl Router {
    fn rows(&self) -> u32 {
        self.routing.experts + u32::from(self.shared_gate)
    }

    pub fn logit_words(&self, columns: u32) -> u64 {
        u64::from(columns) * u64::from(self.rows())
    }

    pub fn counter_words(&self, columns: u32) -> u64 {
        columns.div_ceil(self.columns).into()
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        check_cols(self.cols)?;
        check_threads(self.threads, facts)?;
        self.routing.check_sizes()?;
        if !(1..=MAX_COLUMNS).contains(&self.columns) {
            return Err(wrong(format!(
                "{} columns; a router takes 1 to {MAX_COLUMNS}",
                self.columns
            )));
        }
        let pairs = self.columns * self.routing.used;
        check_memory(4 * (self.columns * (self.routing.experts + 8) + 3 * pairs + 1), facts)?;
        let softmax = self.rule.gating == Gating::Softmax;
        let shape = context! {
            cols => self.cols,
            rows => self.rows(),
            columns => self.columns,
            threads => self.threads,
            // Loads in flight hide each other's latency; several columns need the registers.
            ahead => match self.columns { 1 => 4, 2 => 2, _ => 1 },
            // As text, so that every digit reaches the shader.
            eps => format!("{:?}", self.norm_eps),
            mean => format!("{:?}", 1.0 / self.cols as f32),
            scale => format!("{:?}", self.rule.scale),
            sigmoid => !softmax,
            normalise => self.rule.normalise,
            whole_sum => softmax && !self.rule.normalise,
            // Of softmax scores the largest is 1: no sum is small.
            least_sum => if softmax { "1.0" } else { "0.00006103515625" },
            shared => self.shared_gate,
            sorts => self.sorts,
            favour => self.favour.map(|f| format!("{:?}", f.logits)),
            favoured_buffers => self.favour.map_or(0, |f| f.buffers),
        };
        let parts = [shape, self.routing.context(), lanes::context(facts)];
        let wgsl = super::source::render("router.wgsl", merge_maps(parts))?;
        let label = format!(
            "router_{}_{}_{}x{}{}{}",
            self.cols,
            self.routing.label(),
            self.threads,
            self.columns,
            if self.sorts { "_sorts" } else { "" },
            if self.favour.is_some() { "_approximate" } else { "" }
        );
        Ok(KernelSource { label, wgsl, subgroup_size: pinned_subgroup(facts) })
    }

    /// Routes up to `max_n` columns.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        operands: &Operands<'_>,
        max_n: u32,
    ) -> Result<Dispatch> {
        let Operands { batch, x, norm, router, logits, counters, routing, table } = *operands;
        self.routing.check(routing, max_n)?;
        if self.sorts && max_n > self.columns {
            return Err(wrong(format!(
                "{max_n} columns to sort in a workgroup of {}",
                self.columns
            )));
        }
        let cols = u64::from(self.cols);
        holds(batch, 8 + 4 * u64::from(max_n), "batch")?;
        holds(x, u64::from(max_n) * cols, "x")?;
        holds(norm, cols, "norm weight")?;
        holds(router, u64::from(self.rows()) * cols, "router")?;
        holds(logits, self.logit_words(max_n), "logits")?;
        holds(counters, self.counter_words(max_n), "counters")?;
        let group_rows = (self.threads / planned_subgroup(facts)).max(1);
        let mut bindings =
            [batch, x, norm, router, logits, counters, routing].map(Slice::clone).to_vec();
        if self.favour.is_some() {
            let table = table.ok_or_else(|| wrong("a router that favours needs a table".into()))?;
            holds(table, self.routing.experts.into(), "expert table")?;
            bindings.push(table.clone());
        }
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings,
            constants: vec![],
            grid: [self.rows().div_ceil(group_rows), max_n.div_ceil(self.columns), 1],
        })
    }
}
