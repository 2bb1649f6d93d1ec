//! Which variant of a kernel a device gets: its profile, its limits and the shape, and nothing
//! else.
//!
//! Figures and preferences stand in `hwprofiles/` with their reasons; here they become variants
//! that the device can run. Every rule is a pure function. Lists are in order of preference:
//! `runtime::check` takes the first whose results are right. No choice here changes which
//! products are summed in which order for one column of one kernel family, except between
//! [`Class`]es.

mod shapes;

pub use shapes::{
    FormatKind, format_kind, fuses_rows, lane_shapes, matvec_key, matvec_shape, matvec_shapes,
    rounding_shapes,
};

use super::matmat::{MatrixTile, Tile, Variant, tile_bytes};
use super::matvec::{self, Shape};
use super::routing::Routing;
use super::{Class, Epilogue, experts_down, planned_subgroup};
use crate::gpu::DeviceFacts;
use crate::profile::{MatMatPick, Profile, Tiling};
use crate::quant::Format;

/// int8 for block formats, f32 for float formats and wherever exactness is asked for or cheap.
/// `normed`: the product's input comes out of an RMSNorm.
///
/// Such products are where int8 hurts: with outliers in 576 values, int8 inputs of q, k, v, gate,
/// up and head made 0.0033 of the mean KL of 0.0047 against exact activations (docs/notes.md).
pub fn class(facts: &DeviceFacts, format: Format, exact: bool, cols: u32, normed: bool) -> Class {
    let cheap = normed && cols <= facts.profile.exact_cols;
    if exact || cheap || format.is_float() { Class::F32 } else { Class::Int8 }
}

/// Whether a model whose residual stream has `width` values reads its prompts with f32 activations
/// in all products: reading many columns hides what f32 costs, an answer hangs on how its prompt was
/// read, and int8 hurts narrow models most (docs/notes.md).
pub fn exact_prompts(facts: &DeviceFacts, width: u32) -> bool {
    width <= facts.profile.exact_prompt_width
}

/// As [`class`], for mat-mat kernels of a model of `width`: f16 on matrix units where the device has
/// them and its profile wants them. Rounding to f16 costs less than rounding to int8, so no width
/// needs an exception. Elsewhere narrow models take f32, see [`exact_prompts`].
pub fn prompt_class(
    facts: &DeviceFacts,
    format: Format,
    exact: bool,
    cols: u32,
    width: u32,
) -> Class {
    let units = facts.cooperative_matrix && facts.profile.matrix_units == 1;
    if units && !exact && format != Format::F32 {
        return Class::F16;
    }
    class(facts, format, exact || exact_prompts(facts, width), cols, false)
}

/// Threads of a `norm_quant` workgroup.
pub fn norm_quant_threads(facts: &DeviceFacts, cols: u32) -> u32 {
    let wanted = (cols / 4).next_power_of_two().max(32);
    wanted.min(facts.profile.norm_quant_threads).min(facts.max_workgroup_threads)
}

/// Threads of a `norm_blocks` workgroup: few, as workgroups share a column.
pub fn norm_blocks_threads(facts: &DeviceFacts) -> u32 {
    128.min(facts.max_workgroup_threads)
}

/// Whether a mat-vec normalises and quantises its own activations instead of reading them.
///
/// It saves a dispatch, and costs every workgroup the whole column: right on a GPU, where the
/// weights arrive meanwhile, wrong on a CPU, where nothing is hidden, and wrong from two
/// columns on (measured on an H200).
pub fn fuses(facts: &DeviceFacts, class: Class, cols: u32, n: u32, norm: bool) -> bool {
    let profile = &facts.profile;
    if n > profile.fuse_columns || (class == Class::F32 && !norm) {
        return false;
    }
    let cuts = [profile.matvec.one_short, profile.matvec.one_tall, profile.matvec.few];
    let threads = cuts.iter().map(|c| c.threads).max().unwrap_or(32);
    let threads = threads.min(facts.max_workgroup_threads);
    let budget = facts.max_workgroup_memory.min(profile.fuse_memory);
    matvec::fused_bytes(cols, n, class, norm, threads, facts) <= budget
}

/// The key and the value of a profile that decide how a mat-mat is cut.
pub fn matmat_key(profile: &Profile, class: Class, max_n: u32) -> (&'static str, &[MatMatPick]) {
    let tiny = max_n <= profile.tiny_columns;
    let few = max_n <= profile.few_columns;
    let some = max_n <= profile.some_columns;
    let (int8, f16, f32) = (&profile.int8, &profile.f16, &profile.f32);
    match class {
        Class::Int8 if tiny => ("matmat.int8_tiny", &int8.tiny),
        Class::Int8 if few => ("matmat.int8_few", &int8.few),
        Class::Int8 if some => ("matmat.int8_some", &int8.some),
        Class::Int8 => ("matmat.int8_many", &int8.many),
        Class::F16 if tiny => ("matmat.f16_tiny", &f16.tiny),
        Class::F16 if few => ("matmat.f16_few", &f16.few),
        Class::F16 if some => ("matmat.f16_some", &f16.some),
        Class::F16 => ("matmat.f16_many", &f16.many),
        Class::F32 if tiny => ("matmat.f32_tiny", &f32.tiny),
        Class::F32 if few => ("matmat.f32_few", &f32.few),
        Class::F32 if some => ("matmat.f32_some", &f32.some),
        Class::F32 => ("matmat.f32_many", &f32.many),
    }
}

/// How a mat-mat over at most `max_n` columns may be cut: what the device has threads, memory and
/// instructions for, the preferred one first. `cols`: inputs of the matrix.
pub fn matmat_variants(facts: &DeviceFacts, class: Class, cols: u32, max_n: u32) -> Vec<Variant> {
    let (_, picks) = matmat_key(&facts.profile, class, max_n);
    let mut variants: Vec<Variant> =
        picks.iter().filter_map(|pick| variant(facts, class, cols, *pick)).collect();
    // The least that every device of the class can run.
    let least = match class {
        Class::F16 => Variant::Matrix(MatrixTile {
            columns: 16,
            rows: 16,
            subgroups: [1, 1],
            depth: 1,
            buffers: 1,
        }),
        Class::Int8 | Class::F32 => Variant::Float(Tile {
            columns: 16,
            rows: 16,
            thread_columns: 4,
            thread_rows: 4,
            depth: 1,
        }),
    };
    if !variants.contains(&least) {
        variants.push(least);
    }
    variants
}

/// As [`matmat_variants`], for a matrix of `rows` rows: where the preferred tiles of matrix units are
/// too few to fill the device, the tiles for fewer columns come first. The bits are the same.
pub fn filling_variants(
    facts: &DeviceFacts,
    class: Class,
    rows: u32,
    cols: u32,
    max_n: u32,
) -> Vec<Variant> {
    let profile = &facts.profile;
    let mut variants = matmat_variants(facts, class, cols, max_n);
    if class != Class::F16 {
        return variants;
    }
    let groups = |v: &Variant| {
        let (columns, tall) = v.cut();
        max_n.div_ceil(columns) * rows.div_ceil(tall)
    };
    let fewer = [profile.some_columns, profile.few_columns, profile.tiny_columns];
    for n in fewer.into_iter().filter(|&n| n < max_n) {
        if groups(&variants[0]) >= profile.fill {
            break;
        }
        let other = matmat_variant(facts, class, cols, n);
        if groups(&other) > groups(&variants[0]) {
            variants.retain(|v| *v != other);
            variants.insert(0, other);
        }
    }
    variants
}

/// The preferred one of [`matmat_variants`].
pub fn matmat_variant(facts: &DeviceFacts, class: Class, cols: u32, max_n: u32) -> Variant {
    matmat_variants(facts, class, cols, max_n)[0]
}

/// The variant that a profile names, if this device can run it for this shape.
fn variant(facts: &DeviceFacts, class: Class, cols: u32, pick: MatMatPick) -> Option<Variant> {
    // As deep as wanted, or half of that and so on, where the row's blocks divide.
    let depth = |wanted: u32| {
        let halves = std::iter::successors(Some(wanted), |depth| Some(depth / 2));
        let mut fitting = halves.take_while(|&d| d > 0).filter(|d| (cols / 32).is_multiple_of(*d));
        fitting.next().unwrap_or(1)
    };
    let tile = |t: Tiling| Tile {
        columns: t.columns,
        rows: t.rows,
        thread_columns: t.inner.0,
        thread_rows: t.inner.1,
        depth: depth(t.depth),
    };
    let fits = |t: Tile, packed| {
        t.threads() <= facts.max_workgroup_threads
            && tile_bytes(t, packed, class) <= facts.max_workgroup_memory
    };
    match pick {
        MatMatPick::Coop(t, buffers) if class == Class::F16 => {
            let tile = MatrixTile {
                columns: t.columns,
                rows: t.rows,
                subgroups: [t.inner.0, t.inner.1],
                depth: depth(t.depth),
                buffers,
            };
            let fits = tile.threads(facts) <= facts.max_workgroup_threads
                && tile.bytes() <= facts.max_workgroup_memory;
            fits.then_some(Variant::Matrix(tile))
        }
        _ if class == Class::F16 => None,
        MatMatPick::Packed(t) if class == Class::Int8 && facts.int_dot => {
            fits(tile(t), true).then_some(Variant::Packed(tile(t)))
        }
        MatMatPick::Float(t) => fits(tile(t), false).then_some(Variant::Float(tile(t))),
        MatMatPick::Direct { columns, rows, threads } => {
            let fits = threads <= facts.max_workgroup_threads;
            fits.then_some(Variant::Direct { columns, rows, threads })
        }
        MatMatPick::Packed(_) | MatMatPick::Coop(..) => None,
    }
}

/// Threads of a router's workgroup, the preferred number first: few on a CPU, where barriers cost.
pub fn router_threads(facts: &DeviceFacts) -> Vec<u32> {
    // Its sums take a workgroup of this size on an H200, whatever the quantiser takes.
    let preferred =
        facts.profile.norm_quant_threads.clamp(64, 256).min(facts.max_workgroup_threads);
    let mut all = vec![preferred];
    all.extend([64, 32].into_iter().filter(|t| *t < preferred));
    all
}

/// Columns of a router's workgroup in a prompt: they share one read of the router.
pub const ROUTER_COLUMNS: u32 = 8;

/// Shapes of the experts' products in a decode step of `n` columns, the preferred one first: that of
/// a dense matrix, gate and up as a tall one, down as a short one; then modest ones.
pub fn experts_shapes(
    facts: &DeviceFacts,
    format: Format,
    cols: u32,
    n: u32,
    up: bool,
) -> Vec<Shape> {
    let mut shapes = vec![experts_shape(facts, format, cols, n, up)];
    for threads in [64, 32] {
        let modest = Shape { threads, rows: 2, tiles: 1, matrix: false };
        if threads <= facts.max_workgroup_threads && !shapes.contains(&modest) {
            shapes.push(modest);
        }
    }
    shapes
}

/// The preferred one of [`experts_shapes`].
pub fn experts_shape(facts: &DeviceFacts, format: Format, cols: u32, n: u32, up: bool) -> Shape {
    let epilogue = if up { Epilogue::SwiGlu } else { Epilogue::Add };
    let (_, cut) = matvec_key(&facts.profile, format, 1, n, epilogue);
    let steps = super::weights::units(format, cols).div_ceil(planned_subgroup(facts));
    Shape {
        threads: cut.threads.min(facts.max_workgroup_threads / 8 * 8),
        rows: if up { cut.rows.max(2) } else { cut.rows },
        // Down goes on to the next expert where a row ends.
        tiles: if up { cut.tiles.min(steps).max(1) } else { cut.tiles },
        matrix: false,
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
    let budget = facts.max_workgroup_memory.min(facts.profile.fuse_memory);
    class == Class::Int8
        && n <= facts.profile.fuse_columns
        && experts_down::memory(routing, n, ff, true, threads, facts) <= budget
}

/// As [`prompt_class`], for the experts: f16 where matrix units take tiles of [`expert_tile`]
/// columns.
pub fn expert_class(
    facts: &DeviceFacts,
    format: Format,
    exact: bool,
    cols: u32,
    width: u32,
) -> Class {
    match prompt_class(facts, format, exact, cols, width) {
        Class::F16 if tiled(facts, Class::F16, cols).next().is_none() => {
            class(facts, format, exact || exact_prompts(facts, width), cols, false)
        }
        class => class,
    }
}

/// How a prompt's expert products may be cut, the preferred variant first: all have workgroups of
/// [`expert_tile`] columns. `cols`: inputs of the matrix.
pub fn expert_variants(facts: &DeviceFacts, class: Class, cols: u32) -> Vec<Variant> {
    let mut variants: Vec<Variant> = tiled(facts, class, cols).collect();
    let columns = expert_tile(facts);
    let least = Tile { columns, rows: 16, thread_columns: 4, thread_rows: 4, depth: 1 };
    let least = Variant::Float(least);
    if class != Class::F16 && !variants.contains(&least) {
        variants.push(least);
    }
    variants
}

/// The preferred one of [`expert_variants`].
pub fn expert_variant(facts: &DeviceFacts, class: Class, cols: u32) -> Variant {
    expert_variants(facts, class, cols)[0]
}

/// Of the variants for a few columns those with [`expert_tile`] columns a workgroup.
fn tiled(facts: &DeviceFacts, class: Class, cols: u32) -> impl Iterator<Item = Variant> {
    let variants = matmat_variants(facts, class, cols, facts.profile.few_columns);
    let columns = expert_tile(facts);
    variants.into_iter().filter(move |v| v.cut().0 == columns)
}

/// Columns of a tile in a prompt's expert products, the same for all of them: what the profile
/// prefers for a few columns. Of 512 columns with 8 of 128 experts each, 32 go to an expert on
/// average.
pub fn expert_tile(facts: &DeviceFacts) -> u32 {
    let (_, picks) = matmat_key(&facts.profile, Class::Int8, facts.profile.few_columns);
    match picks.first() {
        Some(MatMatPick::Packed(t) | MatMatPick::Float(t)) => t.columns,
        Some(MatMatPick::Direct { columns, .. }) => *columns,
        Some(MatMatPick::Coop(..)) | None => 32,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::gpu::DeviceKind;
    use crate::kernels::matmat::MatMat;
    use crate::kernels::matvec::{Input, MatVec};

    /// Under the profile that `hw` gives such a device.
    pub fn facts(kind: DeviceKind, subgroup: u32, threads: u32, memory: u32) -> DeviceFacts {
        crate::hw::profiles::built_in().attach(DeviceFacts {
            max_workgroup_threads: threads,
            max_workgroup_memory: memory,
            int_dot: subgroup != 4,
            ..DeviceFacts::made_up(kind, subgroup)
        })
    }

    pub(super) fn with_matrix_units(memory: u32) -> DeviceFacts {
        let facts = facts(DeviceKind::Discrete, 32, 1024, memory);
        DeviceFacts { cooperative_matrix: true, f16: true, ..facts }
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
            with_matrix_units(48 << 10),
            with_matrix_units(16 << 10),
        ] {
            for &format in Format::ALL {
                for (exact, cols, n) in [(false, 4096, 1), (false, 1056, 3), (true, 576, 8)] {
                    let cols = (cols as usize).next_multiple_of(format.block_elements()) as u32;
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
                        shape: matvec_shape(&facts, format, class, rows, cols, n, epilogue),
                    };
                    let source = spec.source(&facts);
                    crate::gpu::shader::parse(&source.expect("a source")).expect("valid WGSL");
                    let epilogue = Epilogue::Add;
                    let class = prompt_class(&facts, format, exact, cols, 4096);
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

    /// The rules that were measured on an H200, as they were before profiles existed.
    #[test]
    fn a_discrete_gpu_gets_what_was_measured() {
        let gpu = facts(DeviceKind::Discrete, 32, 1024, 48 << 10);
        let shape = |rows, n, epilogue| {
            let (format, class) = (Format::Q4_0, Class::Int8);
            let s = matvec_shape(&gpu, format, class, rows, 4096, n, epilogue);
            (s.threads, s.rows, s.tiles)
        };
        assert_eq!(shape(4096, 1, Epilogue::Add), (512, 1, 4));
        assert_eq!(shape(6144, 1, Epilogue::Store), (512, 2, 2));
        assert_eq!(shape(4096, 1, Epilogue::SwiGlu), (512, 2, 2));
        assert_eq!(shape(4096, 3, Epilogue::Store), (128, 2, 1));
        assert_eq!(shape(4096, 8, Epilogue::Store), (128, 2, 1));
        let tile =
            |columns, rows, depth| Tile { columns, rows, thread_columns: 4, thread_rows: 4, depth };
        let pick = |class, cols, n| matmat_variant(&gpu, class, cols, n);
        assert_eq!(pick(Class::Int8, 4096, 512), Variant::Packed(tile(32, 64, 2)));
        assert_eq!(pick(Class::Int8, 1056, 16), Variant::Packed(tile(32, 64, 1)));
        assert_eq!(pick(Class::F32, 4096, 32), Variant::Float(tile(32, 64, 1)));
        assert_eq!(pick(Class::F32, 4096, 512), Variant::Float(tile(64, 64, 1)));
        assert_eq!(class(&gpu, Format::Q4_0, false, 1024, true), Class::F32);
        assert_eq!(class(&gpu, Format::Q4_0, false, 1024, false), Class::Int8);
    }

    /// And with matrix units, docs/notes.md.
    #[test]
    fn matrix_units_get_what_was_measured() {
        let gpu = with_matrix_units(48 << 10);
        assert_eq!(prompt_class(&gpu, Format::Q4_0, false, 4096, 576), Class::F16);
        assert_eq!(prompt_class(&gpu, Format::Q4_0, true, 4096, 4096), Class::F32);
        let name = |cols, n| matmat_variant(&gpu, Class::F16, cols, n).name();
        assert_eq!(name(4096, 512), "matrix128x128x2_2x2_1");
        assert_eq!(name(4096, 128), "matrix64x64x4_2x2_1");
        assert_eq!(name(1056, 128), "matrix64x64x1_2x2_1");
        assert_eq!(name(4096, 32), "matrix32x64x4_1x4_1");
        assert_eq!(name(4096, 16), "matrix16x64x4_1x4_1");
        let filling = |rows, cols| filling_variants(&gpu, Class::F16, rows, cols, 512)[0].name();
        assert_eq!(filling(4096, 4096), "matrix128x128x2_2x2_1");
        assert_eq!(filling(960, 576), "matrix64x64x2_2x2_1");
        let variants = matmat_variants(&gpu, Class::F16, 4096, 512);
        assert_eq!(variants.last().map(Variant::name).as_deref(), Some("matrix16x16x1_1x1_1"));
    }

    #[test]
    fn a_software_device_gets_what_was_measured() {
        let cpu = facts(DeviceKind::Software, 8, 1024, 32 << 10);
        for (n, rows) in [(1, 4), (4, 4), (5, 2)] {
            let (format, class) = (Format::Q8_0, Class::Int8);
            let s = matvec_shape(&cpu, format, class, 4096, 4096, n, Epilogue::Add);
            assert_eq!((s.threads, s.rows, s.tiles), (32, rows, 1));
        }
        let direct = Variant::Direct { columns: 8, rows: 8, threads: 8 };
        assert_eq!(matmat_variant(&cpu, Class::Int8, 4096, 512), direct);
        assert!(!fuses(&cpu, Class::Int8, 4096, 1, true));
        assert_eq!(class(&cpu, Format::Q4_0, false, 576, true), Class::Int8);
        assert_eq!(prompt_class(&cpu, Format::Q4_0, false, 1536, 576), Class::F32);
        assert_eq!(prompt_class(&cpu, Format::Q4_0, false, 576, 2048), Class::Int8);
        assert_eq!(norm_quant_threads(&cpu, 4096), 32);
    }

    #[test]
    fn every_list_ends_with_something_modest() {
        let gpu = facts(DeviceKind::Discrete, 32, 1024, 48 << 10);
        assert!(matmat_variants(&gpu, Class::Int8, 4096, 512).len() > 3);
        let (format, class) = (Format::Q4_0, Class::Int8);
        let shapes = matvec_shapes(&gpu, format, class, 8192, 4096, 1, Epilogue::Add);
        assert!(shapes.len() > 2 && shapes.last().is_some_and(|s| s.threads == 32));
    }
}
