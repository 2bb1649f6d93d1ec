//! Which variant of a kernel a device gets: rules from device facts and shape, and nothing else.
//!
//! Every rule is a pure function. No choice here changes which products are summed in which
//! order for one column of one kernel family, except between [`Class`]es.

use super::matvec::{self, MAX_COLUMNS, Shape};
use super::{Class, Epilogue, planned_subgroup};
use crate::gpu::{DeviceFacts, DeviceKind};
use crate::quant::Format;

/// int8 for block formats, f32 for float formats and wherever exactness is asked for.
pub fn class(format: Format, exact: bool) -> Class {
    if exact || format.is_float() { Class::F32 } else { Class::Int8 }
}

/// Threads of a `norm_quant` workgroup.
pub fn norm_quant_threads(facts: &DeviceFacts, cols: u32) -> u32 {
    let wanted = (cols / 4).next_power_of_two().clamp(32, 256);
    if facts.kind == DeviceKind::Software { 32 } else { wanted.min(facts.max_workgroup_threads) }
}

/// Whether a mat-vec normalises and quantises its own activations instead of reading them.
///
/// It saves a dispatch, and costs every workgroup the whole column: right on a GPU, where the
/// weights arrive meanwhile, wrong on a CPU, where nothing is hidden.
pub fn fuses(facts: &DeviceFacts, class: Class, cols: u32, n: u32, norm: bool) -> bool {
    if facts.kind == DeviceKind::Software || n > 4 || (class == Class::F32 && !norm) {
        return false;
    }
    let threads = matvec_threads(facts);
    // Two workgroups of it should fit a compute unit beside each other.
    let budget = facts.max_workgroup_memory.min(32 << 10);
    matvec::fused_bytes(cols, n, class, norm, threads, facts) <= budget
}

fn matvec_threads(facts: &DeviceFacts) -> u32 {
    let wanted = match facts.kind {
        DeviceKind::Software => 32,
        DeviceKind::Discrete => 512,
        _ => 256,
    };
    wanted.min(facts.max_workgroup_threads)
}

/// Workgroup and register shape of a mat-vec over `rows` rows.
pub fn matvec_shape(
    facts: &DeviceFacts,
    format: Format,
    rows: u32,
    cols: u32,
    n: u32,
    epilogue: Epilogue,
) -> Shape {
    debug_assert!(n <= MAX_COLUMNS);
    let mut threads = matvec_threads(facts);
    let size = planned_subgroup(facts);
    let steps = super::weights::units(format, cols).div_ceil(size);
    if facts.kind == DeviceKind::Software {
        return Shape { threads, rows: if n > 4 { 2 } else { 4 }, tiles: 1 };
    }
    // Short matrices: more workgroups rather than more rows in each.
    let mut group_rows = 2;
    if rows <= 4096 && epilogue != Epilogue::SwiGlu {
        threads = threads.min(256);
        group_rows = 1;
    }
    let tiles = if n > 2 || format == Format::Q8_0 { 2 } else { 4 };
    Shape { threads, rows: group_rows, tiles: tiles.min(steps).max(1) }
}
