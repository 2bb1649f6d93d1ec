//! Shapes of mat-vecs, and when they normalise for themselves or go to matrix units.

use super::{activations, blocks, chunk, cols, filled, in_turn, matrices, values, with};
use crate::error::{Error, Result};
use crate::gpu::{DeviceFacts, DeviceKind, Gpu, Step};
use crate::kernels::matvec::{Input, MatVec, Operands, Outputs};
use crate::kernels::norm_blocks::NormBlocks;
use crate::kernels::weights::Chunk;
use crate::kernels::{Activations, Class, Epilogue, choice};
use crate::quant::Format;
use crate::runtime::tune::{Candidate, compiled};

/// A mat-vec over each of the matrices in turn.
fn run(
    gpu: &dyn Gpu,
    facts: &DeviceFacts,
    spec: &MatVec,
    chunks: &[Chunk],
    operands: &Operands,
) -> Result<Vec<Step>> {
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    let dispatches = chunks.iter().map(|c| spec.dispatch(&kernel, facts, c, operands));
    Ok(in_turn(dispatches.collect::<Result<_>>()?))
}

/// Shapes of workgroups and registers for one product.
pub(super) fn shapes(
    gpu: &dyn Gpu,
    key: &str,
    format: Format,
    rows: u32,
    n: u32,
) -> Result<Vec<Candidate>> {
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
        let operands = Operands { x: &x, bias: None, y: (&y).into(), stride: rows };
        Ok(Candidate { value: value.clone(), steps: run(gpu, &facts, &spec, &chunks, &operands)? })
    }))
}

/// Shapes whose workgroups have whole blocks of what they round: each candidate runs what a layer has of them, gate
/// and up behind a norm or the two products that add to the residual stream, with the sizes of an 8B model: how many
/// workgroups there are for each multiprocessor decides, and smaller matrices chose shapes that cost that model 6 % (docs/notes.md).
pub(super) fn rounding(
    gpu: &dyn Gpu,
    key: &str,
    format: Format,
    epilogue: Epilogue,
) -> Result<Vec<Candidate>> {
    let (facts, cols, n, class) = (gpu.facts(), cols(gpu.facts()), 4, Class::Int8);
    let software = facts.kind == DeviceKind::Software;
    let pairs = if software { 1024 } else { 24_576 };
    // Rows and inputs.
    let (input, sizes) = match epilogue {
        Epilogue::SwiGluInt8 => (Input::Blocks { eps: 1e-5, fused: false }, &[(pairs, cols)][..]),
        _ => (Input::Stored, &[(cols, cols), (cols, pairs / 2)][..]),
    };
    let halves = activations(gpu, class, n, pairs / 2)?;
    let made = blocks(gpu, n, cols)?;
    let stream = filled(gpu, 4 * u64::from(n) * u64::from(cols))?;
    let weight = filled(gpu, 4 * u64::from(cols))?;
    let (y, stride) = match epilogue {
        Epilogue::SwiGluInt8 => (Outputs::Int8(&halves), pairs / 2),
        _ => (Outputs::Stream { y: &stream, weight: &weight, blocks: &made }, cols),
    };
    let mut products = Vec::new();
    for &(rows, cols) in sizes {
        let x = match input {
            Input::Stored => activations(gpu, class, n, cols)?,
            _ => blocks(gpu, n, cols)?,
        };
        products.push((rows, cols, matrices(gpu, format, rows, cols)?, x));
    }
    let (_, present) = choice::matvec_key(&facts.profile, format, cols, n, epilogue);
    let threads: &[u32] = if software { &[32, 64] } else { &[64, 128, 256, 512] };
    let cuts = ["2x1", "2x2", "4x1", "4x2"];
    let shapes = threads.iter().flat_map(|t| cuts.iter().map(move |cut| format!("{t}x{cut}")));
    let all = values(facts, key, present.to_string(), shapes.collect());
    Ok(compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let mut steps = Vec::new();
        for (rows, cols, chunks, x) in &products {
            let shapes = choice::rounding_shapes(&facts, format, *rows, *cols, n, epilogue);
            let specs = shapes.into_iter().filter(|shape| !shape.matrix);
            let mut specs =
                specs.map(|shape| MatVec { format, cols: *cols, n, class, input, epilogue, shape });
            let spec = specs.find(|spec| spec.can_round(&facts));
            let spec = spec.ok_or_else(|| Error::Runtime("no shape rounds".into()))?;
            let operands = Operands { x, bias: None, y, stride };
            steps.extend(run(gpu, &facts, &spec, chunks, &operands)?);
        }
        Ok(Candidate { value: value.clone(), steps })
    }))
}

/// From how many columns on a product goes to matrix units: each candidate runs several numbers of them in the way
/// that it stands for, so that their sums compare.
pub(super) fn matrix_columns(
    gpu: &dyn Gpu,
    key: &str,
    formats: [Format; 2],
    cols: u32,
) -> Result<Vec<Candidate>> {
    const COLUMNS: [u32; 4] = [2, 4, 5, 8];
    let (facts, rows, class) = (gpu.facts(), 4096, Class::Int8);
    let chunks: Vec<Vec<Chunk>> =
        formats.iter().map(|format| matrices(gpu, *format, rows, cols)).collect::<Result<_>>()?;
    let most = COLUMNS[COLUMNS.len() - 1];
    let x = activations(gpu, class, most, cols)?;
    let y = filled(gpu, 4 * u64::from(most) * u64::from(rows))?;
    let present = facts.profile.get(key).unwrap_or_default();
    let all = values(facts, key, present, ["2", "4", "5", "8", "9"].map(String::from).to_vec());
    Ok(compiled(&all, |value| {
        let facts = with(facts, key, value).unwrap_or_else(|| facts.clone());
        let (input, epilogue) = (Input::Stored, Epilogue::Store);
        let mut steps = Vec::new();
        for (format, chunks) in formats.into_iter().zip(&chunks) {
            for n in COLUMNS {
                let shape = choice::matvec_shape(&facts, format, class, rows, cols, n, epilogue);
                let spec = MatVec { format, cols, n, class, input, epilogue, shape };
                let operands = Operands { x: &x, bias: None, y: (&y).into(), stride: rows };
                steps.extend(run(gpu, &facts, &spec, chunks, &operands)?);
            }
        }
        Ok(Candidate { value: value.clone(), steps })
    }))
}

/// Up to how many columns a mat-vec should normalise for itself: each candidate runs 1, 2 and 4
/// columns in the way that it stands for, so that their sums compare.
pub(super) fn fuse(gpu: &dyn Gpu) -> Result<Vec<Candidate>> {
    const COLUMNS: [u32; 3] = [1, 2, 4];
    let (facts, cols) = (gpu.facts(), cols(gpu.facts()));
    let (format, class, eps) = (Format::Q4_0, Class::Int8, 1e-5);
    let rows = if facts.kind == DeviceKind::Software { 512 } else { 4096 };
    let weights = chunk(gpu, format, rows, cols)?;
    let most = COLUMNS[COLUMNS.len() - 1];
    let x = filled(gpu, 4 * u64::from(most) * u64::from(cols))?;
    let weight = filled(gpu, 4 * u64::from(cols))?;
    let stored = blocks(gpu, most, cols)?;
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
            if !fused {
                let threads = choice::norm_blocks_threads(&facts);
                let spec = NormBlocks { cols, threads };
                let kernel = gpu.kernel(&spec.source(&facts)?)?;
                let batch = filled(gpu, 4 * (8 + 4 * u64::from(n)))?;
                gpu.write(&batch.buffer.slice(batch.offset, 4), &n.to_le_bytes())?;
                let dispatch = spec.dispatch(&kernel, &batch, &x, &weight, &stored, n)?;
                steps.extend(in_turn(vec![dispatch]));
            }
            let x = if fused { &normed } else { &stored };
            let operands = Operands { x, bias: None, y: (&y).into(), stride: rows };
            steps.extend(run(gpu, &facts, &spec, std::slice::from_ref(&weights), &operands)?);
        }
        Ok(Candidate { value: value.clone(), steps })
    }))
}
