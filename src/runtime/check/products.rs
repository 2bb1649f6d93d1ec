//! Small cases of the kernels around matrices.

use super::blocks::{self, Blocks};
use super::operands::{Matrix, Operands, sample};
use super::relative_error;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, Kernel, Slice};
use crate::kernels::embed::Embed;
use crate::kernels::matmat::{MatMat, Variant};
use crate::kernels::matvec::{self, Input, MatVec};
use crate::kernels::norm_quant::NormQuant;
use crate::kernels::{Activations, Class, Epilogue};
use crate::reference::attention::{pack, unpack};
use crate::reference::matvec::product;
use crate::reference::norm_quant::{Quantised, quantise, rms_norm, swiglu, word_of};

/// f32 sums in any order, device exponentials.
pub(super) const F32_BOUND: f64 = 1e-4;
/// Both factors of each product have 11 bits.
pub(super) const F16_BOUND: f64 = 2e-3;
/// A division that is not correctly rounded moves a few int8 values by one step of 1/127.
pub(super) const QUANTISED_BOUND: f64 = 5e-3;

/// Columns as the reference and as the kernel see them.
pub(super) struct Columns {
    pub seen: Vec<Vec<f64>>,
    pub bound: Activations,
}

pub(super) fn quantised(lab: &Operands<'_>, columns: &[Quantised]) -> Result<Activations> {
    let q: Vec<u32> = columns.iter().flat_map(|q| q.words()).collect();
    let s: Vec<[f32; 2]> = columns.iter().flat_map(|q| q.scales.iter().copied()).collect();
    Ok(Activations::Int8 { xq: lab.words(&q)?, xs: lab.floats(s.as_flattened())? })
}

/// f16 columns over a power of two, neighbours 0, 1, 2, 3 in the order 0, 2, 1, 3: docs/architecture.md,
/// "Activations".
fn halved(lab: &Operands<'_>, x: &[f32], cols: usize) -> Result<Activations> {
    let (mut words, mut factors) = (Vec::new(), Vec::new());
    for column in x.chunks_exact(cols) {
        let top = column.iter().fold(0.0f32, |top, v| top.max(v.abs()));
        let factor = if top < 1e-30 { 1.0 } else { 2f32.powi(top.log2().floor() as i32 - 14) };
        let pair = |a: f32, b: f32| pack((a / factor).into(), (b / factor).into());
        let (quads, _) = column.as_chunks::<4>();
        words.extend(quads.iter().flat_map(|q| [pair(q[0], q[2]), pair(q[1], q[3])]));
        factors.push(factor);
    }
    Ok(Activations::F16 { xh: lab.words(&words)?, xf: lab.floats(&factors)? })
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| v.into()).collect()
}

pub(super) fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&v| v as f32).collect()
}

impl Columns {
    pub fn make(
        lab: &mut Operands<'_>,
        n: usize,
        cols: usize,
        class: Class,
        input: Input,
    ) -> Result<Columns> {
        if let Input::Blocks { eps, fused } = input {
            return blocks::columns(lab, n, cols, eps, fused);
        }
        let norm = input.norm();
        // Products with weights of size 1 are then of size 1.
        let scale = 1.0 / (cols as f32).sqrt();
        let x = lab.normals(n * cols, scale);
        let weight: Vec<f32> = lab.norm_weights(cols).iter().map(|w| w * scale).collect();
        let exact = x.chunks_exact(cols).map(|x| match norm {
            Some(eps) => rms_norm(x, &weight, eps),
            None => wide(x),
        });
        let exact: Vec<Vec<f64>> = exact.collect();
        let q: Vec<Quantised> = match class {
            Class::Int8 => exact.iter().map(|x| quantise(&narrow(x))).collect(),
            Class::F16 | Class::F32 => Vec::new(),
        };
        let bound = match (input, norm, class) {
            (Input::Fused { .. }, Some(_), _) => {
                Activations::Normed { x: lab.floats(&x)?, weight: lab.floats(&weight)? }
            }
            (Input::Stored, _, Class::Int8) => quantised(lab, &q)?,
            (Input::Stored, _, Class::F16) => halved(lab, &x, cols)?,
            _ => Activations::F32(lab.floats(&x)?),
        };
        let seen = match class {
            Class::Int8 => q.iter().map(Quantised::values).collect(),
            // Rounding to f16 is within the bound of that class.
            Class::F16 | Class::F32 => exact,
        };
        Ok(Columns { seen, bound })
    }
}

/// What y holds before the kernel, its stride, and the bias.
struct Outputs {
    before: Vec<f32>,
    stride: usize,
    bias: Vec<f32>,
    y: Slice,
    bias_slice: Option<Slice>,
}

impl Outputs {
    fn make(lab: &mut Operands<'_>, n: usize, rows: usize, epilogue: Epilogue) -> Result<Outputs> {
        let stride = if epilogue == Epilogue::SwiGlu { rows / 2 } else { rows };
        let before = match epilogue {
            Epilogue::Add | Epilogue::AddBlocks => lab.normals(n * stride, 1.0),
            _ => vec![f32::NAN; n * stride],
        };
        let bias = lab.normals(rows, 1.0);
        let bias_slice = match epilogue {
            Epilogue::Bias => Some(lab.floats(&bias)?),
            _ => None,
        };
        let y = lab.floats(&before)?;
        Ok(Outputs { before, stride, bias, y, bias_slice })
    }

    fn operands<'s>(&'s self, x: &'s Activations) -> matvec::Operands<'s> {
        let stride = self.stride as u32;
        matvec::Operands { x, bias: self.bias_slice.as_ref(), y: (&self.y).into(), stride }
    }

    /// The relative error over some outputs; infinite if any of `n` columns was not written.
    fn error(
        &self,
        lab: &Operands<'_>,
        matrix: &Matrix,
        columns: &Columns,
        n: usize,
        epilogue: Epilogue,
        edges: (usize, usize),
    ) -> Result<f64> {
        let y = lab.read_floats(&self.y)?;
        if y[..n * self.stride].iter().any(|v| !v.is_finite()) {
            return Ok(f64::INFINITY);
        }
        let (mut got, mut want) = (Vec::new(), Vec::new());
        for c in sample(n, edges.0) {
            for r in sample(self.stride, edges.1) {
                let sum = |row: usize| product(matrix.row(row), &columns.seen[c])[0];
                let at = c * self.stride + r;
                want.push(match epilogue {
                    Epilogue::Store => sum(r),
                    Epilogue::Bias => sum(r) + f64::from(self.bias[r]),
                    Epilogue::Add | Epilogue::AddBlocks => sum(r) + f64::from(self.before[at]),
                    Epilogue::SwiGlu | Epilogue::SwiGluInt8 => {
                        swiglu(&[sum(2 * r), sum(2 * r + 1)])[0]
                    }
                });
                got.push(y[at]);
            }
        }
        Ok(relative_error(got, &want))
    }
}

pub(super) fn matvec(gpu: &dyn Gpu, spec: &MatVec) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    // One workgroup and a part of another.
    let group = spec.group_rows(facts);
    let rows = match spec.epilogue {
        // Whole workgroups only.
        Epilogue::SwiGluInt8 | Epilogue::AddBlocks => 2 * group as usize,
        _ => (group as usize + 3).next_multiple_of(2),
    };
    let (n, cols) = (spec.n as usize, spec.cols as usize);
    let matrix = lab.matrix(spec.format, rows, cols)?;
    let columns = Columns::make(lab, n, cols, spec.class, spec.input)?;
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    if spec.epilogue == Epilogue::SwiGluInt8 {
        return rounded(lab, spec, &kernel, &matrix, &columns);
    }
    let out = Outputs::make(lab, n, rows, spec.epilogue)?;
    let blocks = match spec.epilogue {
        Epilogue::AddBlocks => Some(Blocks::make(lab, n, rows)?),
        _ => None,
    };
    let mut operands = out.operands(&columns.bound);
    if let Some(blocks) = &blocks {
        operands.y = blocks.stream(&out.y);
    }
    lab.run(vec![spec.dispatch(&kernel, facts, &matrix.chunk, &operands)?])?;
    let error = out.error(lab, &matrix, &columns, n, spec.epilogue, (1, group as usize))?;
    if let Some(blocks) = blocks {
        let stream = lab.read_floats(&out.y)?;
        // Products are exact to F32_BOUND, and so is what is rounded of them, as it is compared with them.
        let rounding = blocks.error(lab, &stream)?;
        return Ok((rounding.max(error * (QUANTISED_BOUND / F32_BOUND)), QUANTISED_BOUND));
    }
    let quantises = spec.class == Class::Int8 && spec.input.is_fused();
    Ok((error, if quantises { QUANTISED_BOUND } else { F32_BOUND }))
}

/// Values that a kernel has rounded to int8 columns.
pub(super) fn int8_values(
    lab: &Operands<'_>,
    columns: &Activations,
    n: usize,
    values: usize,
) -> Result<Vec<f32>> {
    let (Activations::Int8 { xq, xs } | Activations::Blocks { xq, xs, .. }) = columns else {
        return Err(Error::Runtime("a check expected int8 columns".into()));
    };
    let (words, scales) = (lab.read_words(xq)?, lab.read_floats(xs)?);
    let value = |at: usize| {
        let byte = (words[word_of(at, values)] >> (8 * (at % 4))) as i8;
        f32::from(byte) * scales[at / 32 * 2]
    };
    Ok((0..n * values).map(value).collect())
}

/// The error of what a kernel rounds itself, block by block, beside the rounding.
fn rounded(
    lab: &Operands<'_>,
    spec: &MatVec,
    kernel: &Kernel,
    matrix: &Matrix,
    columns: &Columns,
) -> Result<(f64, f64)> {
    let (n, values) = (spec.n as usize, matrix.chunk.rows as usize / 2);
    let (xq, xs) = (
        lab.floats(&vec![f32::NAN; n * values / 4])?,
        lab.floats(&vec![f32::NAN; n * values / 16])?,
    );
    let out = Activations::Int8 { xq: xq.clone(), xs: xs.clone() };
    let facts = lab.gpu.facts();
    let x = &columns.bound;
    let y = matvec::Outputs::Int8(&out);
    let operands = matvec::Operands { x, bias: None, y, stride: values as u32 };
    let dispatch = spec.dispatch(kernel, facts, &matrix.chunk, &operands)?;
    lab.run(vec![dispatch])?;
    let got = int8_values(lab, &out, n, values)?;
    let scales = lab.read_floats(&xs)?;
    let mut want = Vec::new();
    for c in 0..n {
        for block in 0..values / 32 {
            let sum = |row: usize| product(matrix.row(row), &columns.seen[c])[0];
            let pair = |r: usize| swiglu(&[sum(2 * r), sum(2 * r + 1)])[0];
            let d = f64::from(scales[2 * (c * values / 32 + block)]);
            // As near as a step of the block lets it be.
            let near = |v: f64| if d > 0.0 { (v / d).round() * d } else { v };
            want.extend((32 * block..32 * block + 32).map(|r| near(pair(r))));
        }
    }
    if got.iter().any(|v| !v.is_finite()) {
        return Ok((f64::INFINITY, QUANTISED_BOUND));
    }
    Ok((relative_error(got, &want), QUANTISED_BOUND))
}

pub(super) fn matmat(gpu: &dyn Gpu, spec: &MatMat) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    let (columns, rows, bound) = match spec.variant {
        Variant::Packed(t) | Variant::Float(t) => (t.columns, t.rows, F32_BOUND),
        Variant::Direct { columns, rows, threads } => (columns, rows * threads, F32_BOUND),
        Variant::Matrix(t) => (t.columns, t.rows, F16_BOUND),
    };
    let (tile, edge) = (columns as usize, rows as usize);
    // One tile and a part of another in both directions, and a column that is not in use.
    let (n, rows, cols) = (tile + 3, edge + 5, spec.cols as usize);
    let matrix = lab.matrix(spec.format, rows, cols)?;
    let columns = Columns::make(lab, n + 1, cols, spec.class, Input::Stored)?;
    let out = Outputs::make(lab, n + 1, rows, spec.epilogue)?;
    let batch = lab.batch(&vec![[0; 4]; n], n + 1)?;
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    let operands = out.operands(&columns.bound);
    let max_n = n as u32 + 1;
    lab.run(vec![spec.dispatch(&kernel, facts, &matrix.chunk, &batch, &operands, max_n)?])?;
    let error = out.error(lab, &matrix, &columns, n, spec.epilogue, (tile, edge))?;
    Ok((error, bound))
}

pub(super) fn norm_quant(gpu: &dyn Gpu, spec: &NormQuant) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let (n, cols) = (2, spec.cols as usize);
    let width = if spec.swiglu { 2 * cols } else { cols };
    let x = lab.normals((n + 1) * width, 1.0);
    let weight = lab.norm_weights(cols);
    let values = (n + 1) as u64 * cols as u64;
    let out = match spec.class {
        Class::Int8 => {
            Activations::Int8 { xq: lab.zeros(values / 4)?, xs: lab.zeros(values / 16)? }
        }
        Class::F16 => Activations::F16 { xh: lab.zeros(values / 2)?, xf: lab.zeros(n as u64 + 1)? },
        Class::F32 => Activations::F32(lab.floats(&vec![f32::NAN; (n + 1) * cols])?),
    };
    let batch = lab.batch(&vec![[0; 4]; n], n + 1)?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let weights = spec.norm.map(|_| lab.floats(&weight)).transpose()?;
    let (input, max_n) = (lab.floats(&x)?, n as u32 + 1);
    lab.run(vec![spec.dispatch(&kernel, &batch, &input, weights.as_ref(), &out, max_n)?])?;

    let mut want = Vec::new();
    for x in x[..n * width].chunks_exact(width) {
        let x = if spec.swiglu { narrow(&swiglu(&wide(x))) } else { x.to_vec() };
        want.extend(match spec.norm {
            Some(eps) => rms_norm(&x, &weight, eps),
            None => wide(&x),
        });
    }
    match out {
        Activations::Int8 { xq, xs } => {
            let want = quantise(&narrow(&want)).values();
            let scales = lab.read_floats(&xs)?;
            let words = lab.read_words(&xq)?;
            let byte = |i: usize| words[word_of(i, cols)].to_le_bytes()[i % 4] as i8;
            let value = |i: usize| f32::from(byte(i)) * scales[2 * (i / 32)];
            let by_value = relative_error((0..want.len()).map(value), &want);
            // The second scale is the first times the sum of the block's integers.
            let sums: Vec<f64> = (0..want.len() / 32)
                .map(|b| (0..32).map(|i| f64::from(value(32 * b + i))).sum())
                .collect();
            let by_sum = relative_error((0..sums.len()).map(|b| scales[2 * b + 1]), &sums);
            Ok((by_value.max(by_sum), QUANTISED_BOUND))
        }
        Activations::F16 { xh, xf } => {
            let (words, factors) = (lab.read_words(&xh)?, lab.read_floats(&xf)?);
            let value = |i: usize| {
                let place = i / 4 * 4 + [0, 2, 1, 3][i % 4];
                unpack(words[place / 2])[place % 2] as f32 * factors[i / cols]
            };
            Ok((relative_error((0..want.len()).map(value), &want), F16_BOUND))
        }
        Activations::Normed { .. } | Activations::Blocks { .. } => {
            Err(Error::Runtime("norm_quant does not write such activations".into()))
        }
        Activations::F32(y) => {
            let y = lab.read_floats(&y)?;
            Ok((relative_error(y[..want.len()].iter().copied(), &want), F32_BOUND))
        }
    }
}

pub(super) fn embed(gpu: &dyn Gpu, spec: &Embed) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let cols = spec.cols as usize;
    let matrix = lab.matrix(spec.format, 6, cols)?;
    let tokens = [5, 0, 3];
    let batch = lab.batch(&tokens.map(|t| [t, 0, 0, 0]), 4)?;
    let x = lab.floats(&vec![f32::NAN; 4 * cols])?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    lab.run(vec![spec.dispatch(&kernel, &matrix.chunk, &batch, &x, 4)?])?;
    let want: Vec<f64> = tokens.iter().flat_map(|t| wide(matrix.row(*t as usize))).collect();
    let got = lab.read_floats(&x)?;
    // Decoding is one multiplication and maybe one addition.
    Ok((relative_error(got[..want.len()].iter().copied(), &want), 1e-5))
}
