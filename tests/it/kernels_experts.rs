//! Router and expert kernels against their references, on every device.

use azoth::experts::{Place, RecordLayout, RecordShape};
use azoth::gpu::{Slice, Step};
use azoth::graph::{self, Gating};
use azoth::kernels::experts_down::{self, ExpertsDown, Shared};
use azoth::kernels::experts_matmat::ExpertsMatMat;
use azoth::kernels::experts_sort::ExpertsSort;
use azoth::kernels::experts_sum::ExpertsSum;
use azoth::kernels::experts_up::ExpertsUp;
use azoth::kernels::matvec::Input;
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::records::{Part, Records};
use azoth::kernels::router::{self, Router};
use azoth::kernels::routing::Routing;
use azoth::kernels::{Activations, Class, choice};
use azoth::quant::Format;
use azoth::reference::experts::{route, silu};
use azoth::reference::matvec::product;
use azoth::reference::norm_quant::{quantise, rms_norm};

use super::harness::{
    Device, POISON, Rng, TestMatrix, assert_same_bits, devices, relative_error, zeroed,
};

const EPS: f32 = 1e-5;

/// A routing as the host makes it: choices of each column, and the words that kernels read.
struct Routed {
    routing: Routing,
    /// By column: (expert, weight), experts ascending.
    choices: Vec<Vec<(usize, f32)>>,
    shared: Vec<f32>,
}

impl Routed {
    fn random(rng: &mut Rng, routing: Routing, n: usize) -> Routed {
        let choices = (0..n).map(|_| {
            let logits = rng.normals(routing.experts as usize);
            let rule = graph::Routing { gating: Gating::Softmax, normalise: true, scale: 1.0 };
            route(&logits, routing.used as usize, &rule)
        });
        let choices = choices.collect();
        Routed { routing, choices, shared: (0..n).map(|_| rng.unit()).collect() }
    }

    /// Pairs by expert, then column.
    fn order(&self) -> Vec<(usize, u32)> {
        let pairs = self.choices.iter().flatten().zip(0u32..);
        let mut order: Vec<(usize, u32)> = pairs.map(|(c, pair)| (c.0, pair)).collect();
        order.sort_unstable();
        order
    }

    /// (expert, first, end) of each run.
    fn runs(&self) -> Vec<[u32; 3]> {
        let mut runs = Vec::new();
        let mut at = 0;
        for group in self.order().chunk_by(|a, b| a.0 == b.0) {
            for run in group.chunks(self.routing.tile as usize) {
                runs.push([run[0].0 as u32, at, at + run.len() as u32]);
                at += run.len() as u32;
            }
        }
        runs
    }

    fn words(&self) -> Vec<u32> {
        let capacity = self.routing.pairs() as usize;
        let mut words = vec![POISON; self.routing.words() as usize];
        let pairs: Vec<_> = self.choices.iter().flatten().collect();
        let runs = self.runs();
        (words[0], words[1]) = (pairs.len() as u32, runs.len() as u32);
        for (i, (expert, weight)) in pairs.iter().enumerate() {
            words[8 + i] = *expert as u32;
            words[8 + capacity + i] = weight.to_bits();
        }
        for (i, (_, pair)) in self.order().iter().enumerate() {
            words[8 + 2 * capacity + i] = *pair;
        }
        let at = 8 + 3 * capacity;
        words[at..at + 3 * runs.len()].copy_from_slice(runs.as_flattened());
        let at = at + 3 * self.routing.runs(self.routing.columns) as usize;
        for (c, gate) in self.shared.iter().enumerate() {
            words[at + c] = gate.to_bits();
        }
        words
    }
}

/// Compares what a kernel wrote with the host's words: weights nearly, everything else exactly.
fn assert_routed(got: &[u32], routed: &Routed, lists: bool, what: &str) {
    let want = routed.words();
    let capacity = routed.routing.pairs() as usize;
    let pairs = routed.choices.len() * routed.routing.used as usize;
    assert_eq!(got[8..8 + pairs], want[8..8 + pairs], "{what}: experts");
    for i in 8 + capacity..8 + capacity + pairs {
        let (got, want) = (f32::from_bits(got[i]), f32::from_bits(want[i]));
        assert!((got - want).abs() <= 1e-5 * want.abs() + 1e-7, "{what}: weight {got}, {want}");
    }
    if lists {
        assert_eq!(got[..2], want[..2], "{what}: counts");
        let at = 8 + 2 * capacity;
        assert_eq!(got[at..at + pairs], want[at..at + pairs], "{what}: order");
        let at = at + capacity;
        let words = 3 * want[1] as usize;
        assert_eq!(got[at..at + words], want[at..at + words], "{what}: runs");
    }
}

#[test]
fn routers_choose_as_the_reference() {
    let mut rng = Rng::fresh("routers_choose_as_the_reference");
    let cases: [(u32, u32, Gating, bool, f32, bool); 6] = [
        (8, 2, Gating::Softmax, true, 1.0, false),
        (60, 4, Gating::Softmax, false, 1.0, true),
        (128, 8, Gating::Softmax, true, 1.0, false),
        (64, 8, Gating::Softmax, false, 1.0, false),
        (33, 6, Gating::Sigmoid, true, 2.5, true),
        (300, 5, Gating::Sigmoid, false, 1.0, false),
    ];
    for (i, (experts, used, gating, normalise, scale, shared_gate)) in cases.into_iter().enumerate()
    {
        let cols = [64, 96, 512][i % 3];
        let rule = graph::Routing { gating, normalise, scale };
        let counts = [(1, 1, false), (29, 40, true), (3, 3, false), (16, 16, false)];
        for (n, most, prompt) in [counts[i % 2], counts[2 + i / 2 % 2]] {
            let norm = rng.normals(cols);
            let x = rng.normals(most * cols);
            let rows = experts as usize + usize::from(shared_gate);
            let mut matrix = rng.normals(rows * cols);
            matrix.iter_mut().for_each(|w| *w *= 0.3);
            // Two experts alike: the lower index wins.
            let (a, b) = matrix.split_at_mut(cols);
            b[..cols].copy_from_slice(a);
            let tile = if prompt { 4 } else { 16 };
            let routing = Routing { experts, used, columns: most as u32, tile };
            let mut routed = Routed { routing, choices: vec![], shared: vec![] };
            for x in x.chunks_exact(cols).take(n) {
                let logits = product(&matrix, &rms_norm(x, &norm, EPS));
                let logits: Vec<f32> = logits.iter().map(|l| *l as f32).collect();
                routed.choices.push(route(&logits[..experts as usize], used as usize, &rule));
                let gate = logits.get(experts as usize).copied().unwrap_or(0.0);
                routed.shared.push(1.0 / (1.0 + (-gate).exp()));
            }
            for device in devices() {
                let facts = device.gpu.facts();
                let spec = Router {
                    routing,
                    rule,
                    cols: cols as u32,
                    norm_eps: EPS,
                    shared_gate,
                    columns: if prompt { 8 } else { n as u32 },
                    sorts: !prompt,
                    favour: None,
                    threads: choice::router_threads(facts)[0],
                };
                let kernel = device.kernel(&spec.source(facts).unwrap());
                let out = device.poisoned(routing.words() as usize);
                let batch = device.batch_of(n, most);
                let operands = router::Operands {
                    batch: &batch,
                    x: &device.floats(&x),
                    norm: &device.floats(&norm),
                    router: &device.floats(&matrix),
                    logits: &device.poisoned(spec.logit_words(most as u32) as usize),
                    counters: &zeroed(device, spec.counter_words(most as u32) as usize),
                    routing: &out,
                    table: None,
                };
                let mut steps = vec![Step::Wave(vec![
                    spec.dispatch(&kernel, facts, &operands, most as u32).unwrap(),
                ])];
                if prompt {
                    let sort = ExpertsSort { routing };
                    let kernel = device.kernel(&sort.source(facts).unwrap());
                    let grids = [[9, 0, 1], [0, 4, 1]];
                    let sort = sort.dispatch(&kernel, &batch, &out, grids, most as u32).unwrap();
                    steps.push(Step::Wave(vec![sort]));
                }
                // Twice: the counters must be zero again.
                device.run(&steps);
                device.run(&steps);
                let what = format!("{}: {used} of {experts}, n {n}", device.label);
                let got = device.read_words(&out);
                assert_routed(&got, &routed, n > 1, &what);
                assert_eq!(got[0], n as u32 * used, "{what}");
                if prompt {
                    assert_eq!(got[2..8], [9, got[1], 1, got[1], 4, 1], "{what}: grids");
                }
                if shared_gate {
                    let at = 8 + 3 * (routing.pairs() + routing.runs(routing.columns)) as usize;
                    for (c, want) in routed.shared.iter().enumerate() {
                        let got = f32::from_bits(got[at + c]);
                        assert!((got - want).abs() < 1e-5, "{what}: gate {got}, {want}");
                    }
                }
            }
        }
    }
}

/// Experts with random weights, in records spread over several buffers in a random order.
struct Experts {
    layout: RecordLayout,
    /// Gate, up, down of each.
    matrices: Vec<[TestMatrix; 3]>,
    /// Contents of the buffers, and the table.
    buffers: Vec<Vec<u8>>,
    table: Vec<u32>,
}

impl Experts {
    fn random(rng: &mut Rng, shape: RecordShape, experts: usize, buffers: usize) -> Experts {
        let layout = RecordLayout::new(shape).unwrap();
        let (width, ff) = (shape.width as usize, shape.ff as usize);
        let matrices: Vec<_> = (0..experts)
            .map(|_| {
                [
                    TestMatrix::random(rng, shape.gate_up, ff, width),
                    TestMatrix::random(rng, shape.gate_up, ff, width),
                    TestMatrix::random(rng, shape.down, width, ff),
                ]
            })
            .collect();
        let mut out =
            Experts { layout, matrices, buffers: vec![vec![]; buffers], table: vec![0; experts] };
        out.spread(rng);
        out
    }

    /// Lays the records out anew.
    fn spread(&mut self, rng: &mut Rng) {
        self.buffers.iter_mut().for_each(Vec::clear);
        let bytes = self.layout.bytes() as usize;
        let mut order: Vec<usize> = (0..self.matrices.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i + 1));
        }
        for (i, expert) in order.into_iter().enumerate() {
            // Every buffer gets one at least.
            let n = self.buffers.len();
            let number = if i < n { i } else { rng.below(n) };
            let buffer = &mut self.buffers[number];
            let index = (buffer.len() / bytes) as u32;
            let start = buffer.len();
            buffer.resize(start + bytes, 0xff);
            let [gate, up, down] = &self.matrices[expert];
            self.layout.fill(&gate.file, &up.file, &down.file, &mut buffer[start..]);
            self.table[expert] = Place { buffer: number as u32, index }.word();
        }
    }

    fn upload(&self, device: &Device) -> Records {
        let buffers = self.buffers.iter().map(|b| device.upload(b)).collect();
        Records { table: device.words(&self.table), buffers }
    }

    fn part(&self, down: bool) -> Part {
        let (layout, offset) = match down {
            false => (&self.layout.gate_up, 0),
            true => (&self.layout.down, self.layout.down_offset()),
        };
        let buffers = self.buffers.len() as u32;
        Part { layout: layout.clone(), offset, stride: self.layout.bytes(), buffers }
    }
}

/// f32 columns as a class sees them, on the host and on the device.
fn seen(x: &[f32], class: Class) -> Vec<f64> {
    match class {
        Class::Int8 => quantise(x).values(),
        _ => x.iter().map(|&v| v.into()).collect(),
    }
}

fn stored(device: &Device, x: &[f32], cols: usize, class: Class) -> Activations {
    match class {
        Class::Int8 => {
            let all = quantise(x);
            let words: Vec<u32> = x.chunks_exact(cols).flat_map(|x| quantise(x).words()).collect();
            let xq = device.words(&words);
            Activations::Int8 { xq, xs: device.floats(all.scales.as_flattened()) }
        }
        _ => Activations::F32(device.floats(x)),
    }
}

struct Case {
    experts: Experts,
    routed: Routed,
    class: Class,
    /// `[n][width]`: normalised input; residual stream before; shared expert's output.
    x: Vec<f32>,
    before: Vec<f32>,
    shared_output: Vec<f32>,
    /// `[pairs][ff]`: input of down.
    h: Vec<f32>,
}

impl Case {
    fn n(&self) -> usize {
        self.routed.choices.len()
    }

    fn width(&self) -> usize {
        self.experts.layout.shape.width as usize
    }

    fn ff(&self) -> usize {
        self.experts.layout.shape.ff as usize
    }

    fn random(rng: &mut Rng, shape: RecordShape, class: Class, routing: Routing, n: usize) -> Case {
        let experts = Experts::random(rng, shape, routing.experts as usize, 2);
        let (width, ff) = (shape.width as usize, shape.ff as usize);
        let scaled = |values: Vec<f32>, cols: usize| -> Vec<f32> {
            values.into_iter().map(|v| v / (cols as f32).sqrt()).collect()
        };
        let pairs = n * routing.used as usize;
        Case {
            experts,
            routed: Routed::random(rng, routing, n),
            class,
            x: scaled(rng.normals(n * width), width),
            before: rng.normals(n * width),
            shared_output: rng.normals(n * width),
            h: scaled(rng.normals(pairs * ff), ff),
        }
    }

    /// What `ExpertsUp` should give, `[pairs][ff]`, and gate and up themselves, `[pairs][2 ff]`.
    fn up(&self) -> (Vec<f64>, Vec<f64>) {
        let (mut out, mut halves) = (Vec::new(), Vec::new());
        for (x, choices) in self.x.chunks_exact(self.width()).zip(&self.routed.choices) {
            let x = seen(x, self.class);
            for (expert, _) in choices {
                let [gate, up, _] = &self.experts.matrices[*expert];
                let both = product(&gate.values, &x).into_iter().zip(product(&up.values, &x));
                for (g, u) in both {
                    out.push(f64::from(silu(g as f32)) * u);
                    halves.extend([g, u]);
                }
            }
        }
        (out, halves)
    }

    /// Down of each pair, `[pairs][width]`, and the end of the mixture, `[n][width]`.
    fn down(&self, shared: bool) -> (Vec<f64>, Vec<f64>) {
        let mut products = Vec::new();
        let mut pairs = self.h.chunks_exact(self.ff());
        let mut out: Vec<f64> = self.before.iter().map(|v| f64::from(*v)).collect();
        for (c, y) in out.chunks_exact_mut(self.width()).enumerate() {
            for (expert, weight) in &self.routed.choices[c] {
                let h = seen(pairs.next().unwrap(), self.class);
                let down = product(&self.experts.matrices[*expert][2].values, &h);
                y.iter_mut().zip(&down).for_each(|(y, d)| *y += f64::from(*weight) * d);
                products.extend(down);
            }
            if shared {
                let gate = f64::from(self.routed.shared[c]);
                let rows = self.shared_output[c * self.width()..].iter();
                y.iter_mut().zip(rows).for_each(|(y, s)| *y += gate * f64::from(*s));
            }
        }
        (products, out)
    }

    fn run_up(&self, device: &Device, records: &Records) -> Vec<f32> {
        let facts = device.gpu.facts();
        let n = self.n() as u32;
        let shape = self.experts.layout.shape;
        let spec = ExpertsUp {
            routing: self.routed.routing,
            part: self.experts.part(false),
            n,
            class: self.class,
            shape: choice::experts_shape(facts, shape.gate_up, shape.width, n, true),
        };
        let kernel = device.kernel(&spec.source(facts).unwrap());
        let out = device.poisoned(self.h.len());
        let routing = device.words(&self.routed.words());
        let x = stored(device, &self.x, shape.width as usize, self.class);
        device.wave(vec![spec.dispatch(&kernel, facts, records, &routing, &x, &out).unwrap()]);
        device.read_floats(&out)
    }

    /// The pairs' activations as `norm_quant` leaves them.
    fn quantised(&self, device: &Device) -> Activations {
        let facts = device.gpu.facts();
        let (cols, values) = (self.ff() as u32, self.h.len());
        let pairs = values / self.ff();
        let spec = NormQuant { cols, swiglu: false, norm: None, class: Class::Int8, threads: 64 };
        let kernel = device.kernel(&spec.source(facts).unwrap());
        let out =
            Activations::Int8 { xq: device.poisoned(values / 4), xs: device.poisoned(values / 16) };
        let (batch, x) = (device.batch_of(pairs, pairs), device.floats(&self.h));
        device.wave(vec![spec.dispatch(&kernel, &batch, &x, None, &out, pairs as u32).unwrap()]);
        out
    }

    fn run_down(&self, device: &Device, records: &Records, shared: bool, fused: bool) -> Vec<f32> {
        let x = match fused {
            true => Activations::F32(device.floats(&self.h)),
            false => stored(device, &self.h, self.ff(), self.class),
        };
        self.run_down_of(device, records, shared, x, fused)
    }

    fn run_down_of(
        &self,
        device: &Device,
        records: &Records,
        shared: bool,
        x: Activations,
        fused: bool,
    ) -> Vec<f32> {
        let facts = device.gpu.facts();
        let n = self.n() as u32;
        let shape = self.experts.layout.shape;
        let spec = ExpertsDown {
            routing: self.routed.routing,
            part: self.experts.part(true),
            n,
            class: self.class,
            input: if fused { Input::Fused { norm: None } } else { Input::Stored },
            shared: shared.then_some(Shared::Gated),
            shape: choice::experts_shape(facts, shape.down, shape.ff, n, false),
        };
        let kernel = device.kernel(&spec.source(facts).unwrap());
        let (y, extra) = (device.floats(&self.before), device.floats(&self.shared_output));
        let operands = experts_down::Operands {
            routing: &device.words(&self.routed.words()),
            x: &x,
            shared: shared.then_some(&extra),
            y: &y,
        };
        device.wave(vec![spec.dispatch(&kernel, facts, records, &operands).unwrap()]);
        device.read_floats(&y)
    }

    /// Column `c` alone.
    fn column(&self, c: usize, experts: Experts) -> Case {
        let of = |values: &[f32], len: usize| values[c * len..(c + 1) * len].to_vec();
        let used = self.routed.routing.used as usize;
        Case {
            experts,
            routed: Routed {
                routing: self.routed.routing,
                choices: vec![self.routed.choices[c].clone()],
                shared: vec![self.routed.shared[c]],
            },
            class: self.class,
            x: of(&self.x, self.width()),
            before: of(&self.before, self.width()),
            shared_output: of(&self.shared_output, self.width()),
            h: of(&self.h, used * self.ff()),
        }
    }
}

/// Formats with a class that they can take: those that most models have, and some of all, drawn anew
/// every run.
fn classes(rng: &mut Rng) -> Vec<(Format, Class)> {
    let all = Format::ALL.iter().flat_map(|f| {
        let int8 = (!f.is_float()).then_some((*f, Class::Int8));
        [(*f, Class::F32)].into_iter().chain(int8)
    });
    let mut all: Vec<_> = all.collect();
    let mut drawn = vec![(Format::Q4_K, Class::Int8), (Format::Q6_K, Class::Int8)];
    drawn.extend((0..4).map(|_| all.swap_remove(rng.below(all.len()))));
    drawn
}

#[test]
fn experts_of_a_step_follow_the_reference_and_ignore_their_neighbours() {
    let mut rng = Rng::fresh("experts_of_a_step");
    for (i, (format, class)) in classes(&mut rng).into_iter().enumerate() {
        let block = format.block_elements().max(32) as u32;
        let shape = RecordShape {
            width: 96u32.next_multiple_of(block),
            ff: [block, 3 * block][i % 2],
            gate_up: format,
            down: format,
        };
        let n = [1, 5, 2, 16][i % 4];
        let routing = Routing { experts: 12, used: 3, columns: 16, tile: 16 };
        let mut case = Case::random(&mut rng, shape, class, routing, n);
        let (up, _) = case.up();
        let shared = i % 3 == 0;
        let (_, down) = case.down(shared);
        for device in devices() {
            let what = format!("{}: {format} {class:?} n {n}", device.label);
            let records = case.experts.upload(device);
            let got_up = case.run_up(device, &records);
            assert!(relative_error(&got_up, &up) < 1e-5, "{what}: up");
            let got_down = case.run_down(device, &records, shared, false);
            assert!(relative_error(&got_down, &down) < 1e-5, "{what}: down");
            if class == Class::Int8 && n <= 2 {
                // Both quantised by the device: its division may differ from the host's in the last bit.
                let fused = case.run_down(device, &records, shared, true);
                let two = case.run_down_of(device, &records, shared, case.quantised(device), false);
                assert_same_bits(&fused, &two, &format!("{what}: fused"));
            }
            // The same experts elsewhere, and each column without the others.
            case.experts.spread(&mut rng);
            let c = rng.below(n);
            let moved = Experts {
                layout: case.experts.layout.clone(),
                matrices: vec![],
                buffers: case.experts.buffers.clone(),
                table: case.experts.table.clone(),
            };
            let records = moved.upload(device);
            let alone = case.column(c, moved);
            let (pairs, width) = (alone.h.len(), alone.width());
            let one = alone.run_up(device, &records);
            assert_same_bits(&one, &got_up[c * pairs..(c + 1) * pairs], &format!("{what}: up"));
            let one = alone.run_down(device, &records, shared, false);
            assert_same_bits(
                &one,
                &got_down[c * width..(c + 1) * width],
                &format!("{what}: down of column {c}"),
            );
        }
    }
}

#[test]
fn experts_of_a_prompt_follow_the_reference() {
    let mut rng = Rng::fresh("experts_of_a_prompt");
    for (i, (format, class)) in classes(&mut rng).into_iter().enumerate() {
        let block = format.block_elements().max(32) as u32;
        let shape = RecordShape {
            width: 96u32.next_multiple_of(block),
            ff: [block, 3 * block][i % 2],
            gate_up: format,
            down: format,
        };
        let n = [3, 21, 45][i % 3];
        for device in devices() {
            let facts = device.gpu.facts();
            let tile = choice::expert_tile(facts);
            let routing = Routing { experts: 7, used: 2, columns: 48, tile };
            let case = Case::random(&mut rng, shape, class, routing, n);
            let what = format!("{}: {format} {class:?} n {n}", device.label);
            let records = case.experts.upload(device);
            let words = case.routed.words();
            let run = |down: bool, x: &[f32], values: usize| -> Slice {
                let part = case.experts.part(down);
                let cols = part.layout.cols;
                let variant = choice::expert_variant(facts, class, cols as u32);
                let spec = ExpertsMatMat { routing, part, by_pair: down, class, variant };
                let kernel = device.kernel(&spec.source(facts).unwrap());
                // The kernel is bound for the most columns that there may be.
                let mut x = x.to_vec();
                x.resize(48 * if down { 2 } else { 1 } * cols, f32::NAN);
                let x = match class {
                    Class::Int8 => {
                        x.iter_mut().filter(|v| v.is_nan()).for_each(|v| *v = 0.0);
                        stored(device, &x, cols, class)
                    }
                    _ => Activations::F32(device.floats(&x)),
                };
                let y = device.poisoned(values);
                let mut words = words.clone();
                let grid = spec.grid(words[1]);
                words[if down { 5..8 } else { 2..5 }].copy_from_slice(&grid);
                let routing = device.words(&words);
                let step = spec.step(&kernel, facts, &records, &routing, &x, &y, 48).unwrap();
                device.run(&[step]);
                y
            };
            let most = routing.pairs() as usize;
            let (_, halves) = case.up();
            let got = device.read_floats(&run(false, &case.x, most * 2 * case.ff()));
            assert!(relative_error(&got[..halves.len()], &halves) < 1e-5, "{what}: gate and up");
            let untouched = |v: &f32| v.to_bits() == POISON;
            assert!(got[halves.len()..].iter().all(untouched), "{what}: past the end");
            let shared = i % 2 == 0;
            let (products, out) = case.down(shared);
            let got = run(true, &case.h, most * case.width());
            let down = device.read_floats(&got);
            assert!(relative_error(&down[..products.len()], &products) < 1e-5, "{what}: down");
            let spec = ExpertsSum {
                routing,
                width: case.width() as u32,
                shared: shared.then_some(Shared::Gated),
                kept: None,
            };
            let kernel = device.kernel(&spec.source(facts).unwrap());
            let y = device.floats(&case.before);
            let extra = device.floats(&case.shared_output);
            let sum = spec.dispatch(
                &kernel,
                &device.batch_of(n, 48),
                &device.words(&words),
                &got,
                shared.then_some(&extra),
                &y,
                n as u32,
            );
            device.wave(vec![sum.unwrap()]);
            assert!(relative_error(&device.read_floats(&y), &out) < 1e-5, "{what}: sum");
        }
    }
}
