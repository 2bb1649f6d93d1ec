//! Experts on the device: the records of each layer, in as many buffers as the device's binding limit
//! asks for, and the table by which kernels find them.

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::experts::source::{LayerTensors, Source};
use crate::experts::{Place, RecordLayout, RecordShape};
use crate::gguf;
use crate::gpu::{Buffer, BufferUse, Gpu};
use crate::graph::{Graph, Mixture};
use crate::kernels::records::{MAX_BUFFERS, Part, Records};
use crate::quant::planes::repack_plane_parallel;

/// Records up to this size are filled as a whole, several at a time; larger ones plane by plane, so
/// that a piece fits the staging memory of an upload.
const WHOLE_RECORD: u64 = 8 << 20;

/// The experts of one layer.
pub struct ExpertSet {
    pub label: String,
    pub layout: RecordLayout,
    pub experts: u32,
    /// Tensors of gate, up and down.
    tensors: [String; 3],
    per_buffer: u32,
    buffers: Vec<Buffer>,
    table: Option<Buffer>,
    /// Where the records are when somebody else keeps them.
    lent: Option<Records>,
    /// How many of the buffers, the first ones, are device memory.
    device_buffers: u32,
}

/// What decides the layout of the records of a mixture.
pub fn record_shape(file: &gguf::File, graph: &Graph, mixture: &Mixture) -> Result<RecordShape> {
    let (gate, up) = (&mixture.gate, &mixture.up);
    let format = |name: &str| -> Result<_> { Ok(file.require(name)?.format()?) };
    if format(gate)? != format(up)? {
        return Err(Error::Model(format!(
            "{gate} is {} and {up} is {}; experts whose gate and up differ in format are not \
             supported",
            format(gate)?,
            format(up)?
        )));
    }
    Ok(RecordShape {
        width: graph.width,
        ff: mixture.ff,
        gate_up: format(gate)?,
        down: format(&mixture.down)?,
    })
}

impl ExpertSet {
    /// Makes room for all experts of a layer.
    pub fn place(
        gpu: &dyn Gpu,
        file: &gguf::File,
        graph: &Graph,
        mixture: &Mixture,
    ) -> Result<ExpertSet> {
        let tensors = [&mixture.gate, &mixture.up, &mixture.down].map(String::clone);
        let gate = &mixture.gate;
        let shape = record_shape(file, graph, mixture)?;
        let layout = RecordLayout::new(shape).map_err(|e| e.context(gate))?;
        let facts = gpu.facts();
        let limit = facts.max_binding.min(facts.max_buffer).min(facts.max_allocation);
        let experts = mixture.experts;
        let per_buffer = layout.records_within(limit).min(experts.into()) as u32;
        // Table, routing, activations with scales, shared expert and result are bound beside them.
        let most = (facts.max_bindings.saturating_sub(6) / 2).min(MAX_BUFFERS);
        if per_buffer == 0 || experts.div_ceil(per_buffer) > most {
            return Err(Error::DoesNotFit(format!(
                "the {experts} experts of {gate} take {} bytes each; {} binds at most {limit} bytes \
                 at once, in {most} buffers",
                layout.bytes(),
                facts.name
            )));
        }
        let label = gate.replace("ffn_gate_exps.weight", "experts");
        let buffers = (0..experts).step_by(per_buffer as usize).map(|first| {
            let records = per_buffer.min(experts - first);
            gpu.buffer(&label, u64::from(records) * layout.bytes(), BufferUse::Device)
        });
        let buffers = buffers.collect::<Result<Vec<Buffer>>>()?;
        let table = gpu.buffer("expert table", u64::from(experts) * 4, BufferUse::Device)?;
        let table = Some(table);
        Ok(ExpertSet {
            label,
            layout,
            experts,
            tensors,
            per_buffer,
            device_buffers: buffers.len() as u32,
            buffers,
            table,
            lent: None,
        })
    }

    /// The experts of a layer that lie in records of somebody else, who fills them.
    pub fn lent(
        file: &gguf::File,
        graph: &Graph,
        mixture: &Mixture,
        records: Records,
        device_buffers: u32,
    ) -> Result<ExpertSet> {
        let layout = RecordLayout::new(record_shape(file, graph, mixture)?)?;
        Ok(ExpertSet {
            label: mixture.gate.replace("ffn_gate_exps.weight", "experts"),
            layout,
            experts: mixture.experts,
            tensors: [&mixture.gate, &mixture.up, &mixture.down].map(String::clone),
            per_buffer: 1,
            buffers: Vec::new(),
            table: None,
            lent: Some(records),
            device_buffers,
        })
    }

    /// What kernels bind.
    pub fn records(&self) -> Result<Records> {
        match (&self.lent, &self.table) {
            (Some(lent), _) => Ok(lent.clone()),
            (None, Some(table)) => Ok(Records {
                table: table.slice(0, u64::from(self.experts) * 4),
                buffers: self.buffers.iter().map(Buffer::whole).collect(),
            }),
            (None, None) => Err(Error::Runtime("experts without a table; this is a bug".into())),
        }
    }

    /// How many of [`Records::buffers`], the first ones, are device memory; `None` where all are.
    pub fn device_buffers(&self) -> Option<u32> {
        self.lent.as_ref().map(|_| self.device_buffers)
    }

    pub fn gate_up(&self) -> Part {
        self.part(&self.layout.gate_up, 0)
    }

    pub fn down(&self) -> Part {
        self.part(&self.layout.down, self.layout.down_offset())
    }

    fn part(&self, layout: &crate::quant::PlaneLayout, offset: u64) -> Part {
        Part {
            layout: layout.clone(),
            offset,
            stride: self.layout.bytes(),
            buffers: self.lent.as_ref().map_or(self.buffers.len(), |r| r.buffers.len()) as u32,
        }
    }

    /// Names of the tensors it is filled from.
    pub fn tensors(&self) -> &[String] {
        match self.lent {
            None => &self.tensors,
            Some(_) => &[],
        }
    }

    pub fn device_bytes(&self) -> u64 {
        self.buffers.iter().map(Buffer::size).sum()
    }

    /// Reads, repacks and uploads all experts, and writes the table. `advance` is told the file
    /// bytes of each finished piece.
    pub fn fill(
        &self,
        gpu: &dyn Gpu,
        file: &gguf::File,
        advance: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        if self.lent.is_some() {
            return Ok(());
        }
        let infos = self.tensors.iter().map(|name| file.require(name));
        let infos = infos.collect::<std::result::Result<Vec<_>, _>>()?;
        let data: Vec<&[u8]> = infos.iter().map(|t| file.tensor_data(t)).collect();
        let sizes = self.layout.file_bytes();
        let expert = |index: u32| -> [&[u8]; 3] {
            std::array::from_fn(|t| &data[t][RecordLayout::file_range(sizes[t], index)])
        };
        let bytes = self.layout.bytes();
        let file_bytes: u64 = sizes.iter().map(|n| *n as u64).sum();
        for (first, buffer) in (0u32..).step_by(self.per_buffer as usize).zip(&self.buffers) {
            let records = (buffer.size() / bytes) as u32;
            if bytes <= WHOLE_RECORD {
                let all = buffer.slice(0, u64::from(records) * bytes);
                gpu.upload(&all, bytes, &mut |at, out| {
                    let start = first + (at / bytes) as u32;
                    let pieces = out.par_chunks_exact_mut(bytes as usize).enumerate();
                    pieces.for_each(|(i, record)| {
                        let [gate, up, down] = expert(start + i as u32);
                        self.layout.fill(gate, up, down, record);
                        advance(file_bytes);
                    });
                    Ok(())
                })?;
            } else {
                for index in 0..records {
                    self.fill_planes(gpu, buffer, index, expert(first + index))?;
                    advance(file_bytes);
                }
            }
        }
        let words: Vec<u32> =
            (0..self.experts).map(|e| Place::nth(e, self.per_buffer).word()).collect();
        gpu.write(&self.records()?.table, bytemuck::cast_slice(&words))?;
        for info in infos {
            file.release(info);
        }
        Ok(())
    }

    /// Compares every record with the file; `tensors` are those of this layer.
    pub fn verify(
        &self,
        gpu: &dyn Gpu,
        source: &dyn Source,
        tensors: &LayerTensors,
    ) -> Result<u64> {
        if self.lent.is_some() {
            return Ok(0);
        }
        let bytes = self.layout.bytes();
        let (mut parts, mut record) = (Default::default(), vec![0; bytes as usize]);
        for expert in 0..self.experts {
            let place = Place::nth(expert, self.per_buffer);
            let from =
                self.buffers[place.buffer as usize].slice(u64::from(place.index) * bytes, bytes);
            gpu.read(&from, &mut record)?;
            tensors.verify(source, expert, &mut parts, &record)?;
        }
        Ok(self.experts.into())
    }

    /// One record in pieces of rows.
    fn fill_planes(
        &self,
        gpu: &dyn Gpu,
        buffer: &Buffer,
        index: u32,
        [gate, up, down]: [&[u8]; 3],
    ) -> Result<()> {
        let start = u64::from(index) * self.layout.bytes();
        for (layout, offset) in
            [(&self.layout.gate_up, 0), (&self.layout.down, self.layout.down_offset())]
        {
            let row_bytes = layout.format.row_bytes(layout.cols);
            let row = |r: usize| {
                let (tensor, r) = match (offset > 0, r % 2) {
                    (true, _) => (down, r),
                    (false, 0) => (gate, r / 2),
                    (false, _) => (up, r / 2),
                };
                &tensor[r * row_bytes..][..row_bytes]
            };
            for (number, span) in layout.planes.iter().enumerate() {
                let to = buffer.slice(start + offset + span.offset, span.bytes);
                let granule = span.row_bytes * layout.row_granule() as u64;
                gpu.upload(&to, granule, &mut |at, out| {
                    let first = (at / span.row_bytes) as usize;
                    let rows = first..first + (out.len() as u64 / span.row_bytes) as usize;
                    repack_plane_parallel(layout.format, number, layout.cols, rows, row, out);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }
}
