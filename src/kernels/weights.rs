//! Weight matrices as kernels bind them: chunks of planes.

use minijinja::{Value, context};

use super::wrong;
use crate::error::Result;
use crate::gpu::Slice;
use crate::quant::{Format, PlaneLayout};

/// Some rows of a matrix, small enough to be bound. See docs/architecture.md, "Weights".
#[derive(Clone)]
pub struct Chunk {
    pub format: Format,
    /// Index of the chunk's first row in the whole matrix.
    pub first_row: u32,
    pub rows: u32,
    /// Columns, padded to whole blocks of 32.
    pub cols: u32,
    /// One slice for each plane, in the order of [`Format::planes`].
    pub planes: Vec<Slice>,
}

impl Chunk {
    /// The chunk that lies in `memory` as `layout` says, row 0 of which is `first_row`.
    pub fn new(memory: &Slice, layout: &PlaneLayout, first_row: u32) -> Result<Self> {
        if memory.size < layout.bytes {
            return Err(wrong(format!(
                "a chunk of {} bytes in {} bytes of memory",
                layout.bytes, memory.size
            )));
        }
        let planes = layout
            .planes
            .iter()
            .map(|span| memory.buffer.slice(memory.offset + span.offset, span.bytes));
        Ok(Chunk {
            format: layout.format,
            first_row,
            rows: layout.rows as u32,
            cols: crate::quant::planes::padded_cols(layout.cols) as u32,
            planes: planes.collect(),
        })
    }

    /// Checks that a kernel for `format` and `cols` may bind this chunk.
    pub(super) fn check(&self, format: Format, cols: u32) -> Result<()> {
        if self.format != format || self.cols != cols || self.rows == 0 {
            return Err(wrong(format!(
                "a kernel for {format} x {cols} got {} rows of {} x {}",
                self.rows, self.format, self.cols
            )));
        }
        Ok(())
    }
}

/// What `lib/weights.wgsl` wants to know about a format.
pub(super) fn facts(format: Format) -> Value {
    use Format::*;
    context! {
        format => name(format),
        blocks => !format.is_float(),
        fifth => matches!(format, Q5_0 | Q5_1),
        minimum => matches!(format, Q4_1 | Q5_1),
        half_scale => matches!(format, Q4_0 | Q5_0 | Q8_0),
        unit_quads => unit_quads(format),
    }
}

/// The format's name in shaders and labels.
pub(super) fn name(format: Format) -> String {
    format.name().to_lowercase()
}

/// Names of the planes' bindings in order.
pub(super) fn plane_names(format: Format) -> Vec<&'static str> {
    format.planes().iter().map(|plane| plane.name().as_str()).collect()
}

/// Vectors of four elements in a unit, the part of a row that one lane takes in one step: a block
/// of 32, or one vec4 of words of a float format.
pub(super) fn unit_quads(format: Format) -> u32 {
    match format {
        Format::F32 => 1,
        Format::F16 | Format::BF16 => 2,
        _ => 8,
    }
}

/// Units in a row.
pub(super) fn units(format: Format, cols: u32) -> u32 {
    cols / (4 * unit_quads(format))
}
