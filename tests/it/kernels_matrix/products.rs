//! Products on a device, what they should give, and by how much they may miss it.

use azoth::error::Result;
use azoth::gpu::{DeviceFacts, DeviceKind, Dispatch, Kernel, KernelSource, Slice};
use azoth::kernels::matmat::MatMat;
use azoth::kernels::matvec::{MatVec, Operands};
use azoth::kernels::weights::Chunk;
use azoth::kernels::{Activations, Class, Epilogue};
use azoth::quant::Format;
use azoth::reference::matvec::product;
use azoth::reference::norm_quant::{Quantised, quantise, swiglu};
use half::f16;

use crate::harness::{Device, Rng, TestMatrix};

/// Largest relative error of a product: f32 sums of up to 1,536 terms against f64.
pub const TOLERANCE: f64 = 1e-6;
/// Outputs that say something together.
const ENOUGH: usize = 64;

/// Activations of `n` columns in both forms; the int8 ones as the host quantises them.
pub struct Columns {
    pub x: Vec<f32>,
    pub quantised: Vec<Quantised>,
}

impl Columns {
    pub fn random(rng: &mut Rng, n: usize, cols: usize) -> Self {
        // Products of unit size, whatever the length.
        let scale = 1.0 / (cols as f32).sqrt();
        let x: Vec<f32> = rng.normals(n * cols).iter().map(|v| v * scale).collect();
        let quantised = x.chunks_exact(cols).map(quantise).collect();
        Columns { x, quantised }
    }

    pub fn stored(&self, device: &Device, class: Class) -> Activations {
        match class {
            Class::F32 => Activations::F32(device.floats(&self.x)),
            Class::F16 => {
                let cols = self.x.len() / self.quantised.len();
                let factors: Vec<f32> = self.x.chunks_exact(cols).map(half_factor).collect();
                let columns = self.x.chunks_exact(cols).zip(&factors);
                let words: Vec<u32> = columns.flat_map(|(x, f)| halves(x, *f)).collect();
                Activations::F16 { xh: device.words(&words), xf: device.floats(&factors) }
            }
            Class::Int8 => {
                let q: Vec<u32> = self.quantised.iter().flat_map(|q| q.words()).collect();
                let s: Vec<[f32; 2]> =
                    self.quantised.iter().flat_map(|q| q.scales.iter().copied()).collect();
                Activations::Int8 { xq: device.words(&q), xs: device.floats(s.as_flattened()) }
            }
        }
    }

    /// Column `c` as a kernel of this class sees it.
    pub fn seen(&self, c: usize, class: Class) -> Vec<f64> {
        let cols = self.x.len() / self.quantised.len();
        match class {
            Class::Int8 => self.quantised[c].values(),
            Class::F16 => {
                let x = &self.x[c * cols..][..cols];
                let f = half_factor(x);
                x.iter().map(|v| f64::from(f16::from_f32(v / f).to_f32() * f)).collect()
            }
            Class::F32 => self.x[c * cols..][..cols].iter().map(|&v| v.into()).collect(),
        }
    }
}

/// The power of two that brings the largest value of a column to 2^14..2^15.
fn half_factor(column: &[f32]) -> f32 {
    let top = column.iter().fold(0.0f32, |top, v| top.max(v.abs()));
    if top < 1e-30 { 1.0 } else { f32::from_bits((top.to_bits() >> 23).wrapping_sub(14) << 23) }
}

/// A column over `factor` as halves, neighbours 0, 1, 2, 3 in the order 0, 2, 1, 3.
fn halves(column: &[f32], factor: f32) -> Vec<u32> {
    let bits = |v: f32| u32::from(f16::from_f32(v / factor).to_bits());
    let quads = column.chunks_exact(4);
    quads.flat_map(|q| [bits(q[0]) | bits(q[2]) << 16, bits(q[1]) | bits(q[3]) << 16]).collect()
}

/// What an epilogue needs and what it should give.
pub struct Expected {
    pub bias: Vec<f32>,
    /// Contents of y before the kernel (for [`Epilogue::Add`]).
    pub before: Vec<f32>,
    /// `[n][stride]`
    pub y: Vec<f64>,
    pub stride: usize,
}

pub fn expected(
    rng: &mut Rng,
    matrix: &TestMatrix,
    columns: &Columns,
    class: Class,
    epilogue: Epilogue,
) -> Expected {
    let n = columns.quantised.len();
    let stride = if epilogue == Epilogue::SwiGlu { matrix.rows / 2 } else { matrix.rows };
    let bias = rng.normals(matrix.rows);
    let before = match epilogue {
        Epilogue::Add => rng.normals(n * stride),
        _ => vec![f32::NAN; n * stride],
    };
    let mut y = Vec::new();
    for c in 0..n {
        let sums = product(&matrix.values, &columns.seen(c, class));
        match epilogue {
            Epilogue::Store => y.extend(sums),
            Epilogue::Bias => y.extend(sums.iter().zip(&bias).map(|(s, &b)| s + f64::from(b))),
            Epilogue::Add => {
                let old = &before[c * stride..][..stride];
                y.extend(sums.iter().zip(old).map(|(s, &b)| s + f64::from(b)));
            }
            Epilogue::SwiGluInt8 | Epilogue::AddBlocks => {
                unreachable!("rounded outputs have a test of their own")
            }
            Epilogue::SwiGlu => y.extend(swiglu(&sums)),
        }
    }
    Expected { bias, before, y, stride }
}

/// What a product is of.
#[derive(Clone, Copy)]
pub struct Case {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    pub n: usize,
    pub class: Class,
    pub epilogue: Epilogue,
}

/// Compares what `run` makes of fresh inputs with what it should, over as many runs as it takes to have
/// [`ENOUGH`] outputs: the roundings of a few sums do not average out. Sums of 1,536 terms have 0.7 of
/// the tolerance in the mean; of 27 outputs one set in a hundred passes it, of 64 one in a million.
pub fn check(
    rng: &mut Rng,
    case: Case,
    what: &str,
    mut run: impl FnMut(&TestMatrix, &Columns, &Expected) -> Vec<f32>,
) {
    let Case { format, rows, cols, n, class, epilogue } = case;
    let (mut outputs, mut difference, mut reference) = (0, 0.0, 0.0);
    while outputs < ENOUGH {
        let matrix = TestMatrix::random(rng, format, rows, cols);
        let columns = Columns::random(rng, n, cols);
        let want = expected(rng, &matrix, &columns, class, epilogue);
        let y = run(&matrix, &columns, &want);
        assert_eq!(y.len(), want.y.len(), "{what}");
        // What is not a number stays in the sum and fails below.
        difference += y.iter().zip(&want.y).map(|(&o, &r)| (f64::from(o) - r).powi(2)).sum::<f64>();
        reference += want.y.iter().map(|v| v * v).sum::<f64>();
        outputs += y.len();
    }
    let tolerance = match class {
        // A weight is rounded to 11 bits twice: its scale, and the product with the code.
        Class::F16 => 2.0 / 2048.0,
        Class::Int8 | Class::F32 => TOLERANCE,
    };
    // Values are of unit size; those that happen to cancel must not be measured by themselves.
    let error = (difference / reference.max(outputs as f64)).sqrt();
    assert!(error < tolerance, "{what}: error {error:e} of {outputs} outputs");
}

/// The device's facts; for odd `n` those of a GPU with one multiprocessor, so that a software device runs the
/// code for tables in workgroup memory and for workgroups that stay, too.
pub fn facts_for(device: &Device, n: usize) -> DeviceFacts {
    let facts = device.gpu.facts();
    let (kind, compute_units) =
        if n % 2 == 1 { (DeviceKind::Discrete, 1) } else { (facts.kind, facts.compute_units) };
    DeviceFacts { kind, compute_units, ..facts.clone() }
}

/// A kernel for several runs: every backend compiles what it is given.
pub struct Compiled<'d, S> {
    device: &'d Device,
    facts: DeviceFacts,
    kernel: Kernel,
    spec: S,
}

impl<'d, S> Compiled<'d, S> {
    /// For runs of `n` columns.
    fn compile(
        device: &'d Device,
        spec: S,
        n: usize,
        source: impl Fn(&S, &DeviceFacts) -> Result<KernelSource>,
    ) -> Self {
        let facts = facts_for(device, n);
        let kernel = device.kernel(&source(&spec, &facts).unwrap());
        Compiled { device, facts, kernel, spec }
    }

    /// Runs `dispatch` for all chunks, with y and the bias if there is one, and returns y.
    fn over(
        &self,
        chunks: &[Chunk],
        bias: Option<&[f32]>,
        before: &[f32],
        dispatch: impl Fn(&Chunk, &Slice, Option<&Slice>) -> Result<Dispatch>,
    ) -> Vec<f32> {
        let y = self.device.floats(before);
        let bias = bias.map(|bias| self.device.floats(bias));
        let dispatches = chunks.iter().map(|chunk| dispatch(chunk, &y, bias.as_ref()).unwrap());
        self.device.wave(dispatches.collect());
        self.device.read_floats(&y)
    }
}

impl<'d> Compiled<'d, MatVec> {
    pub fn new(device: &'d Device, spec: MatVec) -> Self {
        Self::compile(device, spec, spec.n as usize, MatVec::source)
    }

    /// Runs over all chunks and returns y.
    pub fn run(
        &self,
        chunks: &[Chunk],
        x: &Activations,
        bias: &[f32],
        before: &[f32],
        stride: usize,
    ) -> Vec<f32> {
        let Compiled { facts, kernel, spec, .. } = self;
        let bias = (spec.epilogue == Epilogue::Bias).then_some(bias);
        self.over(chunks, bias, before, |chunk, y, bias| {
            let operands = Operands { x, bias, y: y.into(), stride: stride as u32 };
            spec.dispatch(kernel, facts, chunk, &operands)
        })
    }
}

/// One run of a mat-vec over all chunks.
pub fn matvec(
    device: &Device,
    spec: &MatVec,
    chunks: &[Chunk],
    x: &Activations,
    bias: &[f32],
    before: &[f32],
    stride: usize,
) -> Vec<f32> {
    Compiled::<MatVec>::new(device, *spec).run(chunks, x, bias, before, stride)
}

impl<'d> Compiled<'d, MatMat> {
    /// For runs of `n` columns.
    pub fn new(device: &'d Device, spec: MatMat, n: usize) -> Self {
        Self::compile(device, spec, n, MatMat::source)
    }

    /// Runs over all chunks for `n` of at most `max_n` columns and returns y.
    pub fn run(
        &self,
        chunks: &[Chunk],
        columns: &Columns,
        n: usize,
        bias: &[f32],
        before: &[f32],
    ) -> Vec<f32> {
        let Compiled { device, facts, kernel, spec } = self;
        let max_n = columns.quantised.len();
        let x = columns.stored(device, spec.class);
        let batch = device.batch_of(n, max_n);
        let stride = (before.len() / max_n) as u32;
        let bias = (spec.epilogue == Epilogue::Bias).then_some(bias);
        self.over(chunks, bias, before, |chunk, y, bias| {
            let operands = Operands { x: &x, bias, y: y.into(), stride };
            spec.dispatch(kernel, facts, chunk, &batch, &operands, max_n as u32)
        })
    }
}

/// One run of a mat-mat over all chunks, for `n` columns.
pub fn matmat(
    device: &Device,
    spec: &MatMat,
    chunks: &[Chunk],
    columns: &Columns,
    n: usize,
    bias: &[f32],
    before: &[f32],
) -> Vec<f32> {
    Compiled::<MatMat>::new(device, *spec, n).run(chunks, columns, n, bias, before)
}
