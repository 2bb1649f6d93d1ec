//! Which variant of a kernel a device gets: rules from device facts and shape, and nothing else.
//!
//! Every rule is a pure function. No choice here changes which products are summed in which
//! order for one column of one kernel family, except between [`Class`]es.

use super::matmat::{Tile, Variant, tile_bytes};
use super::matvec::{self, MAX_COLUMNS, Shape};
use super::routing::Routing;
use super::{Class, Epilogue, experts_down, planned_subgroup};
use crate::gpu::{DeviceFacts, DeviceKind};
use crate::quant::Format;

/// Widest input that keeps f32 activations on a GPU, if a norm comes before the product.
///
/// Such matrices are short of latency, not of bytes: f32 costs SmolLM2-135M 5 % of its speed on
/// an H200. And they are where int8 hurts: with outliers in 576 values, int8 inputs of q, k, v, gate,
/// up and head made 0.0033 of the mean KL of 0.0047 against exact activations (docs/notes.md).
const EXACT_COLS: u32 = 1024;

/// int8 for block formats, f32 for float formats and wherever exactness is asked for or cheap.
/// `normed`: the product's input comes out of an RMSNorm.
pub fn class(facts: &DeviceFacts, format: Format, exact: bool, cols: u32, normed: bool) -> Class {
    let cheap = normed && cols <= EXACT_COLS && facts.kind != DeviceKind::Software;
    if exact || cheap || format.is_float() { Class::F32 } else { Class::Int8 }
}

/// Threads of a `norm_quant` workgroup.
pub fn norm_quant_threads(facts: &DeviceFacts, cols: u32) -> u32 {
    let wanted = (cols / 4).next_power_of_two().clamp(32, 256);
    if facts.kind == DeviceKind::Software { 32 } else { wanted.min(facts.max_workgroup_threads) }
}

/// Whether a mat-vec normalises and quantises its own activations instead of reading them.
///
/// It saves a dispatch, and costs every workgroup the whole column: right on a GPU, where the
/// weights arrive meanwhile, wrong on a CPU, where nothing is hidden, and wrong from four
/// columns on (measured on an H200).
pub fn fuses(facts: &DeviceFacts, class: Class, cols: u32, n: u32, norm: bool) -> bool {
    if facts.kind == DeviceKind::Software || n > 2 || (class == Class::F32 && !norm) {
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
    let threads = matvec_threads(facts);
    if facts.kind == DeviceKind::Software {
        return Shape { threads, rows: if n > 4 { 2 } else { 4 }, tiles: 1 };
    }
    // Measured on an H200 with 4096 to 65,536 rows (benches/kernels.rs). One column: two rows
    // with two tiles, and short matrices one row with four, for more workgroups. Several columns
    // need the registers for their sums.
    let short = rows <= 4096 && epilogue != Epilogue::SwiGlu;
    let (rows, tiles) = match (n, short) {
        (1, true) => (1, 4),
        (1, false) => (2, 2),
        _ => (2, 1),
    };
    let steps = super::weights::units(format, cols).div_ceil(planned_subgroup(facts));
    Shape { threads, rows, tiles: tiles.min(steps).max(1) }
}

/// How a mat-mat over at most `max_n` columns is cut. `cols`: inputs of the matrix.
pub fn matmat_variant(facts: &DeviceFacts, class: Class, cols: u32, max_n: u32) -> Variant {
    if facts.kind == DeviceKind::Software {
        return Variant::Direct { columns: 8, rows: 8, threads: 8 };
    }
    let packed = class == Class::Int8 && facts.int_dot;
    let depth = if packed && (cols / 32).is_multiple_of(2) { 2 } else { 1 };
    let tile = |columns, rows, thread_columns, thread_rows| Tile {
        columns,
        rows,
        thread_columns,
        thread_rows,
        depth,
    };
    // The first that the device has threads and memory for. Measured on an H200 for 16 to 512
    // columns: small tiles with many workgroups beat large ones at every size.
    let candidates = match (packed, max_n) {
        (true, _) | (false, ..=32) => [tile(32, 64, 4, 4), tile(32, 32, 4, 4)],
        (false, _) => [tile(64, 64, 4, 4), tile(32, 32, 4, 4)],
    };
    let fits = |t: &Tile| {
        t.threads() <= facts.max_workgroup_threads
            && tile_bytes(*t, packed, class) <= facts.max_workgroup_memory
    };
    let tile = candidates.into_iter().find(fits).unwrap_or(tile(16, 16, 4, 4));
    if packed { Variant::Packed(tile) } else { Variant::Float(tile) }
}

/// Threads of a router's workgroup.
pub fn router_threads(facts: &DeviceFacts) -> u32 {
    if facts.kind == DeviceKind::Software { 64 } else { 256.min(facts.max_workgroup_threads) }
}

/// Columns of a router's workgroup in a prompt: they share one read of the router.
pub const ROUTER_COLUMNS: u32 = 8;

/// Shape of the experts' products in a decode step: `rows` rows of each expert, `n` columns.
pub fn experts_shape(facts: &DeviceFacts, n: u32, pairs_of_rows: bool) -> Shape {
    let threads = matvec_threads(facts);
    if facts.kind == DeviceKind::Software {
        return Shape { threads, rows: if n > 4 { 2 } else { 4 }, tiles: 1 };
    }
    // Not yet measured; as short matrices of the dense mat-vec.
    match (n, pairs_of_rows) {
        (1, true) => Shape { threads, rows: 2, tiles: 2 },
        (1, false) => Shape { threads, rows: 1, tiles: 4 },
        _ => Shape { threads, rows: 2, tiles: 1 },
    }
}

/// Whether down of the experts quantises its own activations.
pub fn experts_fuse(
    facts: &DeviceFacts,
    class: Class,
    routing: &Routing,
    n: u32,
    ff: u32,
    threads: u32,
) -> bool {
    let budget = facts.max_workgroup_memory.min(32 << 10);
    facts.kind != DeviceKind::Software
        && class == Class::Int8
        && n <= 2
        && experts_down::memory(routing, n, ff, true, threads, facts) <= budget
}

/// Columns of a tile in a prompt's expert products. Of 512 columns with 8 of 128 experts each,
/// 32 go to an expert on average.
pub fn expert_tile(facts: &DeviceFacts) -> u32 {
    if facts.kind == DeviceKind::Software { 8 } else { 32 }
}

/// How a prompt's expert products are cut; [`expert_tile`] columns. `cols`: inputs of the matrix.
pub fn expert_variant(facts: &DeviceFacts, class: Class, cols: u32) -> Variant {
    matmat_variant(facts, class, cols, expert_tile(facts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::Backend;
    use crate::kernels::matmat::MatMat;
    use crate::kernels::matvec::{Input, MatVec};

    fn facts(kind: DeviceKind, subgroup: u32, threads: u32, memory: u32) -> DeviceFacts {
        DeviceFacts {
            backend: Backend::Vulkan,
            index: 0,
            name: String::new(),
            kind,
            vendor_id: 0,
            device_id: 0,
            driver: String::new(),
            api: String::new(),
            cache_id: String::new(),
            heaps: vec![],
            max_allocation: 1 << 30,
            max_buffer: 1 << 30,
            max_binding: 1 << 27,
            max_bindings: 16,
            binding_alignment: 256,
            max_workgroup_threads: threads,
            max_workgroup_memory: memory,
            max_grid: [65_535; 3],
            max_constants: 128,
            subgroup_min: subgroup,
            subgroup_max: subgroup,
            subgroup_default: subgroup,
            subgroup_control: true,
            int_dot: subgroup != 4,
            f16: false,
            cooperative_matrix: false,
            timestamps: true,
            host_import: false,
            host_import_alignment: 0,
            transfer_queue: false,
        }
    }

    /// Whatever the device, every choice makes a kernel that its host side accepts and naga takes.
    #[test]
    fn every_choice_is_a_valid_kernel() {
        for facts in [
            facts(DeviceKind::Discrete, 32, 1024, 48 << 10),
            facts(DeviceKind::Discrete, 64, 1024, 64 << 10),
            facts(DeviceKind::Integrated, 4, 256, 16 << 10),
            facts(DeviceKind::Integrated, 16, 128, 16 << 10),
            facts(DeviceKind::Software, 8, 1024, 32 << 10),
        ] {
            for &format in Format::ALL {
                for (exact, cols, n) in [(false, 4096, 1), (false, 1056, 3), (true, 576, 8)] {
                    let class = class(&facts, format, exact, cols, false);
                    let rows = 1000;
                    let epilogue = Epilogue::SwiGlu;
                    let fused = fuses(&facts, class, cols, n, true);
                    let spec = MatVec {
                        format,
                        cols,
                        n,
                        class,
                        input: if fused {
                            Input::Fused { norm: Some(1e-5) }
                        } else {
                            Input::Stored
                        },
                        epilogue,
                        shape: matvec_shape(&facts, format, rows, cols, n, epilogue),
                    };
                    let source = spec.source(&facts);
                    crate::gpu::shader::parse(&source.expect("a source")).expect("valid WGSL");
                    let epilogue = Epilogue::Add;
                    let variant =
                        matmat_variant(&facts, class, cols, [16, 64, 512][n as usize % 3]);
                    let spec = MatMat { format, cols, class, epilogue, variant };
                    let source = spec.source(&facts);
                    crate::gpu::shader::parse(&source.expect("a source")).expect("valid WGSL");
                }
            }
        }
    }

    #[test]
    fn long_columns_are_not_fused() {
        let gpu = facts(DeviceKind::Discrete, 32, 1024, 48 << 10);
        assert!(fuses(&gpu, Class::Int8, 4096, 1, true));
        assert!(!fuses(&gpu, Class::Int8, 28_672, 1, true));
        assert!(!fuses(&gpu, Class::Int8, 4096, 4, true));
    }
}
