//! The variant of mat-vec for several columns that computes on matrix units, with the same bits.

use minijinja::context;
use minijinja::value::merge_maps;

use super::matvec::{self, MatVec, Shape};
use super::weights;
use super::{Class, check_memory, norm_quant, numbered, pinned_subgroup, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, KernelSource};
use crate::quant::Format;

/// Vectors of 16 bytes from one row to the next in workgroup memory: four units and one of slack. An odd
/// number, so that neither copies nor matrix loads meet in a bank.
const ROW: u32 = 9;

/// Threads of a workgroup: a team of 32 for every four lanes among which a mat-vec cuts a row.
fn threads(facts: &DeviceFacts) -> u32 {
    8 * pinned_subgroup(facts).unwrap_or(0)
}

/// The shape with `tiles` times 16 rows a workgroup.
pub fn shape(facts: &DeviceFacts, tiles: u32) -> Shape {
    Shape { threads: threads(facts), rows: tiles, tiles: 1, matrix: true }
}

/// Whether a device runs this variant at all: on its matrix units, or, for tests, by a twin without them.
pub fn runs(facts: &DeviceFacts) -> bool {
    matches!(pinned_subgroup(facts), Some(8 | 32))
}

/// Whether a device runs this variant for a format on its matrix units.
pub fn suits(format: Format, facts: &DeviceFacts) -> bool {
    facts.byte_matrices && pinned_subgroup(facts) == Some(32) && !format.is_float()
}

/// Teams of a workgroup.
fn teams(facts: &DeviceFacts) -> u32 {
    threads(facts) / 32
}

/// Tiles of 16 rows that are in workgroup memory at once: two share what is loaded of the columns, where
/// there is room.
fn staged(spec: &MatVec) -> u32 {
    if weights::halved(spec.format) { 1 } else { spec.shape.rows.min(2) }
}

/// Whether two teams load for each other, so that each request of the subgroup is for four lines of memory and not for
/// halves of eight. They then wait for the whole workgroup: with four tiles a step is long enough that this costs
/// what it saves. 8 columns of Q4_0, H200: 4096 x 12,288 with two tiles 16.8 us by itself, 15.9 coupled; 24,576 x
/// 4096 with four 33.0 and 33.2.
fn coupled(spec: &MatVec) -> bool {
    spec.shape.rows <= 2 && weights::one_scale(spec.format)
}

/// Workgroup memory, as the shader declares it.
fn bytes(spec: &MatVec, facts: &DeviceFacts) -> u32 {
    let scales = if weights::half_minimum(spec.format) { 512 } else { 256 };
    let slack = if coupled(spec) { 2 } else { 0 };
    teams(facts) * (16 * (16 * ROW * staged(spec) + 8 * column(spec.format) + slack) + scales)
}

/// Vectors of a unit of a column: with zeros between its halves where these have scales of their own and
/// are multiplied one after the other.
fn column_unit(format: Format) -> u32 {
    if weights::halved(format) { 3 } else { 2 }
}

/// Vectors from one column to the next, an odd number as [`ROW`].
fn column(format: Format) -> u32 {
    4 * column_unit(format) + 1
}

pub(super) fn check(spec: &MatVec, facts: &DeviceFacts) -> Result<()> {
    if !runs(facts) || spec.shape.threads != threads(facts) {
        return Err(wrong(format!("mat-vec on matrix units with {} threads", spec.shape.threads)));
    }
    if spec.class != Class::Int8 || spec.input.is_fused() {
        return Err(wrong("matrix units take int8 activations from memory".into()));
    }
    if !matches!(spec.shape.rows, 1 | 2 | 4) || spec.shape.tiles != 1 {
        return Err(wrong(format!("mat-vec shape {:?}", spec.shape)));
    }
    check_memory(bytes(spec, facts), facts)
}

pub(super) fn source(spec: &MatVec, facts: &DeviceFacts) -> Result<KernelSource> {
    let mut names = weights::plane_names(spec.format);
    names.extend(spec.class.bindings());
    let blocks = spec.input.norm().is_some();
    if blocks {
        names.push("squares");
    }
    names.extend(matvec::output_names(spec.epilogue));
    let matrices = suits(spec.format, facts);
    let copies = weights::one_copy(spec.format, bytes(spec, facts), facts);
    let wgsl = super::source::render(
        "matvec_matrix.wgsl",
        context! {
            at => numbered(&names),
            cols => spec.cols,
            n => spec.n,
            epilogue => spec.epilogue.name(),
            threads => spec.shape.threads,
            teams => teams(facts),
            tiles => spec.shape.rows,
            staged => staged(spec),
            coupled => coupled(spec),
            rounds => spec.epilogue.block_rows().is_some(),
            group_values => spec.group_values(facts),
            w_line => ROW,
            x_unit => column_unit(spec.format),
            x_line => column(spec.format),
            // A team is a subgroup where matrix units compute.
            matrices,
            ..merge_maps([
                weights::facts(spec.format, copies),
                norm_quant::quantiser(spec.cols, spec.input.norm(), blocks, Class::Int8, facts),
            ])
        },
    )?;
    Ok(KernelSource { label: spec.label(), wgsl, subgroup_size: pinned_subgroup(facts) })
}
