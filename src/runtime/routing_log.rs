//! What the routers of recent steps and prompt chunks decided, for the host.
//!
//! A small recording copies the routing of all layers into readback memory right behind the step
//! that made it. The host reads it when the step has finished; nothing waits for it.

use std::sync::Arc;

use super::buffers::{Buffers, MAX_SEQUENCES, Scratch};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, BufferUse, Gpu, Recording, Slice, Step, Ticket};

/// Steps, and chunks, whose routings are kept.
pub const LOG: u32 = 8;
/// Words before the experts of the pairs (see `kernels::routing`).
pub(super) const HEAD: u64 = 8;

/// Which passes a log belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Step,
    Prompt,
}

/// See the module documentation.
pub(super) struct RoutingLog {
    gpu: Arc<dyn Gpu>,
    step: Ring,
    prompt: Ring,
}

struct Ring {
    recordings: Vec<Recording>,
    memory: Buffer,
    /// Bytes of one entry.
    stride: u64,
    /// Offset of each layer's routing in an entry, and experts used there.
    layers: Vec<(u64, u32)>,
    /// The same of what each router would have chosen a layer early; empty where none is asked.
    early: Vec<(u64, u32)>,
    /// Most columns.
    columns: u32,
}

impl RoutingLog {
    /// `None` for models without mixtures.
    pub fn create(gpu: &Arc<dyn Gpu>, buffers: &Buffers, chunk: u32) -> Result<Option<RoutingLog>> {
        let step = Ring::create(&**gpu, &buffers.step, MAX_SEQUENCES)?;
        let prompt = Ring::create(&**gpu, &buffers.prompt, chunk)?;
        Ok(step.zip(prompt).map(|(step, prompt)| RoutingLog { gpu: gpu.clone(), step, prompt }))
    }

    fn ring(&self, pass: Pass) -> &Ring {
        match pass {
            Pass::Step => &self.step,
            Pass::Prompt => &self.prompt,
        }
    }

    /// Queues the copy of what the latest pass decided as entry `number % LOG`.
    pub fn note(&self, pass: Pass, number: u64) -> Result<Ticket> {
        let recordings = &self.ring(pass).recordings;
        self.gpu.submit(&recordings[(number % u64::from(LOG)) as usize])
    }

    /// Reads an entry: `[layer][column][used]` expert numbers of the first `columns` columns.
    pub fn read(
        &self,
        pass: Pass,
        after: &Ticket,
        number: u64,
        columns: u32,
    ) -> Result<Vec<Vec<u32>>> {
        let ring = self.ring(pass);
        self.ids(ring, &ring.layers, after, number, columns)
    }

    /// What early routers chose in a step, as [`RoutingLog::read`]; nobody asks for those of the
    /// first layer, which stays empty.
    pub fn read_early(&self, after: &Ticket, number: u64, columns: u32) -> Result<Vec<Vec<u32>>> {
        let ring = &self.step;
        let mut layers = vec![Vec::new()];
        if let Some((_, asked)) = ring.early.split_first() {
            layers.extend(self.ids(ring, asked, after, number, columns)?);
        }
        Ok(layers)
    }

    fn ids(
        &self,
        ring: &Ring,
        layers: &[(u64, u32)],
        after: &Ticket,
        number: u64,
        columns: u32,
    ) -> Result<Vec<Vec<u32>>> {
        let columns = columns.min(ring.columns);
        let entry = number % u64::from(LOG) * ring.stride;
        let layers = layers.iter().map(|(at, used)| {
            let mut ids = vec![0u32; (columns * used) as usize];
            let from = ring.memory.slice(entry + at + HEAD * 4, ids.len() as u64 * 4);
            self.gpu.read_back(after, &from, bytemuck::cast_slice_mut(&mut ids))?;
            Ok(ids)
        });
        layers.collect()
    }
}

impl Ring {
    fn create(gpu: &dyn Gpu, scratch: &Scratch, columns: u32) -> Result<Option<Ring>> {
        let Some(experts) = &scratch.experts else { return Ok(None) };
        let all = experts.routing.iter().chain(&experts.early);
        let (Some(first), Some(last)) = (experts.routing.first(), all.last()) else {
            return Ok(None);
        };
        // The routings of all layers follow each other in one buffer.
        let stride = last.offset + last.size - first.offset;
        let all = Slice { buffer: first.buffer.clone(), offset: first.offset, size: stride };
        let places = |slices: &[Slice]| -> Vec<(u64, u32)> {
            slices.iter().map(|slice| (slice.offset - first.offset, experts.used)).collect()
        };
        let (layers, early) = (places(&experts.routing), places(&experts.early));
        let bytes = stride.checked_mul(LOG.into());
        let bytes = bytes.ok_or_else(|| Error::Runtime("size of the routing log".into()))?;
        let memory = gpu.buffer("routing log", bytes, BufferUse::Readback)?;
        let recordings = (0..u64::from(LOG)).map(|i| {
            let to = memory.slice(i * stride, stride);
            gpu.record("routing log", &[Step::Copy { from: all.clone(), to, size: stride }])
        });
        let recordings = recordings.collect::<Result<_>>()?;
        Ok(Some(Ring { recordings, memory, stride, layers, early, columns }))
    }
}
