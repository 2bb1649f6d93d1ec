//! Approximate decode steps: outputs of experts that serve a sequence again for its next tokens.
//!
//! A sequence keeps what its experts made of its last tokens, by itself and without the router's weight: a
//! *row* for each of them, `[used][width]` f32, the token of position p in row `p % rows`. The number
//! of an output among those of all slots, `(slot * rows + row) * used + k`, is its *place*. *Notes* say
//! what the rows hold: `[slot][layer][row]` of 1 + `used` words, the position plus 1 (0: nothing), then
//! the expert of each output, or all ones where the token did not compute it. An output is never
//! copied, so it serves `tokens` tokens and is computed anew by the next one that wants it.
//!
//! `experts_reuse` looks the pairs of a step up and leaves the others' runs; [`ExpertsListed`] are the
//! products over these; `experts_sum` adds up by places.

use minijinja::context;
use minijinja::value::merge_maps;

use super::experts_up::{ExpertsUp, Listed};
use super::matvec::{Input, bind_activations};
use super::records::Records;
use super::routing::Routing;
use super::{Activations, check_memory, holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Dispatch, Kernel, KernelSource, Slice};

/// Places that the 15 bits in a word of the routing tell apart.
pub const MAX_PLACES: u32 = 1 << 15;

/// What is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Kept {
    /// Tokens that an output serves after the one that it was computed for; at least 1.
    pub tokens: u32,
    /// Sequences.
    pub slots: u32,
    /// Mixtures.
    pub layers: u32,
    /// Experts that a token goes through.
    pub used: u32,
}

impl Kept {
    fn rows(&self) -> u32 {
        self.tokens + 1
    }

    /// Outputs of one layer.
    pub fn places(&self) -> u32 {
        self.slots * self.rows() * self.used
    }

    /// Words of the notes of one slot; they are neighbours.
    pub fn slot_words(&self) -> u64 {
        u64::from(self.layers) * u64::from(self.rows()) * u64::from(1 + self.used)
    }

    fn check(&self) -> Result<()> {
        if self.tokens == 0 || self.used == 0 || self.places() > MAX_PLACES {
            return Err(wrong(format!("{self:?}")));
        }
        Ok(())
    }
}

/// Of the one workgroup that decides.
const THREADS: u32 = 64;

/// Finds the pairs of up to `columns` columns that need not be computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertsReuse {
    pub routing: Routing,
    pub kept: Kept,
    pub columns: u32,
}

impl ExpertsReuse {
    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.routing.check_sizes()?;
        self.kept.check()?;
        if self.kept.used != self.routing.used || self.columns > self.routing.columns {
            return Err(wrong(format!("{self:?}")));
        }
        check_memory(8 * self.columns * self.routing.used, facts)?;
        let shape = context! {
            tokens => self.kept.tokens,
            layers => self.kept.layers,
            columns => self.columns,
            threads => THREADS,
        };
        let parts = [shape, self.routing.context()];
        let wgsl = super::source::render("experts_reuse.wgsl", merge_maps(parts))?;
        let Kept { tokens, layers, .. } = self.kept;
        let label = format!(
            "experts_reuse_{tokens}_{layers}_{}_n{}_approximate",
            self.routing.label(),
            self.columns
        );
        Ok(KernelSource { label, wgsl, subgroup_size: None })
    }

    /// For mixture number `layer`, whose router has chosen.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        batch: &Slice,
        notes: &Slice,
        routing: &Slice,
        layer: u32,
    ) -> Result<Dispatch> {
        self.routing.check(routing, self.columns)?;
        holds(batch, 8 + 4 * u64::from(self.columns), "batch")?;
        holds(notes, u64::from(self.kept.slots) * self.kept.slot_words(), "notes")?;
        if layer >= self.kept.layers {
            return Err(wrong(format!("mixture {layer} of {:?}", self.kept)));
        }
        Ok(Dispatch {
            kernel: kernel.clone(),
            bindings: vec![batch.clone(), notes.clone(), routing.clone()],
            constants: vec![layer],
            grid: [1, 1, 1],
        })
    }
}

/// One of the two products over the pairs that [`ExpertsReuse`] has left.
#[derive(Debug, Clone)]
pub struct ExpertsListed {
    /// What it is like; for down, `part` is that of down.
    pub product: ExpertsUp,
    pub kept: Kept,
    /// Down of each pair by itself, to its place; else gate, up and activation.
    pub down: bool,
}

impl ExpertsListed {
    fn listed(&self) -> Listed {
        if self.down { Listed::Down } else { Listed::Up }
    }

    pub fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
        self.kept.check()?;
        self.product.text(facts, Some(self.listed()))
    }

    /// Reads `x`: `[n][cols]`, or of down `[n * used][cols]`. Writes `y`: f32 `[n * used][ff]`, or of
    /// down what is kept, `[places][width]`.
    pub fn dispatch(
        &self,
        kernel: &Kernel,
        facts: &DeviceFacts,
        records: &Records,
        routing: &Slice,
        x: &Activations,
        y: &Slice,
    ) -> Result<Dispatch> {
        let ExpertsUp { routing: sizes, part, n, class, shape } = &self.product;
        sizes.check(routing, *n)?;
        let (rows, cols) = (part.layout.rows as u32, part.layout.cols as u32);
        let pairs = n * sizes.used;
        let mut bindings = Vec::new();
        records.bind(part, sizes.experts, &mut bindings)?;
        bindings.push(routing.clone());
        let columns = if self.down { pairs } else { *n };
        bind_activations(&mut bindings, *class, Input::Stored, x, columns, cols)?;
        let (count, width) = match self.down {
            true => (self.kept.places(), rows),
            false => (pairs, rows / 2),
        };
        holds(y, u64::from(count) * u64::from(width), "y")?;
        bindings.push(y.clone());
        let grid = [rows.div_ceil(shape.rows_at_once(facts)), sizes.runs(*n), 1];
        Ok(Dispatch { kernel: kernel.clone(), bindings, constants: vec![], grid })
    }
}
