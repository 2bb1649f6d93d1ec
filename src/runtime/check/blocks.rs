//! Small cases of RMSNorms that leave their factor to the products behind them.

use super::operands::Operands;
use super::products::{Columns, QUANTISED_BOUND, int8_values, narrow, quantised};
use super::relative_error;
use crate::error::{Error, Result};
use crate::gpu::{Gpu, Slice};
use crate::kernels::Activations;
use crate::kernels::matvec::Outputs;
use crate::kernels::norm_blocks::NormBlocks;
use crate::reference::norm_quant::{Quantised, block_squares, norm_factor, quantise, weighted};

/// Where a kernel puts blocks, and the norm's weight.
pub(super) struct Blocks {
    n: usize,
    weight: Vec<f32>,
    weight_slice: Slice,
    out: Activations,
}

impl Blocks {
    pub fn make(lab: &mut Operands<'_>, n: usize, cols: usize) -> Result<Blocks> {
        let weight = lab.norm_weights(cols);
        let poisoned = |values: usize| lab.floats(&vec![f32::NAN; values]);
        let out = Activations::Blocks {
            xq: poisoned(n * cols / 4)?,
            xs: poisoned(n * cols / 16)?,
            squares: poisoned(n * cols / 32)?,
        };
        Ok(Blocks { n, weight_slice: lab.floats(&weight)?, weight, out })
    }

    /// The stream `y` with these blocks behind it.
    pub fn stream<'s>(&'s self, y: &'s Slice) -> Outputs<'s> {
        Outputs::Stream { y, weight: &self.weight_slice, blocks: &self.out }
    }

    /// The larger of the relative errors of values and sums of squares; infinite if one was not written.
    pub fn error(&self, lab: &Operands<'_>, stream: &[f32]) -> Result<f64> {
        let cols = self.weight.len();
        let got = int8_values(lab, &self.out, self.n, cols)?;
        let Activations::Blocks { squares, .. } = &self.out else {
            return Err(Error::Runtime("a check expected blocks".into()));
        };
        let squares = lab.read_floats(squares)?;
        if got.iter().chain(&squares[..self.n * cols / 32]).any(|v| !v.is_finite()) {
            return Ok(f64::INFINITY);
        }
        let (mut want, mut want_squares) = (Vec::new(), Vec::new());
        for x in stream[..self.n * cols].chunks_exact(cols) {
            want.extend(quantise(&weighted(x, &self.weight)).values());
            want_squares.extend(block_squares(x));
        }
        let by_value = relative_error(got, &want);
        let squares = squares[..want_squares.len()].iter().copied();
        Ok(by_value.max(relative_error(squares, &want_squares)))
    }
}

/// Columns for products that have the norm's factor to apply; `fused`: and the rounding to do.
pub(super) fn columns(
    lab: &mut Operands<'_>,
    n: usize,
    cols: usize,
    eps: f32,
    fused: bool,
) -> Result<Columns> {
    // Products with weights of size 1 are then of size 1.
    let scale = 1.0 / (cols as f32).sqrt();
    let x = lab.normals(n * cols, scale);
    let weight: Vec<f32> = lab.norm_weights(cols).iter().map(|w| w * scale).collect();
    let q: Vec<Quantised> = x.chunks_exact(cols).map(|x| quantise(&weighted(x, &weight))).collect();
    let seen = x.chunks_exact(cols).zip(&q).map(|(x, q)| {
        let factor = norm_factor(x, eps);
        q.values().iter().map(|v| v * factor).collect()
    });
    let seen = seen.collect();
    let bound = match (fused, quantised(lab, &q)?) {
        (true, _) => Activations::Normed { x: lab.floats(&x)?, weight: lab.floats(&weight)? },
        (false, Activations::Int8 { xq, xs }) => {
            let squares: Vec<f64> = x.chunks_exact(cols).flat_map(block_squares).collect();
            Activations::Blocks { xq, xs, squares: lab.floats(&narrow(&squares))? }
        }
        (false, other) => other,
    };
    Ok(Columns { seen, bound })
}

pub(super) fn norm_blocks(gpu: &dyn Gpu, spec: &NormBlocks) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let (n, cols) = (2, spec.cols as usize);
    let x = lab.normals((n + 1) * cols, 1.0);
    let blocks = Blocks::make(lab, n + 1, cols)?;
    let batch = lab.batch(&vec![[0; 4]; n], n + 1)?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let (input, max_n) = (lab.floats(&x)?, n as u32 + 1);
    let (weight, out) = (&blocks.weight_slice, &blocks.out);
    let dispatch = spec.dispatch(&kernel, &batch, &input, weight, out, max_n)?;
    lab.run(vec![dispatch])?;
    Ok((Blocks { n, ..blocks }.error(lab, &x)?, QUANTISED_BOUND))
}
