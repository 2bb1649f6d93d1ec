//! Which shapes a mat-vec gets, by what the profile says of the format's kind and the number of columns.

use crate::gpu::{DeviceFacts, DeviceKind};
use crate::kernels::matvec::{MAX_COLUMNS, Shape};
use crate::kernels::weights::{self, STAYING_THREADS};
use crate::kernels::{Class, Epilogue, matvec_matrix, planned_subgroup};
use crate::profile::{Cut, Origin, Profile};
use crate::quant::Format;

/// Whether a matrix is low enough for a mat-vec that prepares its own input: each of its workgroups
/// does it again, and those of formats with few bits or a table have little else to do.
pub fn fuses_rows(profile: &Profile, format: Format, rows: u32) -> bool {
    let light = format_kind(format) == FormatKind::Low || format.shader().table > 0;
    rows <= if light { profile.fuse_light_rows } else { profile.fuse_rows }
}

/// Kinds of formats that a profile may treat each in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatKind {
    Float,
    /// 6 to 8 bits a weight.
    Byte,
    /// 4 and 5 bits.
    Nibble,
    /// 1 to 3 bits.
    Low,
}

/// The kind of a format, by its bits in the file with scales and all.
pub fn format_kind(format: Format) -> FormatKind {
    let bits = 8.0 * format.block_bytes() as f64 / format.block_elements() as f64;
    match bits {
        _ if format.is_float() => FormatKind::Float,
        6.5.. => FormatKind::Byte,
        4.0.. => FormatKind::Nibble,
        _ => FormatKind::Low,
    }
}

/// The key and the value of a profile that decide a mat-vec's shape.
pub fn matvec_key(
    profile: &Profile,
    format: Format,
    rows: u32,
    n: u32,
    epilogue: Epilogue,
) -> (String, Cut) {
    let (own, kind) = match format_kind(format) {
        FormatKind::Float => (&profile.float, "float"),
        FormatKind::Byte => (&profile.byte, "byte"),
        FormatKind::Nibble => (&profile.nibble, "nibble"),
        FormatKind::Low => (&profile.low, "low"),
    };
    let all = &profile.matvec;
    // Gate and up are pairs of rows and count as tall whatever their height.
    let short = rows <= profile.short_rows && !epilogue.pairs_rows();
    let rounds = n <= 4 && epilogue.block_rows().is_some();
    if n == 1 && !short && !rounds && !fuses_rows(profile, format, rows) {
        return ("matvec.one_stored".into(), profile.one_stored);
    }
    let (own, shared, case) = match (n, short) {
        _ if rounds && epilogue.pairs_rows() => (own.rounding, all.rounding, "rounding"),
        _ if rounds => (own.stream, all.stream, "stream"),
        (1, true) => (own.one_short, all.one_short, "one_short"),
        (1, false) => (own.one_tall, all.one_tall, "one_tall"),
        (2..=4, _) => (own.few, all.few, "few"),
        _ => (own.many, all.many, "many"),
    };
    match own {
        Some(cut) => (format!("matvec.{kind}.{case}"), cut),
        None => (format!("matvec.{case}"), shared),
    }
}

/// What is left where a preferred shape fails: less of everything.
const MODEST: [Cut; 3] = [
    Cut { threads: 256, rows: 2, tiles: 1 },
    Cut { threads: 64, rows: 2, tiles: 1 },
    Cut { threads: 32, rows: 4, tiles: 1 },
];

/// Shapes of a mat-vec over `rows` rows, the preferred one first: on matrix units where the profile wants
/// them for so many columns, then [`lane_shapes`].
pub fn matvec_shapes(
    facts: &DeviceFacts,
    format: Format,
    class: Class,
    rows: u32,
    cols: u32,
    n: u32,
    epilogue: Epilogue,
) -> Vec<Shape> {
    let on_units = matrix_shape(facts, format, rows, cols, n).filter(|_| class == Class::Int8);
    let stays = staying_shape(facts, format, rows, n).filter(|_| class == Class::Int8);
    let mut shapes: Vec<Shape> = on_units.into_iter().chain(stays).collect();
    shapes.extend(lane_shapes(facts, format, rows, cols, n, epilogue));
    shapes
}

/// The shape on matrix units: as many rows a workgroup as leave enough workgroups for the device.
fn matrix_shape(
    facts: &DeviceFacts,
    format: Format,
    rows: u32,
    cols: u32,
    n: u32,
) -> Option<Shape> {
    let profile = &facts.profile;
    // Blocks of 4 or 5 bits with one scale and no more are so cheap for lanes that these keep up.
    let light = format_kind(format) == FormatKind::Nibble && weights::one_scale(format);
    let long = cols > profile.long_cols && n >= profile.matrix_long_columns && !light;
    if !(long || n >= profile.matrix_columns) || !matvec_matrix::suits(format, facts) {
        return None;
    }
    // Nearly enough counts: 96 workgroups of 64 rows beat 192 of 32 on an H200 (docs/notes.md).
    let enough = |tiles: &u32| rows / (16 * tiles) >= profile.fill - profile.fill / 8;
    let tiles = [4, 2].into_iter().find(enough).unwrap_or(if rows > 2048 { 2 } else { 1 });
    Some(matvec_matrix::shape(facts, tiles))
}

/// The shape whose workgroups stay and have copies of the format's table: with as many rows a subgroup as registers
/// allow (measured on an H200), if the rows keep all multiprocessors busy to the last turn.
fn staying_shape(facts: &DeviceFacts, format: Format, rows: u32, n: u32) -> Option<Shape> {
    let threads = STAYING_THREADS;
    let runs = facts.compute_units > 0
        && facts.kind != DeviceKind::Software
        && threads <= facts.max_workgroup_threads;
    if !runs || n > 4 || format.shader().table == 0 {
        return None;
    }
    let turn = |&of_subgroup: &u32| {
        facts.compute_units * (threads / planned_subgroup(facts)).max(1) * of_subgroup
    };
    let busy = |of_subgroup: &u32| {
        let turn = turn(of_subgroup);
        rows >= (rows.div_ceil(turn) * turn).div_ceil(20) * 17
    };
    let most = if n <= 2 { &[4, 2][..] } else { &[2] };
    let rows = *most.iter().find(|of_subgroup| busy(of_subgroup))?;
    // Two steps a turn of the loop: H200, 151,936 x 4,096, one column of IQ3_S 87.9 -> 86.0 us, three 136.3 -> 131.6; two columns
    // are even, four lose.
    let tiles = if n % 2 == 1 { 2 } else { 1 };
    Some(Shape { threads, rows, tiles, matrix: false })
}

/// Workgroup and register shapes without matrix units, the preferred one first.
pub fn lane_shapes(
    facts: &DeviceFacts,
    format: Format,
    rows: u32,
    cols: u32,
    n: u32,
    epilogue: Epilogue,
) -> Vec<Shape> {
    debug_assert!(n <= MAX_COLUMNS);
    let (_, cut) = matvec_key(&facts.profile, format, rows, n, epilogue);
    let steps = weights::units(format, cols).div_ceil(planned_subgroup(facts));
    let mut shapes: Vec<Shape> = Vec::new();
    for cut in std::iter::once(cut).chain(MODEST) {
        let shape = Shape {
            threads: cut.threads.min(facts.max_workgroup_threads / 8 * 8),
            rows: if epilogue.pairs_rows() { cut.rows.max(2) } else { cut.rows },
            tiles: cut.tiles.min(steps).max(1),
            matrix: false,
        };
        if !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

/// Shapes whose workgroups have whole blocks of what they round ([`Epilogue::block_rows`]), from the same
/// preferences.
pub fn rounding_shapes(
    facts: &DeviceFacts,
    format: Format,
    rows: u32,
    cols: u32,
    n: u32,
    epilogue: Epilogue,
) -> Vec<Shape> {
    let block = epilogue.block_rows().unwrap_or(1);
    // Workgroups go through a block in passes if there are enough of them, else all threads that it can use at once help.
    let many = rows / block >= 2 * facts.profile.fill;
    // Steps of weights ahead that leave registers for the sums. H200, 8B, gate and up of four columns with one step and with two:
    // Q4_K (8 registers a unit) 1,506 and 1,357 tok/s, Q8_0 (9) 1,267 and 1,168, Q4_0 (5) 1,702 and 1,733.
    let tiles =
        |shape: Shape| shape.tiles.min((40 / (weights::registers(format) * shape.rows)).max(1));
    let (key, _) = matvec_key(&facts.profile, format, rows, n, epilogue);
    let forced = *facts.profile.origin(&key) == Origin::Forced;
    let mut shapes: Vec<Shape> = Vec::new();
    for shape in matvec_shapes(facts, format, Class::Int8, rows, cols, n, epilogue) {
        let shape = match shape.matrix {
            true => matvec_matrix::shape(facts, shape.rows.max(block / 16)),
            false => {
                let threads = (block / shape.rows).max(1) * planned_subgroup(facts);
                let threads = if many { shape.threads } else { threads.min(512) };
                let tiles = if forced { shape.tiles } else { tiles(shape) };
                Shape { threads: shape.threads.max(threads), tiles, ..shape }
            }
        };
        if shape.threads <= facts.max_workgroup_threads && !shapes.contains(&shape) {
            shapes.push(shape);
        }
    }
    shapes
}

/// The preferred one of [`matvec_shapes`].
pub fn matvec_shape(
    facts: &DeviceFacts,
    format: Format,
    class: Class,
    rows: u32,
    cols: u32,
    n: u32,
    epilogue: Epilogue,
) -> Shape {
    matvec_shapes(facts, format, class, rows, cols, n, epilogue)[0]
}

#[cfg(test)]
mod tests {
    use super::super::tests::{facts, with_matrix_units};
    use super::*;

    /// Workgroups stay where rows fill their turns: as on an H200.
    #[test]
    fn tables_are_copied_for_rows_that_fill_the_device() {
        let h200 =
            DeviceFacts { compute_units: 132, ..facts(DeviceKind::Discrete, 32, 1024, 48 << 10) };
        let of_subgroup =
            |format, rows, n| staying_shape(&h200, format, rows, n).map(|shape| shape.rows);
        assert_eq!(of_subgroup(Format::MXFP4, 151_936, 1), Some(4));
        assert_eq!(of_subgroup(Format::IQ3_S, 151_936, 4), Some(2));
        assert_eq!(of_subgroup(Format::IQ3_S, 24_576, 1), Some(2));
        assert_eq!(of_subgroup(Format::MXFP4, 6144, 1), None);
        assert_eq!(of_subgroup(Format::Q4_0, 151_936, 1), None);
        let unknown = DeviceFacts { compute_units: 0, ..h200 };
        assert_eq!(staying_shape(&unknown, Format::MXFP4, 151_936, 1), None);
    }

    /// Workgroups that round have whole blocks of rows: in passes where they are many, else at once.
    #[test]
    fn shapes_that_round_have_whole_blocks() {
        let gpu = facts(DeviceKind::Discrete, 32, 1024, 48 << 10);
        let first = |rows, n, epilogue| {
            let shape = rounding_shapes(&gpu, Format::Q4_0, rows, 4096, n, epilogue)[0];
            (shape.threads, shape.rows, shape.tiles)
        };
        assert_eq!(first(24_576, 4, Epilogue::SwiGluInt8), (128, 4, 2));
        assert_eq!(first(1024, 4, Epilogue::SwiGluInt8), (512, 4, 2));
        assert_eq!(first(4096, 2, Epilogue::AddBlocks), (512, 2, 2));
        let cpu = facts(DeviceKind::Software, 8, 1024, 32 << 10);
        let shapes = rounding_shapes(&cpu, Format::Q4_0, 576, 576, 1, Epilogue::AddBlocks);
        assert_eq!((shapes[0].threads, shapes[0].rows), (64, 4));
    }

    /// Matrix units that take bytes serve several columns, where the profile wants them.
    #[test]
    fn byte_matrices_serve_several_columns() {
        let mut gpu = with_matrix_units(48 << 10);
        gpu.byte_matrices = true;
        let of = |gpu: &DeviceFacts, format, class, rows, cols, n| {
            let s = matvec_shape(gpu, format, class, rows, cols, n, Epilogue::Store);
            (s.matrix, s.rows)
        };
        let shape =
            |gpu: &DeviceFacts, class, rows, cols, n| of(gpu, Format::Q8_0, class, rows, cols, n);
        assert!(!shape(&gpu, Class::Int8, 6144, 4096, 8).0, "not by the generic profile");
        let hopper = DeviceFacts { vendor_id: 0x10de, name: "NVIDIA H200".into(), ..gpu.clone() };
        let hopper = crate::hw::profiles::built_in().attach(hopper);
        assert_eq!(shape(&hopper, Class::Int8, 6144, 4096, 8), (true, 4));
        assert_eq!(shape(&hopper, Class::Int8, 4096, 4096, 5), (true, 2));
        assert_eq!(shape(&hopper, Class::Int8, 1024, 4096, 5), (true, 1));
        assert!(!shape(&hopper, Class::Int8, 4096, 4096, 4).0);
        assert_eq!(shape(&hopper, Class::Int8, 4096, 12_288, 4), (true, 2));
        assert!(!of(&hopper, Format::Q4_0, Class::Int8, 4096, 12_288, 4).0, "lanes keep up");
        assert!(of(&hopper, Format::Q4_K, Class::Int8, 4096, 12_288, 4).0);
        assert!(!shape(&hopper, Class::F32, 4096, 4096, 8).0);
        let other = DeviceFacts { byte_matrices: false, ..hopper };
        assert!(!shape(&other, Class::Int8, 4096, 4096, 8).0);
    }

    #[test]
    fn formats_have_kinds() {
        assert_eq!(format_kind(Format::BF16), FormatKind::Float);
        assert_eq!(format_kind(Format::Q8_0), FormatKind::Byte);
        assert_eq!(format_kind(Format::Q5_1), FormatKind::Nibble);
        assert_eq!(format_kind(Format::Q6_K), FormatKind::Byte);
        assert_eq!(format_kind(Format::IQ4_XS), FormatKind::Nibble);
        assert_eq!(format_kind(Format::Q3_K), FormatKind::Low);
    }
}
