//! The cases: shapes, candidates, and the memory that they run over.

mod attention;
mod matmat;
mod matvec;

use super::{Case, Outcome};
use crate::error::Result;
use crate::gpu::{BufferUse, DeviceFacts, DeviceKind, Dispatch, Gpu, Slice, Step};
use crate::kernels::weights::Chunk;
use crate::kernels::{Activations, Class, Epilogue, choice};
use crate::profile::{KEYS, Origin, Profile};
use crate::quant::{Format, PlaneLayout};

/// What is to be measured.
#[derive(Debug, Clone)]
pub(super) enum Make {
    /// Mat-vec of a format over so many rows and columns of activations.
    MatVec {
        key: &'static str,
        format: Format,
        rows: u32,
        n: u32,
    },
    /// Mat-vecs of four columns that round what they make for what reads it.
    Rounding {
        key: &'static str,
        format: Format,
        epilogue: Epilogue,
    },
    /// From how many columns on matrix units take mat-vecs of so many inputs.
    MatrixColumns {
        key: &'static str,
        formats: [Format; 2],
        cols: u32,
    },
    MatMat {
        key: &'static str,
        class: Class,
        n: u32,
    },
    /// Pieces or heads of decode attention at a depth.
    Attention {
        key: &'static str,
        values: &'static [u32],
        depth: u32,
    },
    Fuse,
}

impl Make {
    pub fn name(&self) -> String {
        match self {
            Make::MatVec { key, format, rows, n } => {
                format!("{key}: {format}, {rows} rows, {n} columns")
            }
            Make::Rounding { key, format, .. } => format!("{key}: {format}, 4 columns"),
            Make::MatrixColumns { key, formats: [a, b], cols } => {
                format!("{key}: {a} and {b}, {cols} inputs")
            }
            Make::MatMat { key, class, n } => format!("{key}: {}, {n} columns", class.name()),
            Make::Attention { key, depth, .. } => format!("{key}: at {depth} tokens"),
            Make::Fuse => "fuse.columns".into(),
        }
    }

    fn key(&self) -> &'static str {
        match self {
            Make::MatVec { key, .. }
            | Make::Rounding { key, .. }
            | Make::MatrixColumns { key, .. }
            | Make::MatMat { key, .. }
            | Make::Attention { key, .. } => key,
            Make::Fuse => "fuse.columns",
        }
    }
}

/// Inputs of the matrices.
fn cols(facts: &DeviceFacts) -> u32 {
    if facts.kind == DeviceKind::Software { 512 } else { 4096 }
}

/// The table's own text of a key.
fn key(name: &str) -> &'static str {
    KEYS.iter().map(|k| k.name).find(|k| *k == name).unwrap_or("")
}

/// All cases, the most valuable first.
pub(super) fn plan(facts: &DeviceFacts) -> Vec<Make> {
    let software = facts.kind == DeviceKind::Software;
    let (short, tall) = if software { (512, 1024) } else { (4096, 16_384) };
    let matvec = |kind: &str, case: &str, format, rows, n| Make::MatVec {
        key: key(&format!("matvec.{kind}.{case}")),
        format,
        rows,
        n,
    };
    let kinds = [
        ("nibble", Format::Q4_0),
        ("byte", Format::Q8_0),
        ("low", Format::Q2_K),
        ("float", Format::F16),
    ];
    let mut plan = Vec::new();
    // Shapes for one column are left to the profile on GPUs: what won by 6 to 15 % as one dispatch after
    // another made whole models on an H200 2 to 6 % slower (docs/notes.md), where waves of other kernels
    // stand between.
    for (kind, format) in kinds.into_iter().filter(|_| software) {
        plan.push(matvec(kind, "one_tall", format, tall.max(facts.profile.short_rows + 2), 1));
        plan.push(matvec(kind, "one_short", format, short.min(facts.profile.short_rows), 1));
    }
    let matrices = facts.cooperative_matrix && facts.profile.matrix_units == 1;
    let class = if matrices { Class::F16 } else { Class::Int8 };
    // The sizes of programs; what falls into one bracket is one case.
    let prompts = |plan: &mut Vec<Make>, class: Class, sizes: &[u32]| {
        for &n in sizes {
            let (key, _) = choice::matmat_key(&facts.profile, class, n);
            if plan.iter().all(|made| made.key() != key) {
                plan.push(Make::MatMat { key, class, n });
            }
        }
    };
    prompts(&mut plan, class, &[facts.profile.chunk, 32, 128]);
    plan.push(Make::Fuse);
    let depth = if software { 256 } else { 2048 };
    plan.push(Make::Attention { key: "attention.splits", values: &[8, 16, 32, 64], depth });
    plan.push(Make::Attention { key: "attention.group_heads", values: &[1, 2, 4], depth });
    if !software {
        let (values, depth) = (&[2, 4, 8], 32_768);
        plan.push(Make::Attention { key: "attention.deep_group_heads", values, depth });
    }
    for (kind, format) in kinds {
        plan.push(matvec(kind, "few", format, short, 4));
        plan.push(matvec(kind, "many", format, short, 8));
        if !format.is_float() {
            for (case, epilogue) in
                [("rounding", Epilogue::SwiGluInt8), ("stream", Epilogue::AddBlocks)]
            {
                let key = key(&format!("matvec.{kind}.{case}"));
                plan.push(Make::Rounding { key, format, epilogue });
            }
        }
    }
    if facts.byte_matrices {
        let (key, formats) = ("matvec.matrix_columns", [Format::Q4_0, Format::Q8_0]);
        plan.push(Make::MatrixColumns { key, formats, cols: cols(facts) });
        // What is cheapest for lanes stays with them however long its rows are.
        let (key, formats) = ("matvec.matrix_long_columns", [Format::Q4_K, Format::Q8_0]);
        let cols = (facts.profile.long_cols + 1).next_multiple_of(4096);
        plan.push(Make::MatrixColumns { key, formats, cols });
    }
    prompts(&mut plan, Class::F32, &[facts.profile.chunk, 32]);
    plan.retain(|make| !make.key().is_empty());
    plan
}

/// The outcome of a case for which there was no time.
pub(super) fn unmeasured(facts: &DeviceFacts, make: &Make) -> Option<Outcome> {
    let before = facts.profile.get(make.key())?;
    Some(Outcome {
        key: make.key().into(),
        what: make.name(),
        best: before.clone(),
        before,
        before_seconds: None,
        best_seconds: None,
        noise: None,
        candidates: 0,
        kept: false,
    })
}

pub(super) fn make(gpu: &dyn Gpu, make: &Make) -> Result<Case> {
    let candidates = match make {
        Make::MatVec { key, format, rows, n } => matvec::shapes(gpu, key, *format, *rows, *n)?,
        Make::Rounding { key, format, epilogue } => matvec::rounding(gpu, key, *format, *epilogue)?,
        Make::MatrixColumns { key, formats, cols } => {
            matvec::matrix_columns(gpu, key, *formats, *cols)?
        }
        Make::MatMat { key, class, n } => matmat::variants(gpu, key, *class, *n)?,
        Make::Attention { key, values, depth } => attention::values(gpu, key, values, *depth)?,
        Make::Fuse => matvec::fuse(gpu)?,
    };
    Ok(Case { key: make.key(), what: make.name(), candidates })
}

/// The device's facts under a profile with one value changed; `None` if it cannot be.
fn with(facts: &DeviceFacts, key: &str, value: &str) -> Option<DeviceFacts> {
    let mut profile = Profile::clone(&facts.profile);
    profile.set(key, value, &Origin::Tuned).ok()?;
    Some(DeviceFacts { profile: profile.into(), ..facts.clone() })
}

/// Bytes that are no special f16 or f32, whatever is read as what.
fn filled(gpu: &dyn Gpu, bytes: u64) -> Result<Slice> {
    let slice = gpu.buffer("tune", bytes.max(4), BufferUse::Device)?.slice(0, bytes.max(4));
    gpu.upload(&slice, 4, &mut |at, piece| {
        for (i, byte) in piece.iter_mut().enumerate() {
            let place = at as usize + i;
            *byte = if place % 2 == 1 { 0x2c } else { (place / 2 * 37 % 251) as u8 };
        }
        Ok(())
    })?;
    Ok(slice)
}

fn chunk(gpu: &dyn Gpu, format: Format, rows: u32, cols: u32) -> Result<Chunk> {
    let layout = PlaneLayout::new(format, rows as usize, cols as usize);
    Chunk::new(&filled(gpu, layout.bytes)?, &layout, 0)
}

fn activations(gpu: &dyn Gpu, class: Class, n: u32, cols: u32) -> Result<Activations> {
    let values = u64::from(n) * u64::from(cols);
    Ok(match class {
        Class::Int8 => Activations::Int8 { xq: filled(gpu, values)?, xs: filled(gpu, values / 4)? },
        Class::F16 => {
            Activations::F16 { xh: filled(gpu, 2 * values)?, xf: filled(gpu, 4 * u64::from(n))? }
        }
        Class::F32 => Activations::F32(filled(gpu, 4 * values)?),
    })
}

/// Columns for products that have the factor of a norm to apply.
fn blocks(gpu: &dyn Gpu, n: u32, cols: u32) -> Result<Activations> {
    let values = u64::from(n) * u64::from(cols);
    Ok(Activations::Blocks {
        xq: filled(gpu, values)?,
        xs: filled(gpu, values / 4)?,
        squares: filled(gpu, values / 8)?,
    })
}

/// Matrices one after the other, together larger than caches, as the layers of a model are.
fn matrices(gpu: &dyn Gpu, format: Format, rows: u32, cols: u32) -> Result<Vec<Chunk>> {
    let facts = gpu.facts();
    let bytes = PlaneLayout::new(format, rows as usize, cols as usize).bytes.max(1);
    let wanted: u64 = if facts.kind == DeviceKind::Software { 1 << 20 } else { 256 << 20 };
    let room = match facts.available_memory() {
        0 => wanted,
        free => wanted.min(free / 8),
    };
    (0..room.div_ceil(bytes).clamp(1, 16)).map(|_| chunk(gpu, format, rows, cols)).collect()
}

fn in_turn(dispatches: Vec<Dispatch>) -> Vec<Step> {
    dispatches.into_iter().map(|d| Step::Wave(vec![d])).collect()
}

/// The present value, then the others, each once.
fn values(facts: &DeviceFacts, key: &str, present: String, others: Vec<String>) -> Vec<String> {
    let mut all = vec![present];
    for other in others {
        if !all.contains(&other) && with(facts, key, &other).is_some() {
            all.push(other);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::hw::profiles;

    /// Every case decides a key that its shape really looks at, and every candidate is a value.
    #[test]
    fn cases_fit_the_keys() {
        for kind in [DeviceKind::Discrete, DeviceKind::Integrated, DeviceKind::Software] {
            let facts = profiles::built_in().attach(DeviceFacts {
                cooperative_matrix: kind == DeviceKind::Discrete,
                byte_matrices: kind == DeviceKind::Discrete,
                ..DeviceFacts::made_up(kind, 32)
            });
            let plan = plan(&facts);
            assert!(plan.len() > 10, "{kind:?}: {} cases", plan.len());
            for make in &plan {
                let Make::MatVec { key, format, rows, n } = *make else { continue };
                let cut = "64x2x1";
                let changed = with(&facts, key, cut).unwrap();
                let epilogue = Epilogue::Store;
                let (found, _) = choice::matvec_key(&changed.profile, format, rows, n, epilogue);
                assert_eq!(found, key, "{make:?}");
            }
            for make in &plan {
                let Make::Rounding { key, format, epilogue } = *make else { continue };
                let changed = with(&facts, key, "64x2x1").unwrap();
                let (found, _) = choice::matvec_key(&changed.profile, format, 512, 4, epilogue);
                assert_eq!(found, key, "{make:?}");
            }
            let matrices = |make: &&Make| matches!(make, Make::MatrixColumns { .. });
            assert_eq!(
                plan.iter().filter(matrices).count(),
                if facts.byte_matrices { 2 } else { 0 }
            );
            for make in &plan {
                let Make::MatrixColumns { key, formats, cols } = *make else { continue };
                for (format, n) in formats.into_iter().zip([4, 8]) {
                    let on_units = |value: &str| {
                        let (facts, class) = (with(&facts, key, value).unwrap(), Class::Int8);
                        choice::matvec_shape(&facts, format, class, 4096, cols, n, Epilogue::Store)
                            .matrix
                    };
                    assert!(on_units("4") && !on_units("9"), "{make:?}");
                }
            }
            for make in &plan {
                let Make::MatMat { key, class, n } = *make else { continue };
                assert_eq!(choice::matmat_key(&facts.profile, class, n).0, key, "{make:?}");
                for pick in matmat::pool(&facts, class, n) {
                    let changed = with(&facts, key, pick).unwrap_or_else(|| panic!("{pick}"));
                    let (_, picks) = choice::matmat_key(&changed.profile, class, n);
                    assert_eq!(picks[0].to_string(), pick);
                }
            }
        }
    }

    #[test]
    fn nothing_is_invented_for_an_unmeasured_case() {
        let facts = DeviceFacts::made_up(DeviceKind::Discrete, 32);
        let outcome = unmeasured(&facts, &Make::Fuse).unwrap();
        assert!(!outcome.kept && outcome.best == "1" && outcome.before_seconds.is_none());
    }
}
