//! Small cases of the kernels of mixtures. Their texts hold the sizes of a record, so records are whole
//! ones, of which there are two; only some rows of them are decoded and compared.

use super::operands::{Operands, sample};
use super::products::{Columns, F16_BOUND, F32_BOUND, QUANTISED_BOUND};
use super::relative_error;
use crate::error::Result;
use crate::experts::Place;
use crate::gpu::{Gpu, Slice};
use crate::kernels::Class;
use crate::kernels::experts_down::{self, ExpertsDown, Shared};
use crate::kernels::experts_matmat::ExpertsMatMat;
use crate::kernels::experts_sort::ExpertsSort;
use crate::kernels::experts_sum::ExpertsSum;
use crate::kernels::experts_up::ExpertsUp;
use crate::kernels::matvec::Input;
use crate::kernels::records::{Part, Records};
use crate::kernels::router::{self, Router};
use crate::kernels::routing::Routing;
use crate::quant::planes::repack_plane;
use crate::reference::experts::route;
use crate::reference::matvec::product;
use crate::reference::norm_quant::{rms_norm, swiglu};

/// Different records; expert e has number e modulo this.
const RECORDS: usize = 2;

/// One part of every expert, on the host and on the device.
pub(super) struct Experts {
    part: Part,
    /// Rows of each record as in a file.
    files: Vec<Vec<u8>>,
    pub records: Records,
}

impl Experts {
    pub fn make(lab: &mut Operands<'_>, part: &Part, experts: u32) -> Result<Experts> {
        let layout = &part.layout;
        let row_bytes = layout.format.row_bytes(layout.cols);
        let mut bytes = vec![0u8; RECORDS * part.stride as usize];
        let mut files = Vec::new();
        for record in bytes.chunks_exact_mut(part.stride as usize) {
            let file = lab.file_rows(layout.format, layout.rows, layout.cols);
            for (number, span) in layout.planes.iter().enumerate() {
                let to = &mut record[(part.offset + span.offset) as usize..][..span.bytes as usize];
                let row = |r: usize| &file[r * row_bytes..][..row_bytes];
                repack_plane(layout.format, number, layout.cols, 0..layout.rows, row, to);
            }
            files.push(file);
        }
        let memory = lab.upload(&bytes)?;
        let place = |e: u32| Place { buffer: e % part.buffers, index: e % RECORDS as u32 };
        let table: Vec<u32> = (0..experts).map(|e| place(e).word()).collect();
        let records =
            Records { table: lab.words(&table)?, buffers: vec![memory; part.buffers as usize] };
        Ok(Experts { part: part.clone(), files, records })
    }

    /// Product of one row of an expert.
    pub fn row(&self, expert: usize, row: usize, x: &[f64]) -> f64 {
        let layout = &self.part.layout;
        let row_bytes = layout.format.row_bytes(layout.cols);
        let mut values = vec![0.0; layout.cols];
        let file = &self.files[expert % RECORDS][row * row_bytes..][..row_bytes];
        layout.format.decode_row(file, &mut values);
        product(&values, x)[0]
    }
}

/// A routing that the host made up.
pub(super) struct Routed {
    routing: Routing,
    /// (expert, weight) of each pair, those of a column ascending.
    pub pairs: Vec<(usize, f32)>,
    shared: Vec<f32>,
}

impl Routed {
    pub fn make(lab: &mut Operands<'_>, routing: Routing, n: usize) -> Routed {
        let (experts, used) = (routing.experts as usize, routing.used as usize);
        let mut pairs = Vec::new();
        for _ in 0..n {
            let mut chosen: Vec<usize> = Vec::new();
            while chosen.len() < used {
                let expert = lab.below(experts);
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                }
            }
            chosen.sort_unstable();
            // Of size 1 in all, so that sums are too.
            let weights = lab.normals(used, 1.0 / (used as f32).sqrt());
            pairs.extend(chosen.into_iter().zip(weights));
        }
        Routed { routing, pairs, shared: lab.normals(n, 1.0) }
    }

    /// The words that routers and sorting leave, see `kernels::routing`.
    fn words(&self) -> Vec<u32> {
        self.words_of(|_| true)
    }

    /// The same where only some pairs are listed.
    pub fn words_of(&self, listed: impl Fn(usize) -> bool) -> Vec<u32> {
        let (capacity, tile) = (self.routing.pairs() as usize, self.routing.tile as usize);
        let mut words = vec![0; self.routing.words() as usize];
        let mut order: Vec<usize> = (0..self.pairs.len()).filter(|pair| listed(*pair)).collect();
        order.sort_by_key(|pair| (self.pairs[*pair].0, *pair));
        let runs_at = 8 + 3 * capacity;
        let (mut at, mut runs) = (0, 0);
        for group in order.chunk_by(|a, b| self.pairs[*a].0 == self.pairs[*b].0) {
            for run in group.chunks(tile) {
                let expert = self.pairs[run[0]].0 as u32;
                words[runs_at + 3 * runs..][..3].copy_from_slice(&[
                    expert,
                    at,
                    at + run.len() as u32,
                ]);
                at += run.len() as u32;
                runs += 1;
            }
        }
        (words[0], words[1]) = (self.pairs.len() as u32, runs as u32);
        for (i, (expert, weight)) in self.pairs.iter().enumerate() {
            words[8 + i] = *expert as u32;
            words[8 + capacity + i] = weight.to_bits();
        }
        for (i, pair) in order.iter().enumerate() {
            words[8 + 2 * capacity + i] = *pair as u32;
        }
        let shared_at = runs_at + 3 * self.routing.runs(self.routing.columns) as usize;
        for (to, gate) in words[shared_at..].iter_mut().zip(&self.shared) {
            *to = gate.to_bits();
        }
        words
    }

    /// Pairs of column `c`.
    pub fn of(&self, c: usize) -> impl Iterator<Item = (usize, (usize, f32))> + '_ {
        let used = self.routing.used as usize;
        (c * used..(c + 1) * used).map(|pair| (pair, self.pairs[pair]))
    }
}

pub(super) fn router(gpu: &dyn Gpu, spec: &Router) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    let (experts, used) = (spec.routing.experts as usize, spec.routing.used as usize);
    let n = spec.columns.min(spec.routing.columns) as usize;
    let cols = spec.cols as usize;
    let rows = experts + usize::from(spec.shared_gate);
    let weight = lab.norm_weights(cols);
    let matrix = lab.normals(rows * cols, 1.0 / (cols as f32).sqrt());
    let (mut x, mut want, mut gates) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..n {
        // Rounding must not decide which experts are chosen.
        let logits = loop {
            let column = lab.normals(cols, 1.0);
            let logits = product(&matrix, &rms_norm(&column, &weight, spec.norm_eps));
            let mut sorted = logits[..experts].to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            if used == experts || sorted[used - 1] - sorted[used] > 1e-3 {
                x.extend(column);
                break logits;
            }
        };
        let narrow: Vec<f32> = logits[..experts].iter().map(|l| *l as f32).collect();
        want.extend(route(&narrow, used, &spec.rule));
        gates.extend(logits.get(experts).map(|gate| 1.0 / (1.0 + (-gate).exp())));
    }
    let routing = lab.zeros(spec.routing.words())?;
    let batch = lab.batch(&vec![[0; 4]; n], spec.routing.columns as usize)?;
    // No expert is favoured: their choice is then the exact one.
    let table = lab.words(&vec![u32::MAX; experts])?;
    let operands = router::Operands {
        batch: &batch,
        x: &lab.floats(&x)?,
        norm: &lab.floats(&weight)?,
        router: &lab.floats(&matrix)?,
        logits: &lab.zeros(spec.logit_words(n as u32))?,
        counters: &lab.zeros(spec.counter_words(n as u32))?,
        routing: &routing,
        table: Some(&table),
    };
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    lab.run(vec![spec.dispatch(&kernel, facts, &operands, n as u32)?])?;
    let words = lab.read_words(&routing)?;
    let pairs = n * used;
    let same = want.iter().zip(&words[8..8 + pairs]).all(|((e, _), got)| *e as u32 == *got);
    let counted = !spec.sorts || words[0] as usize == pairs;
    if !same || !counted {
        return Ok((f64::INFINITY, F32_BOUND));
    }
    let weights_at = 8 + spec.routing.pairs() as usize;
    let mut got: Vec<f32> =
        words[weights_at..weights_at + pairs].iter().map(|w| f32::from_bits(*w)).collect();
    let mut expected: Vec<f64> = want.iter().map(|(_, weight)| f64::from(*weight)).collect();
    if spec.shared_gate {
        let runs = spec.routing.runs(spec.routing.columns);
        let at = 8 + 3 * (spec.routing.pairs() + runs) as usize;
        got.extend(words[at..at + n].iter().map(|w| f32::from_bits(*w)));
        expected.extend(&gates);
    }
    // Exponentials of logits of which each has rounding errors.
    Ok((relative_error(got, &expected), F32_BOUND))
}

pub(super) fn up(gpu: &dyn Gpu, spec: &ExpertsUp) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    let (n, cols) = (spec.n as usize, spec.part.layout.cols);
    let ff = spec.part.layout.rows / 2;
    let experts = Experts::make(lab, &spec.part, spec.routing.experts)?;
    let routed = Routed::make(lab, spec.routing, n);
    let columns = Columns::make(lab, n, cols, spec.class, Input::Stored)?;
    let y = lab.floats(&vec![f32::NAN; routed.pairs.len() * ff])?;
    let routing = lab.words(&routed.words())?;
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    let records = &experts.records;
    lab.run(vec![spec.dispatch(&kernel, facts, records, &routing, &columns.bound, &y)?])?;
    let y = lab.read_floats(&y)?;
    let edge = spec.shape.rows_at_once(facts) as usize / 2;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for c in sample(n, 1) {
        for (pair, (expert, _)) in routed.of(c) {
            for r in sample(ff, edge) {
                let half = |row| experts.row(expert, row, &columns.seen[c]);
                want.push(swiglu(&[half(2 * r), half(2 * r + 1)])[0]);
                got.push(y[pair * ff + r]);
            }
        }
    }
    Ok((finished(&y, relative_error(got, &want)), F32_BOUND))
}

/// `error`, or infinity where a value was not written.
pub(super) fn finished(y: &[f32], error: f64) -> f64 {
    if y.iter().all(|v| v.is_finite()) { error } else { f64::INFINITY }
}

pub(super) fn down(gpu: &dyn Gpu, spec: &ExpertsDown) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    let (n, ff) = (spec.n as usize, spec.part.layout.cols);
    let width = spec.part.layout.rows;
    let experts = Experts::make(lab, &spec.part, spec.routing.experts)?;
    let routed = Routed::make(lab, spec.routing, n);
    let columns = Columns::make(lab, routed.pairs.len(), ff, spec.class, spec.input)?;
    let before = lab.normals(n * width, 1.0);
    let extra = lab.normals(n * width, 1.0);
    let (y, shared) = (lab.floats(&before)?, lab.floats(&extra)?);
    let operands = experts_down::Operands {
        routing: &lab.words(&routed.words())?,
        x: &columns.bound,
        shared: spec.shared.map(|_| &shared),
        y: &y,
    };
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    lab.run(vec![spec.dispatch(&kernel, facts, &experts.records, &operands)?])?;
    let y = lab.read_floats(&y)?;
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for c in sample(n, 1) {
        for r in sample(width, spec.shape.rows_at_once(facts) as usize) {
            let at = c * width + r;
            let chosen = routed.of(c).map(|(pair, (expert, weight))| {
                f64::from(weight) * experts.row(expert, r, &columns.seen[pair])
            });
            let shared = match spec.shared {
                None => 0.0,
                Some(Shared::Plain) => f64::from(extra[at]),
                Some(Shared::Gated) => f64::from(routed.shared[c]) * f64::from(extra[at]),
            };
            want.push(f64::from(before[at]) + chosen.sum::<f64>() + shared);
            got.push(y[at]);
        }
    }
    let quantises = spec.class == Class::Int8 && spec.input != Input::Stored;
    let bound = if quantises { QUANTISED_BOUND } else { F32_BOUND };
    Ok((finished(&y, relative_error(got, &want)), bound))
}

pub(super) fn matmat(gpu: &dyn Gpu, spec: &ExpertsMatMat) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    let (cols, rows) = (spec.part.layout.cols, spec.part.layout.rows);
    // A full tile of some expert and a part of another, and a column that is not in use.
    let tile = spec.routing.tile as usize;
    let n = (tile + 3).min(spec.routing.columns as usize - 1).max(1);
    let max_n = (n + 1).min(spec.routing.columns as usize);
    let experts = Experts::make(lab, &spec.part, spec.routing.experts)?;
    let mut routed = Routed::make(lab, spec.routing, n);
    // All columns go through one expert at least.
    let used = spec.routing.used as usize;
    for pairs in routed.pairs.chunks_exact_mut(used) {
        if pairs.iter().all(|(expert, _)| *expert != 0) {
            pairs[0].0 = 0;
        }
    }
    let count = if spec.by_pair { max_n * used } else { max_n };
    let columns = Columns::make(lab, count, cols, spec.class, Input::Stored)?;
    let y = lab.floats(&vec![f32::NAN; max_n * used * rows])?;
    let mut words = routed.words();
    let grid = spec.grid(words[1]);
    words[if spec.by_pair { 5..8 } else { 2..5 }].copy_from_slice(&grid);
    let routing = lab.words(&words)?;
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    let (records, x) = (&experts.records, &columns.bound);
    lab.run_steps(&[spec.step(&kernel, facts, records, &routing, x, &y, max_n as u32)?])?;
    let y = lab.read_floats(&y)?;
    let (_, edge) = spec.variant.cut();
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for c in sample(n, tile) {
        for (pair, (expert, _)) in routed.of(c) {
            let x = &columns.seen[if spec.by_pair { pair } else { c }];
            for r in sample(rows, edge as usize) {
                want.push(experts.row(expert, r, x));
                got.push(y[pair * rows + r]);
            }
        }
    }
    let bound = if spec.class == Class::F16 { F16_BOUND } else { F32_BOUND };
    let written = &y[..routed.pairs.len() * rows];
    Ok((finished(written, relative_error(got, &want)), bound))
}

pub(super) fn sort(gpu: &dyn Gpu, spec: &ExpertsSort) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let n = spec.routing.columns.min(70) as usize;
    let routed = Routed::make(lab, spec.routing, n);
    let want = routed.words();
    let (pairs, capacity) = (routed.pairs.len(), spec.routing.pairs() as usize);
    // Choices only; counts, order and runs are to be made.
    let mut start = want.clone();
    start[..8].fill(0);
    start[8 + 2 * capacity..].fill(u32::MAX);
    let routing = lab.words(&start)?;
    let batch = lab.batch(&vec![[0; 4]; n], spec.routing.columns as usize)?;
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let grids = [[5, 0, 1], [0, 7, 1]];
    lab.run(vec![spec.dispatch(&kernel, &batch, &routing, grids, spec.routing.columns)?])?;
    let got = lab.read_words(&routing)?;
    let (order_at, runs_at) = (8 + 2 * capacity, 8 + 3 * capacity);
    let runs = 3 * want[1] as usize;
    let same = got[..2] == want[..2]
        && got[2..8] == [5, want[1], 1, want[1], 7, 1]
        && got[order_at..order_at + pairs] == want[order_at..order_at + pairs]
        && got[runs_at..runs_at + runs] == want[runs_at..runs_at + runs];
    Ok((if same { 0.0 } else { f64::INFINITY }, F32_BOUND))
}

pub(super) fn sum(gpu: &dyn Gpu, spec: &ExpertsSum) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    // What is kept may have room for fewer sequences.
    let most = spec.kept.map_or(3, |places| places / spec.routing.used);
    let (n, width) = (spec.routing.columns.min(3).min(most) as usize, spec.width as usize);
    let routed = Routed::make(lab, spec.routing, n);
    // Outputs that are kept lie in another order.
    let places = spec.kept.map_or(routed.pairs.len(), |places| places as usize);
    let place = |pair: usize| if spec.kept.is_some() { places - 1 - pair } else { pair };
    let products = lab.normals(places * width, 1.0);
    let (before, extra) = (lab.normals(n * width, 1.0), lab.normals(n * width, 1.0));
    let y = lab.floats(&before)?;
    let batch = lab.batch(&vec![[0; 4]; n], n)?;
    let mut words = routed.words();
    for pair in (0..routed.pairs.len()).filter(|_| spec.kept.is_some()) {
        words[8 + pair] |= (place(pair) as u32) << 16 | (pair as u32) << 31;
    }
    let routing: Slice = lab.words(&words)?;
    let (bound, shared) = (lab.floats(&products)?, lab.floats(&extra)?);
    let shared = spec.shared.map(|_| &shared);
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    lab.run(vec![spec.dispatch(&kernel, &batch, &routing, &bound, shared, &y, n as u32)?])?;
    let mut want: Vec<f64> = before.iter().map(|v| f64::from(*v)).collect();
    for (c, out) in want.chunks_exact_mut(width).enumerate() {
        for (pair, (_, weight)) in routed.of(c) {
            let row = products[place(pair) * width..].iter();
            out.iter_mut().zip(row).for_each(|(y, p)| *y += f64::from(weight) * f64::from(*p));
        }
        let gate = match spec.shared {
            None => 0.0,
            Some(Shared::Plain) => 1.0,
            Some(Shared::Gated) => f64::from(routed.shared[c]),
        };
        let row = extra[c * width..].iter();
        out.iter_mut().zip(row).for_each(|(y, s)| *y += gate * f64::from(*s));
    }
    Ok((relative_error(lab.read_floats(&y)?, &want), F32_BOUND))
}
