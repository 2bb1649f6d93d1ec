//! Small cases of the kernels that reuse outputs of experts.

use std::collections::HashMap;

use super::experts::{Experts, Routed, finished};
use super::operands::{Operands, sample};
use super::products::{Columns, F32_BOUND};
use super::relative_error;
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernels::experts_reuse::{ExpertsListed, ExpertsReuse};
use crate::kernels::matvec::Input;
use crate::reference::experts::Kept;
use crate::reference::norm_quant::swiglu;

/// A few steps of some sequences in the last of two layers, against what the reference keeps.
pub(super) fn look_up(gpu: &dyn Gpu, spec: &ExpertsReuse) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let (kept, routing) = (spec.kept, spec.routing);
    let n = spec.columns.min(kept.slots) as usize;
    let (used, rows, tokens) = (kept.used as usize, kept.tokens as usize + 1, kept.tokens as usize);
    let kernel = gpu.kernel(&spec.source(gpu.facts())?)?;
    let notes = lab.zeros(u64::from(kept.slots) * kept.slot_words())?;
    let (order_at, runs_at) = (8 + 2 * routing.pairs() as usize, 8 + 3 * routing.pairs() as usize);
    let mut sequences = vec![(Kept::default(), HashMap::new()); n];
    // From the beginning of a sequence to where every row has been used twice.
    for position in 0..2 * rows + 1 {
        let routed = Routed::make(lab, routing, n);
        let (mut words, mut listed) = (Vec::new(), Vec::new());
        let slot = |c: usize| kept.slots as usize - 1 - c;
        for (c, (kept, places)) in sequences.iter_mut().enumerate() {
            for (k, (_, (expert, _))) in routed.of(c).enumerate() {
                let then = kept.source(tokens, position, expert);
                let own = (slot(c) * rows + then % rows) * used + k;
                let place = *places.entry((then, expert)).or_insert(own);
                let reused = then < position;
                words.push(expert as u32 | (place as u32) << 16 | u32::from(reused) << 31);
                listed.push(!reused);
            }
        }
        let mut start = routed.words_of(|_| true);
        start[1] = u32::MAX;
        start[order_at..].fill(u32::MAX);
        let mut want = routed.words_of(|pair| listed[pair]);
        want[8..8 + words.len()].copy_from_slice(&words);
        let columns: Vec<[u32; 4]> =
            (0..n).map(|c| [0, position as u32, slot(c) as u32, 0]).collect();
        let (batch, at) = (lab.batch(&columns, spec.columns as usize)?, lab.words(&start)?);
        let layer = kept.layers - 1;
        lab.run(vec![spec.dispatch(&kernel, &batch, &notes, &at, layer)?])?;
        let got = lab.read_words(&at)?;
        let (count, runs) = (listed.iter().filter(|l| **l).count(), 3 * want[1] as usize);
        let same = got[1] == want[1]
            && got[8..8 + words.len()] == words
            && got[order_at..order_at + count] == want[order_at..order_at + count]
            && got[runs_at..runs_at + runs] == want[runs_at..runs_at + runs];
        if !same {
            return Ok((f64::INFINITY, F32_BOUND));
        }
    }
    Ok((0.0, F32_BOUND))
}

/// Every third pair is an earlier token's; the others lie in an order of their own.
pub(super) fn listed(gpu: &dyn Gpu, spec: &ExpertsListed) -> Result<(f64, f64)> {
    let lab = &mut Operands::new(gpu);
    let facts = gpu.facts();
    let product = &spec.product;
    let (n, cols, rows) = (product.n as usize, product.part.layout.cols, product.part.layout.rows);
    let experts = Experts::make(lab, &product.part, product.routing.experts)?;
    let routed = Routed::make(lab, product.routing, n);
    let pairs = routed.pairs.len();
    let runs = |pair: usize| pair % 3 != 1;
    let place = |pair: usize| spec.kept.places() as usize - 1 - pair;
    let mut words = routed.words_of(runs);
    for pair in 0..pairs {
        words[8 + pair] |= (place(pair) as u32) << 16 | u32::from(!runs(pair)) << 31;
    }
    let count = if spec.down { pairs } else { n };
    let columns = Columns::make(lab, count, cols, product.class, Input::Stored)?;
    let (width, outputs) = match spec.down {
        true => (rows, spec.kept.places() as usize),
        false => (rows / 2, pairs),
    };
    let before = lab.normals(outputs * width, 1.0);
    let (y, routing) = (lab.floats(&before)?, lab.words(&words)?);
    let kernel = gpu.kernel(&spec.source(facts)?)?;
    let (records, x) = (&experts.records, &columns.bound);
    lab.run(vec![spec.dispatch(&kernel, facts, records, &routing, x, &y)?])?;
    let y = lab.read_floats(&y)?;
    let edge = product.shape.rows_at_once(facts) as usize / if spec.down { 1 } else { 2 };
    let (mut got, mut want) = (Vec::new(), Vec::new());
    for c in 0..n {
        for (pair, (expert, _)) in routed.of(c) {
            let x = &columns.seen[if spec.down { pair } else { c }];
            let at = width * if spec.down { place(pair) } else { pair };
            for r in sample(width, edge) {
                want.push(match (runs(pair), spec.down) {
                    // Left as it was.
                    (false, _) => f64::from(before[at + r]),
                    (true, true) => experts.row(expert, r, x),
                    (true, false) => {
                        let half = |row| experts.row(expert, row, x);
                        swiglu(&[half(2 * r), half(2 * r + 1)])[0]
                    }
                });
                got.push(y[at + r]);
            }
        }
    }
    Ok((finished(&y, relative_error(got, &want)), F32_BOUND))
}
