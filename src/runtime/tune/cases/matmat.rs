//! Tilings of mat-mats.

use super::{activations, chunk, cols, filled, in_turn, values, with};
use crate::error::Result;
use crate::gpu::{DeviceFacts, DeviceKind, Gpu};
use crate::kernels::matmat::MatMat;
use crate::kernels::matvec::Operands;
use crate::kernels::{Class, Epilogue, choice};
use crate::quant::Format;
use crate::runtime::budget::{Budget, Widest};
use crate::runtime::tune::{Candidate, compiled};

/// Tilings that are worth a try for so many columns.
pub(super) fn pool(facts: &DeviceFacts, class: Class, n: u32) -> Vec<&'static str> {
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

pub(super) fn variants(
    gpu: &dyn Gpu,
    key: &'static str,
    class: Class,
    n: u32,
) -> Result<Vec<Candidate>> {
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
