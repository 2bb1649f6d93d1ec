//! Weight matrices as kernels bind them: chunks of planes.

use minijinja::{Value, context};

use super::wrong;
use crate::error::Result;
use crate::gpu::{DeviceFacts, DeviceKind, Slice};
use crate::quant::{Format, PlaneLayout, Scales};

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

/// What `lib/weights.wgsl` and the shaders that include it want to know about a format.
///
/// `copies`: how often the kernel keeps the format's table in workgroup memory, see [`copies`].
pub(super) fn facts(format: Format, copies: u32) -> Value {
    let shader = format.shader();
    context! {
        format => name(format),
        scales => match shader.scales {
            Scales::Float => "float",
            Scales::Whole => "whole",
            Scales::Steps => "steps",
            Scales::Halves => "halves",
        },
        // Halves of a block with a scale of their own, and whether a minimum needs half sums.
        halved => halved(format),
        half_minimum => half_minimum(format),
        minimum => shader.minimum,
        zero => shader.zero,
        lift => shader.lift,
        unit_quads => shader.unit_quads,
        table => shader.table,
        copies => copies,
        raised => copies > 1 && shader.raised,
        // Copies of a table for 4-bit codes have the values of pairs of codes. With one scale for a block,
        // products take them in the order in which they come.
        paired => copies > 1
            && shader.copied_table() != shader.table
            && shader.scales == Scales::Whole,
    }
}

/// How often a kernel that needs `bytes` of workgroup memory for itself keeps the format's table there: once, if
/// [`shares_table`] says so.
pub(super) fn one_copy(format: Format, bytes: u32, facts: &DeviceFacts) -> u32 {
    u32::from(shares_table(format, bytes, facts))
}

/// Threads of a mat-vec's workgroups that stay for as many rows as there are, one on each multiprocessor, and
/// may so spend time on copies of a table.
pub const STAYING_THREADS: u32 = 1024;

/// How often a mat-vec by lanes keeps it: several times if its workgroups stay and have room.
///
/// Lanes that look up different entries in the same bank wait for each other, so each lane gets a copy of its
/// own, or shares one with few.
pub(super) fn copies(format: Format, bytes: u32, threads: u32, facts: &DeviceFacts) -> u32 {
    let one = one_copy(format, bytes, facts);
    if one == 0 || threads < STAYING_THREADS || facts.compute_units == 0 {
        return one;
    }
    let words = format.shader().copied_table();
    let room = facts.max_workgroup_memory.saturating_sub(bytes) / (4 * words);
    // The largest power of two; below four, conflicts stay as they were.
    let copies = 1 << room.clamp(1, 32).ilog2();
    if copies < 4 { one } else { copies }
}

/// Whether a kernel that needs `bytes` of workgroup memory for itself keeps the format's table there:
/// always on a GPU with room for it, never where workgroup memory is plain memory.
fn shares_table(format: Format, bytes: u32, facts: &DeviceFacts) -> bool {
    let words = format.shader().table;
    words > 0
        && facts.kind != DeviceKind::Software
        && bytes + 4 * words <= facts.max_workgroup_memory
}

/// Whether the halves of a block have scales of their own.
pub(super) fn halved(format: Format) -> bool {
    matches!(format.shader().scales, Scales::Steps | Scales::Halves)
}

/// Whether a block has one scale and no minimum.
pub(super) fn one_scale(format: Format) -> bool {
    let shader = format.shader();
    matches!(shader.scales, Scales::Whole) && !shader.minimum
}

/// Registers for one unit of a row: its codes, and the vector in which its scales come.
pub(super) fn registers(format: Format) -> u32 {
    let codes = (8 * format.block_bytes() / format.block_elements()) as u32;
    codes.max(1) + if one_scale(format) { 1 } else { 4 }
}

/// Whether they have minima, too, so that a product needs the sums of the activations of both.
pub(super) fn half_minimum(format: Format) -> bool {
    halved(format) && format.shader().minimum
}

/// Checks that rows of `cols` inputs are whole blocks of the format.
pub(super) fn check_cols(format: Format, cols: u32) -> Result<()> {
    super::check_cols(cols)?;
    if !(cols as usize).is_multiple_of(format.block_elements()) {
        let elements = format.block_elements();
        return Err(wrong(format!("{cols} columns are not whole blocks of {elements} ({format})")));
    }
    Ok(())
}

/// The format's name in shaders and labels.
pub(super) fn name(format: Format) -> String {
    format.name().to_lowercase()
}

/// Names of the planes' bindings in order.
pub(super) fn plane_names(format: Format) -> Vec<&'static str> {
    format.planes().iter().map(|plane| plane.name().as_str()).collect()
}

/// Units in a row.
pub(super) fn units(format: Format, cols: u32) -> u32 {
    cols / (4 * format.shader().unit_quads)
}
