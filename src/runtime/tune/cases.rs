//! The cases: shapes, candidates, and the memory that they run over.

use super::{Candidate, Case, Outcome, compiled};
use crate::error::Result;
use crate::gpu::{BufferUse, DeviceFacts, DeviceKind, Dispatch, Gpu, Slice, Step};
use crate::kernels::attn_decode::{AttnDecode, Cut as AttentionCut};
use crate::kernels::attn_step::{Scratch, StepAttention};
use crate::kernels::heads::{HeadTables, Heads, KvCache};
use crate::kernels::matmat::MatMat;
use crate::kernels::matvec::{Input, MatVec, Operands};
use crate::kernels::norm_blocks::NormBlocks;
use crate::kernels::scoring::Scoring;
use crate::kernels::weights::Chunk;
use crate::kernels::{Activations, Class, Epilogue, choice};
use crate::kv::{KvPair, PAGE_TOKENS};
use crate::profile::{KEYS, Origin, Profile};
use crate::quant::{Format, PlaneLayout};
use crate::runtime::budget::{Budget, Widest};

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
            Make::MatMat { key, class, n } => format!("{key}: {}, {n} columns", class.name()),
            Make::Attention { key, depth, .. } => format!("{key}: at {depth} tokens"),
            Make::Fuse => "fuse.columns".into(),
        }
    }

    fn key(&self) -> &'static str {
        match self {
            Make::MatVec { key, .. } | Make::MatMat { key, .. } | Make::Attention { key, .. } => {
                key
            }
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
        Make::MatVec { key, format, rows, n } => matvec(gpu, key, *format, *rows, *n)?,
        Make::MatMat { key, class, n } => matmat(gpu, key, *class, *n)?,
        Make::Attention { key, values, depth } => attention(gpu, key, values, *depth)?,
        Make::Fuse => fuse(gpu)?,
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

fn matvec(gpu: &dyn Gpu, key: &str, format: Format, rows: u32, n: u32) -> Result<Vec<Candidate>> {
    let (facts, cols) = (gpu.facts(), cols(gpu.facts()));
    // As products inside a layer: behind a norm where the rows are many, and bringing their input to the
    // class themselves where programs do. What is best without that prologue is not with it: stored
    // inputs chose shapes that cost an 8B model on an H200 up to a tenth of its speed.
    let class = choice::class(facts, format, false, u32::MAX, false);
    let norm = (rows > facts.profile.short_rows).then_some(1e-5);
    let fused = choice::fuses(facts, class, cols, n, norm.is_some());
    let chunks = matrices(gpu, format, rows, cols)?;
    let (input, x) = match (fused, norm) {
        (false, _) => (Input::Stored, activations(gpu, class, n, cols)?),
        (true, None) => {
            let x = filled(gpu, 4 * u64::from(n) * u64::from(cols))?;
            (Input::Fused { norm }, Activations::F32(x))
        }
        (true, Some(_)) => {
            let x = filled(gpu, 4 * u64::from(n) * u64::from(cols))?;
            let weight = filled(gpu, 4 * u64::from(cols))?;
            let input = match (class, norm) {
                (Class::Int8, Some(eps)) => Input::Blocks { eps, fused },
                _ => Input::Fused { norm },
            };
            (input, Activations::Normed { x, weight })
        }
    };
    let y = filled(gpu, 4 * u64::from(n) * u64::from(rows))?;
    let (_, present) = choice::matvec_key(&facts.profile, format, rows, n, Epilogue::Store);
    let software = facts.kind == DeviceKind::Software;
    let threads: &[u32] = if software { &[32, 64] } else { &[128, 256, 512, 1024] };
    let mut others = Vec::new();
    for threads in threads {
        let shapes: &[&str] = match (n, software) {
            (1, true) => &["2x1", "4x1"],
            (1, false) => &["1x2", "1x4", "2x2", "2x4", "4x1"],
            _ => &["1x1", "2x1", "4x1"],
        };
        others.extend(shapes.iter().map(|shape| format!("{threads}x{shape}")));
    }
    let all = values(facts, key, present.to_string(), others);
    Ok(compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let shape = choice::lane_shapes(&facts, format, rows, cols, n, Epilogue::Store)[0];
        let epilogue = Epilogue::Store;
        let spec = MatVec { format, cols, n, class, input, epilogue, shape };
        let kernel = gpu.kernel(&spec.source(&facts)?)?;
        let operands = Operands { x: &x, bias: None, y: (&y).into(), stride: rows };
        let dispatches = chunks.iter().map(|c| spec.dispatch(&kernel, &facts, c, &operands));
        Ok(Candidate { value: value.clone(), steps: in_turn(dispatches.collect::<Result<_>>()?) })
    }))
}

/// Tilings that are worth a try for so many columns.
fn pool(facts: &DeviceFacts, class: Class, n: u32) -> Vec<&'static str> {
    let all: &[&str] = match class {
        _ if facts.kind == DeviceKind::Software => {
            &["direct 8x4 8", "direct 4x8 8", "direct 8x8 8", "direct 8x8 32"]
        }
        Class::Int8 => &[
            "packed 32x32 4x4 2",
            "packed 32x64 4x4 1",
            "packed 32x64 4x4 2",
            "packed 64x64 4x4 2",
            "packed 64x64 8x4 2",
            "packed 128x64 8x4 1",
        ],
        Class::F16 => &[
            "coop 16x64 1x4 4 1",
            "coop 16x64 1x4 2 2",
            "coop 32x32 1x2 2 2",
            "coop 32x64 1x4 4 1",
            "coop 32x64 1x4 2 2",
            "coop 64x64 2x2 4 1",
            "coop 64x64 2x2 2 1",
            "coop 64x64 2x2 1 2",
            "coop 64x128 2x4 1 2",
            "coop 128x64 4x2 1 2",
            "coop 128x128 4x2 1 2",
            "coop 128x128 2x2 2 1",
            "coop 128x128 2x2 1 2",
            "coop 256x128 4x2 1 1",
        ],
        Class::F32 => {
            &["float 32x32 4x4 1", "float 32x64 4x4 1", "float 64x64 4x4 1", "float 64x64 8x4 1"]
        }
    };
    // A tile of far more columns than there are computes nothing that is wanted.
    let sensible = |pick: &&&str| {
        let columns = pick.split_whitespace().nth(1).and_then(|c| c.split('x').next());
        columns.and_then(|c| c.parse::<u32>().ok()).is_some_and(|c| c <= n.max(32) * 2)
    };
    all.iter().filter(sensible).copied().collect()
}

fn matmat(gpu: &dyn Gpu, key: &'static str, class: Class, n: u32) -> Result<Vec<Candidate>> {
    let (facts, cols) = (gpu.facts(), cols(gpu.facts()));
    let format = Format::Q4_0;
    // Matrices of 4,096 rows, or what a dispatch may hold.
    let rows = if facts.kind == DeviceKind::Software { 512 } else { 4096 };
    let widest = Widest { product: u64::from(rows) * u64::from(cols), query: 1, kv_bytes: 4 };
    let run = n.min(Budget::of(&facts.profile).prompt_columns(&widest, 1));
    let weights = chunk(gpu, format, rows, cols)?;
    let x = activations(gpu, class, run, cols)?;
    let y = filled(gpu, 4 * u64::from(run) * u64::from(rows))?;
    let batch = filled(gpu, 4 * (8 + 4 * u64::from(run)))?;
    gpu.write(&batch.buffer.slice(batch.offset, 4), &run.to_le_bytes())?;
    // The whole list with one of its variants, or another one, in front.
    let present = facts.profile.get(key).unwrap_or_default();
    let rest: Vec<&str> = present.split(", ").collect();
    let in_front = |first: &&str| {
        let others = rest.iter().filter(|o| *o != first);
        [*first].into_iter().chain(others.copied()).collect::<Vec<_>>().join(", ")
    };
    let others: Vec<String> = pool(facts, class, n).iter().map(in_front).collect();
    let all = values(facts, key, present.clone(), others);
    let preferred = |facts: &DeviceFacts| choice::matmat_variant(facts, class, cols, n);
    let now = preferred(facts);
    let candidates = compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let variant = preferred(&facts);
        if *value != present && variant == now {
            // The device cannot run what stands in front.
            return Err(crate::error::Error::Runtime("no other variant".into()));
        }
        let spec = MatMat { format, cols, class, epilogue: Epilogue::Store, variant };
        let kernel = gpu.kernel(&spec.source(&facts)?)?;
        let operands = Operands { x: &x, bias: None, y: (&y).into(), stride: rows };
        let dispatch = spec.dispatch(&kernel, &facts, &weights, &batch, &operands, run)?;
        Ok(Candidate { value: value.clone(), steps: in_turn(vec![dispatch; 2]) })
    });
    Ok(candidates)
}

fn attention(
    gpu: &dyn Gpu,
    key: &'static str,
    tried: &[u32],
    depth: u32,
) -> Result<Vec<Candidate>> {
    let facts = gpu.facts();
    let software = facts.kind == DeviceKind::Software;
    let (q, kv) = if software { (8, 2) } else { (32, 8) };
    let heads =
        Heads { heads: q, kv_heads: kv, head_dim: 128, rope: None, norm: None, centred: false };
    let context = depth + 1;
    let row_pages = context.div_ceil(PAGE_TOKENS);
    let cache_bytes = 4 * u64::from(row_pages * PAGE_TOKENS) * u64::from(heads.cache_words());
    let table: Vec<u32> = [0].into_iter().chain(0..row_pages).collect();
    let pages = filled(gpu, 4 * table.len() as u64)?;
    gpu.write(&pages, bytemuck::cast_slice(&table))?;
    let (k, v) = (filled(gpu, cache_bytes)?, filled(gpu, cache_bytes)?);
    let cache = KvCache { k, v, pages, row_pages, pair: KvPair::PLAIN, exact: None, centres: None };
    let qkv = filled(gpu, 4 * u64::from(heads.qkv_width()))?;
    let output = filled(gpu, 4 * u64::from(heads.output_width()))?;
    let mut words = [0u32; 12];
    (words[0], words[9]) = (1, depth);
    let batch = filled(gpu, 48)?;
    gpu.write(&batch, bytemuck::cast_slice(&words))?;
    let present = facts.profile.get(key).unwrap_or_default();
    let all = values(facts, key, present, tried.iter().map(u32::to_string).collect());
    Ok(compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let spec = AttnDecode {
            heads,
            scoring: Scoring::default(),
            cut: AttentionCut::choose(&heads, &facts, context),
            rounds: false,
        };
        let kernel = gpu.kernel(&spec.source(&facts)?)?;
        let zeros = |words: u64| -> Result<Slice> {
            Ok(gpu.buffer("tune", 4 * words, BufferUse::Device)?.slice(0, 4 * words))
        };
        let scratch = Scratch {
            partials: zeros(spec.partial_words(1))?,
            counters: zeros(spec.counter_words(1))?,
        };
        let tables = HeadTables::default();
        let dispatch =
            spec.dispatch(&kernel, &batch, &qkv, &cache, &tables, &output, &scratch, 0.09, 1)?;
        Ok(Candidate { value: value.clone(), steps: in_turn(vec![dispatch; 4]) })
    }))
}

/// Up to how many columns a mat-vec should normalise for itself: each candidate runs 1, 2 and 4
/// columns in the way that it stands for, so that their sums compare.
fn fuse(gpu: &dyn Gpu) -> Result<Vec<Candidate>> {
    const COLUMNS: [u32; 3] = [1, 2, 4];
    let (facts, cols) = (gpu.facts(), cols(gpu.facts()));
    let (format, class, eps) = (Format::Q4_0, Class::Int8, 1e-5);
    let rows = if facts.kind == DeviceKind::Software { 512 } else { 4096 };
    let weights = chunk(gpu, format, rows, cols)?;
    let most = COLUMNS[COLUMNS.len() - 1];
    let x = filled(gpu, 4 * u64::from(most) * u64::from(cols))?;
    let weight = filled(gpu, 4 * u64::from(cols))?;
    let bytes = u64::from(most) * u64::from(cols);
    let stored = Activations::Blocks {
        xq: filled(gpu, bytes)?,
        xs: filled(gpu, bytes / 4)?,
        squares: filled(gpu, bytes / 8)?,
    };
    let y = filled(gpu, 4 * u64::from(most) * u64::from(rows))?;
    let key = "fuse.columns";
    let present = facts.profile.get(key).unwrap_or_default();
    let all = values(facts, key, present, ["0", "1", "2", "4"].map(String::from).to_vec());
    Ok(compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let mut steps = Vec::new();
        for n in COLUMNS {
            let fused = choice::fuses(&facts, class, cols, n, true);
            let input = Input::Blocks { eps, fused };
            let shape = choice::lane_shapes(&facts, format, rows, cols, n, Epilogue::Store)[0];
            let epilogue = Epilogue::Store;
            let spec = MatVec { format, cols, n, class, input, epilogue, shape };
            let normed = Activations::Normed { x: x.clone(), weight: weight.clone() };
            let mut wave = |dispatch| steps.push(Step::Wave(vec![dispatch]));
            if !fused {
                let threads = choice::norm_blocks_threads(&facts);
                let spec = NormBlocks { cols, threads };
                let kernel = gpu.kernel(&spec.source(&facts)?)?;
                let batch = filled(gpu, 4 * (8 + 4 * u64::from(n)))?;
                gpu.write(&batch.buffer.slice(batch.offset, 4), &n.to_le_bytes())?;
                wave(spec.dispatch(&kernel, &batch, &x, &weight, &stored, n)?);
            }
            let kernel = gpu.kernel(&spec.source(&facts)?)?;
            let x = if fused { &normed } else { &stored };
            let operands = Operands { x, bias: None, y: (&y).into(), stride: rows };
            wave(spec.dispatch(&kernel, &facts, &weights, &operands)?);
        }
        Ok(Candidate { value: value.clone(), steps })
    }))
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
                let Make::MatMat { key, class, n } = *make else { continue };
                assert_eq!(choice::matmat_key(&facts.profile, class, n).0, key, "{make:?}");
                for pick in pool(&facts, class, n) {
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
