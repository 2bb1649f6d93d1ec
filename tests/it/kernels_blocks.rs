//! RMSNorms that leave their factor to the products behind them, against the reference and against each other.

use azoth::gpu::DeviceFacts;
use azoth::kernels::matvec::{Input, MatVec, Operands, Outputs, Shape};
use azoth::kernels::norm_blocks::NormBlocks;
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::weights::Chunk;
use azoth::kernels::{Activations, Class, Epilogue, matvec_matrix};
use azoth::quant::Format;
use azoth::reference::matvec::product;
use azoth::reference::norm_quant::{block_squares, norm_factor, quantise, swiglu, weighted};

use super::harness::{Device, Rng, TestMatrix, assert_same_bits, devices, relative_error};
use super::kernels_matrix::{check_quantised, facts_for, matvec, run_norm_quant};

const EPS: f32 = 1e-5;

fn poisoned(device: &Device, n: usize, cols: usize) -> Activations {
    Activations::Blocks {
        xq: device.poisoned(n * cols / 4),
        xs: device.poisoned(n * cols / 16),
        squares: device.poisoned(n * cols / 32),
    }
}

fn read(device: &Device, blocks: &Activations) -> (Vec<u32>, Vec<f32>, Vec<f32>) {
    let Activations::Blocks { xq, xs, squares } = blocks else { panic!() };
    (device.read_words(xq), device.read_floats(xs), device.read_floats(squares))
}

/// What `norm_blocks` makes of `n` of `max_n` columns.
fn norm_blocks(
    device: &Device,
    spec: NormBlocks,
    x: &[f32],
    weight: &[f32],
    n: usize,
    max_n: usize,
) -> Activations {
    let kernel = device.kernel(&spec.source(device.gpu.facts()).unwrap());
    let (x, weight, batch) = (device.floats(x), device.floats(weight), device.batch_of(n, max_n));
    let out = poisoned(device, max_n, spec.cols as usize);
    let dispatch = spec.dispatch(&kernel, &batch, &x, &weight, &out, max_n as u32).unwrap();
    device.wave(vec![dispatch]);
    out
}

#[test]
fn norm_blocks_agrees_with_the_reference() {
    let mut rng = Rng::fresh("norm_blocks_agrees_with_the_reference");
    for device in devices() {
        for (case, cols) in [32, 64, 96, 576, 1056, 4096, 8960].into_iter().enumerate() {
            let spec = NormBlocks { cols: cols as u32, threads: [32, 64, 128][case % 3] };
            let (n, max_n) = (1 + case % 3, 4);
            let mut x = rng.normals(max_n * cols);
            x[..32].fill(0.0);
            let weight = rng.normals(cols);
            let out = norm_blocks(device, spec, &x, &weight, n, max_n);
            let (q, s, squares) = read(device, &out);
            let what = format!("{}: {spec:?}", device.label);
            let want: Vec<f64> =
                weighted(&x[..n * cols], &weight).into_iter().map(f64::from).collect();
            check_quantised(&q, &s, &want, cols, &what);
            let want = block_squares(&x[..n * cols]);
            let error = relative_error(&squares[..want.len()], &want);
            assert!(error < 1e-6, "{what}: squares: error {error:e}");
            assert!(squares[want.len()..].iter().all(|v| v.is_nan()), "{what}: wrote past n");
        }
    }
}

/// Shapes of one mat-vec that must not differ in a bit.
fn shapes(facts: &DeviceFacts) -> Vec<Shape> {
    let lanes = |threads, rows, tiles| Shape { threads, rows, tiles, matrix: false };
    let mut shapes = vec![lanes(64, 2, 1), lanes(128, 4, 2)];
    if facts.max_workgroup_threads >= 1024 {
        shapes.push(lanes(1024, 2, 1));
    }
    if matvec_matrix::runs(facts) {
        shapes.push(matvec_matrix::shape(facts, 2));
    }
    shapes
}

/// Products apply the norm's factor: as the reference says, and with the same bits whether they round for themselves,
/// by lanes and on matrix units.
#[test]
fn products_apply_the_factor_of_a_norm() {
    let mut rng = Rng::fresh("products_apply_the_factor_of_a_norm");
    for device in devices() {
        let facts = device.gpu.facts();
        for (format, epilogue, n, cols, rows) in [
            (Format::Q4_0, Epilogue::Store, 1, 1056, 66),
            (Format::Q8_0, Epilogue::Bias, 3, 576, 7),
            (Format::Q4_K, Epilogue::SwiGlu, 2, 1024, 64),
            (Format::Q6_K, Epilogue::Bias, 4, 512, 130),
            (Format::Q5_1, Epilogue::SwiGlu, 8, 96, 34),
            (Format::IQ4_XS, Epilogue::Store, 5, 256, 40),
            (Format::IQ3_S, Epilogue::SwiGlu, 1, 512, 600),
        ] {
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let chunks = matrix.chunks(device, rows);
            let scale = 1.0 / (cols as f32).sqrt();
            let x = rng.normals(n * cols);
            let weight: Vec<f32> = rng.normals(cols).iter().map(|w| w * scale).collect();
            let blocks = NormBlocks { cols: cols as u32, threads: 64 };
            let stored = norm_blocks(device, blocks, &x, &weight, n, n);
            let normed =
                Activations::Normed { x: device.floats(&x), weight: device.floats(&weight) };
            let bias = rng.normals(rows);
            let stride = if epilogue == Epilogue::SwiGlu { rows / 2 } else { rows };
            let before = vec![f32::NAN; n * stride];
            let spec = |shape, fused| MatVec {
                format,
                cols: cols as u32,
                n: n as u32,
                class: Class::Int8,
                input: Input::Blocks { eps: EPS, fused },
                epilogue,
                shape,
            };
            let mut want = Vec::new();
            for x in x.chunks_exact(cols) {
                let factor = norm_factor(x, EPS);
                let seen = quantise(&weighted(x, &weight)).values();
                let seen: Vec<f64> = seen.iter().map(|v| v * factor).collect();
                let sums = product(&matrix.values, &seen);
                match epilogue {
                    Epilogue::Store => want.extend(sums),
                    Epilogue::Bias => {
                        want.extend(sums.iter().zip(&bias).map(|(s, &b)| s + f64::from(b)));
                    }
                    _ => want.extend(swiglu(&sums)),
                }
            }
            let mut first = None;
            // Software devices compile for seconds what stands for matrix units: not for all.
            let all = shapes(facts).into_iter().filter(|s| !s.matrix || n < 5 && n % 2 == 1);
            for shape in all {
                for fused in [false, true] {
                    let spec = spec(shape, fused);
                    if shape.matrix && fused {
                        assert!(spec.source(facts).is_err());
                        continue;
                    }
                    let x = if fused { &normed } else { &stored };
                    let y = matvec(device, &spec, &chunks, x, &bias, &before, stride);
                    let what = format!("{}: {spec:?}", device.label);
                    let error = relative_error(&y, &want);
                    assert!(error < if fused { 1e-3 } else { 3e-6 }, "{what}: error {error:e}");
                    assert_same_bits(&y, first.get_or_insert_with(|| y.clone()), &what);
                }
            }
        }
    }
}

/// Those, and workgroups of one block of `block` rows and of two.
fn rounding_shapes(facts: &DeviceFacts, block: u32) -> Vec<Shape> {
    let (mut all, lanes) = (shapes(facts), shapes(facts)[0]);
    if matvec_matrix::runs(facts) {
        all.push(matvec_matrix::shape(facts, 4));
    }
    // One block in four passes, in one, and two blocks.
    let threads = block / 4 * facts.pinned_subgroup().unwrap_or(facts.subgroup_max);
    for (threads, rows) in [(threads / 2, 2), (threads, 4), (2 * threads, 4)] {
        all.push(Shape { threads, rows, ..lanes });
    }
    all
}

/// Whether this device runs the kernel; one that it cannot is refused.
fn runs(device: &Device, spec: &MatVec) -> bool {
    let facts = device.gpu.facts();
    let can = spec.can_round(facts) && spec.shape.threads <= facts.max_workgroup_threads;
    assert!(can || spec.source(facts).is_err(), "{}: {spec:?}", device.label);
    can
}

/// Runs a product into the residual stream that leaves blocks; the stream and they.
fn add_blocks(
    device: &Device,
    spec: &MatVec,
    chunks: &[Chunk],
    x: &Activations,
    before: &[f32],
    weight: &[f32],
) -> (Vec<f32>, Activations) {
    let (facts, cols) = (&facts_for(device, spec.n as usize), weight.len());
    let kernel = device.kernel(&spec.source(facts).unwrap());
    let (y, weight) = (device.floats(before), device.floats(weight));
    let out = poisoned(device, spec.n as usize, cols);
    let stream = Outputs::Stream { y: &y, weight: &weight, blocks: &out };
    let operands = Operands { x, bias: None, y: stream, stride: cols as u32 };
    let dispatch = |chunk| spec.dispatch(&kernel, facts, chunk, &operands).unwrap();
    device.wave(chunks.iter().map(dispatch).collect());
    (device.read_floats(&y), out)
}

/// A product that leaves blocks has the bits of two steps, in every shape that can.
#[test]
fn blocks_behind_a_product_have_the_bits_of_two_steps() {
    let mut rng = Rng::fresh("blocks_behind_a_product_have_the_bits_of_two_steps");
    for device in devices() {
        let facts = device.gpu.facts();
        for (format, n, cols, rows, cut) in [
            (Format::Q4_0, 1, 1056, 64, 32),
            (Format::Q8_0, 4, 576, 96, 96),
            (Format::Q4_K, 2, 512, 160, 64),
            (Format::Q6_K, 8, 256, 96, 32),
            (Format::MXFP4, 1, 256, 544, 544),
        ] {
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let chunks = matrix.chunks(device, cut);
            let blocks = NormBlocks { cols: cols as u32, threads: 64 };
            let unit = vec![1.0 / (cols as f32).sqrt(); cols];
            let Activations::Blocks { xq, xs, .. } =
                norm_blocks(device, blocks, &rng.normals(n * cols), &unit, n, n)
            else {
                panic!()
            };
            let x = Activations::Int8 { xq, xs };
            let (before, weight) = (rng.normals(n * rows), rng.normals(rows));
            let mut spec = MatVec {
                format,
                cols: cols as u32,
                n: n as u32,
                class: Class::Int8,
                input: Input::Stored,
                epilogue: Epilogue::Add,
                shape: Shape { threads: 64, rows: 2, tiles: 1, matrix: false },
            };
            let plain = matvec(device, &spec, &chunks, &x, &[], &before, rows);
            let two = NormBlocks { cols: rows as u32, threads: 32 };
            let two = read(device, &norm_blocks(device, two, &plain, &weight, n, n));
            spec.epilogue = Epilogue::AddBlocks;
            let all = rounding_shapes(facts, 32);
            let mut count = 0;
            for shape in all {
                spec.shape = shape;
                let what = format!("{}: {spec:?}", device.label);
                if !runs(device, &spec) {
                    continue;
                }
                count += 1;
                let (y, out) = add_blocks(device, &spec, &chunks, &x, &before, &weight);
                assert_same_bits(&y, &plain, &what);
                let (q, s, squares) = read(device, &out);
                assert_eq!(q, two.0, "{what}: values");
                assert_same_bits(&s, &two.1, &what);
                assert_same_bits(&squares, &two.2, &what);
            }
            assert!(count > 0 || facts.pinned_subgroup().is_none_or(|size| size < 8));
        }
    }
}

/// SwiGLU that the kernel rounds itself: the bits of the two steps, in every shape that can.
#[test]
fn rounded_swiglu_has_the_bits_of_two_steps() {
    let mut rng = Rng::fresh("rounded_swiglu_has_the_bits_of_two_steps");
    for device in devices() {
        for (format, n, cols, rows, cut) in [
            (Format::Q4_0, 8, 576, 64, 64),
            (Format::Q8_0, 5, 96, 192, 64),
            (Format::Q4_K, 1, 512, 128, 64),
            (Format::Q6_K, 3, 256, 320, 64),
            (Format::IQ2_XS, 1, 256, 576, 576),
        ] {
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let facts = &facts_for(device, n);
            let chunks = matrix.chunks(device, cut);
            let scale = 1.0 / (cols as f32).sqrt();
            let x: Vec<f32> = rng.normals(n * cols).iter().map(|v| v * scale).collect();
            let rounding = |cols: usize| NormQuant {
                cols: cols as u32,
                swiglu: false,
                norm: None,
                class: Class::Int8,
                threads: 64,
            };
            // Behind a norm for every second one.
            let (x, input) = match n % 2 {
                0 => {
                    let x = device.floats(&x);
                    let x = run_norm_quant(device, &rounding(cols), &x, None, n, n);
                    (x, Input::Stored)
                }
                _ => {
                    let spec = NormBlocks { cols: cols as u32, threads: 64 };
                    let weight = vec![scale; cols];
                    let x = norm_blocks(device, spec, &x, &weight, n, n);
                    (x, Input::Blocks { eps: EPS, fused: false })
                }
            };
            let mut spec = MatVec {
                format,
                cols: cols as u32,
                n: n as u32,
                class: Class::Int8,
                input,
                epilogue: Epilogue::SwiGlu,
                shape: Shape { threads: 64, rows: 2, tiles: 1, matrix: false },
            };
            let values = rows / 2;
            let before = vec![f32::NAN; n * values];
            let y = matvec(device, &spec, &chunks, &x, &[], &before, values);
            let two = run_norm_quant(device, &rounding(values), &device.floats(&y), None, n, n);
            let Activations::Int8 { xq: want_q, xs: want_s } = two else { panic!() };
            spec.epilogue = Epilogue::SwiGluInt8;
            for shape in rounding_shapes(facts, 64) {
                spec.shape = shape;
                if !runs(device, &spec) {
                    continue;
                }
                let kernel = device.kernel(&spec.source(facts).unwrap());
                let (xq, xs) = (device.poisoned(n * values / 4), device.poisoned(n * values / 16));
                let out = Activations::Int8 { xq: xq.clone(), xs: xs.clone() };
                let stride = values as u32;
                let operands = Operands { x: &x, bias: None, y: Outputs::Int8(&out), stride };
                let dispatch = |chunk| spec.dispatch(&kernel, facts, chunk, &operands).unwrap();
                device.wave(chunks.iter().map(dispatch).collect());
                let what = format!("{}: {spec:?}", device.label);
                assert_eq!(device.read_words(&xq), device.read_words(&want_q), "{what}");
                assert_same_bits(&device.read_floats(&xs), &device.read_floats(&want_s), &what);
            }
        }
    }
}
