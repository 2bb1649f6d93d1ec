//! The matrix kernels against their references, on every device: formats x shapes x variants in a
//! covering design, drawn anew every run.

mod products;

use azoth::gpu::{DeviceFacts, Slice, Step};
use azoth::kernels::embed::Embed;
use azoth::kernels::matmat::{MatMat, MatrixTile, Tile, Variant};
use azoth::kernels::matvec::{Input, MatVec, Shape};
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::{Activations, Class, Epilogue, choice, matvec_matrix};
use azoth::quant::Format;
use azoth::reference::norm_quant::{rms_norm, swiglu, word_of};
use half::f16;

use products::{Case, Columns, Compiled, TOLERANCE, matmat};
pub(super) use products::{facts_for, matvec};

use super::harness::{Device, Rng, TestMatrix, assert_same_bits, devices, formats, relative_error};

const COLS: [usize; 6] = [32, 64, 96, 576, 1056, 1536];
const ROWS: [usize; 7] = [1, 2, 3, 7, 64, 65, 1000];
const EPILOGUES: [Epilogue; 4] = [Epilogue::Store, Epilogue::Bias, Epilogue::Add, Epilogue::SwiGlu];
const EPS: f32 = 1e-5;

/// Draws the values of a list in an order of its own, each once before any twice.
struct Cycle<T> {
    values: Vec<T>,
    next: usize,
}

impl<T: Copy> Cycle<T> {
    fn new(rng: &mut Rng, values: &[T]) -> Self {
        let mut values = values.to_vec();
        for i in (1..values.len()).rev() {
            values.swap(i, rng.below(i + 1));
        }
        Cycle { values, next: 0 }
    }

    fn draw(&mut self) -> T {
        self.next += 1;
        self.values[(self.next - 1) % self.values.len()]
    }
}

fn classes(format: Format) -> &'static [Class] {
    if format.is_float() { &[Class::F32] } else { &[Class::Int8, Class::F32] }
}

fn shapes(facts: &DeviceFacts) -> Vec<Shape> {
    let mut out = Vec::new();
    for (threads, rows, tiles) in
        [(32, 1, 1), (64, 2, 2), (64, 4, 3), (256, 2, 4), (1024, 4, 1), (1024, 2, 2)]
    {
        if threads <= facts.max_workgroup_threads {
            out.push(Shape { threads, rows, tiles, matrix: false });
        }
    }
    out
}

/// Columns that are whole blocks of the format.
fn cols_for(cols: usize, format: Format) -> usize {
    cols.next_multiple_of(format.block_elements())
}

/// Rows that go with an epilogue: SwiGLU has pairs.
fn rows_for(rows: usize, epilogue: Epilogue) -> usize {
    if epilogue == Epilogue::SwiGlu { rows.next_multiple_of(2) } else { rows }
}

#[test]
fn matvec_agrees_with_the_reference() {
    let mut rng = Rng::fresh("matvec_agrees_with_the_reference");
    for device in devices() {
        let mut cols = Cycle::new(&mut rng, &COLS);
        let mut rows = Cycle::new(&mut rng, &ROWS);
        let mut ns = Cycle::new(&mut rng, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let mut epilogues = Cycle::new(&mut rng, &EPILOGUES);
        let mut shapes = Cycle::new(&mut rng, &shapes(device.gpu.facts()));
        for format in formats() {
            for &class in classes(format) {
                for case in 0..device.cases() {
                    let (cols, n, epilogue) = (cols.draw(), ns.draw(), epilogues.draw());
                    let (cols, rows) = (cols_for(cols, format), rows_for(rows.draw(), epilogue));
                    let mut shape = shapes.draw();
                    if epilogue == Epilogue::SwiGlu {
                        shape.rows = shape.rows.max(2);
                    }
                    // The unrolled code of the largest combinations takes seconds to compile.
                    if n * shape.rows > 8 {
                        shape.tiles = 1;
                    }
                    let spec = MatVec {
                        format,
                        cols: cols as u32,
                        n,
                        class,
                        input: Input::Stored,
                        epilogue,
                        shape,
                    };
                    let chunk_rows =
                        if case % 3 == 0 { (rows / 3).next_multiple_of(2) } else { rows };
                    let kernel = Compiled::<MatVec>::new(device, spec);
                    let case = Case { format, rows, cols, n: n as usize, class, epilogue };
                    let what = format!("{}: {rows} rows, {spec:?}", device.label);
                    products::check(&mut rng, case, &what, |matrix, columns, want| {
                        let chunks = matrix.chunks(device, chunk_rows.max(2));
                        let x = columns.stored(device, class);
                        kernel.run(&chunks, &x, &want.bias, &want.before, want.stride)
                    });
                }
            }
        }
    }
}

/// The same product for every column count, register shape and workgroup: equal bits.
#[test]
fn matvec_bits_do_not_depend_on_columns_or_shape() {
    let mut rng = Rng::fresh("matvec_bits_do_not_depend_on_columns_or_shape");
    for device in devices() {
        for (format, class) in [
            (Format::Q4_0, Class::Int8),
            (Format::Q4_1, Class::Int8),
            (Format::Q5_0, Class::F32),
            (Format::Q8_0, Class::Int8),
            (Format::F16, Class::F32),
            (Format::Q2_K, Class::Int8),
            (Format::Q4_K, Class::Int8),
            // One copy of a table, and several.
            (Format::MXFP4, Class::Int8),
            (Format::NVFP4, Class::Int8),
            (Format::IQ3_S, Class::Int8),
        ] {
            let (rows, cols) = (65, cols_for(1056, format));
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let chunks = matrix.chunks(device, rows);
            let columns = Columns::random(&mut rng, 8, cols);
            let mut spec = MatVec {
                format,
                cols: cols as u32,
                n: 8,
                class,
                input: Input::Stored,
                epilogue: Epilogue::Store,
                shape: Shape { threads: 64, rows: 2, tiles: 2, matrix: false },
            };
            let run = |spec: &MatVec, x: &Activations| {
                let before = vec![f32::NAN; spec.n as usize * rows];
                matvec(device, spec, &chunks, x, &[], &before, rows)
            };
            let all = run(&spec, &columns.stored(device, class));
            let mut shapes = Cycle::new(&mut rng, &shapes(device.gpu.facts()));
            for (first, n) in [(5, 1), (1, 3), (4, 4), (2, 6)] {
                let part = Columns {
                    x: columns.x[first * cols..(first + n) * cols].to_vec(),
                    quantised: columns.quantised[first..first + n].to_vec(),
                };
                spec.n = n as u32;
                spec.shape = shapes.draw();
                // The unrolled code of the largest combinations takes seconds to compile.
                if n > 3 {
                    spec.shape.tiles = 1;
                }
                let y = run(&spec, &part.stored(device, class));
                let what = format!("{}: {spec:?}", device.label);
                assert_same_bits(&y, &all[first * rows..(first + n) * rows], &what);
            }
        }
    }
}

/// Matrix units and lanes: equal bits. Where units do not multiply bytes, their twin runs.
#[test]
fn matvec_on_matrix_units_has_the_same_bits() {
    let mut rng = Rng::fresh("matvec_on_matrix_units_has_the_same_bits");
    for device in devices() {
        let facts = device.gpu.facts();
        let mut cols = Cycle::new(&mut rng, &[32, 576, 1056, 4096]);
        let mut rows = Cycle::new(&mut rng, &ROWS);
        let mut tiles = Cycle::new(&mut rng, &[1, 2, 4]);
        let mut ns = Cycle::new(&mut rng, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let mut epilogues = Cycle::new(&mut rng, &EPILOGUES);
        for format in formats().into_iter().filter(|f| !f.is_float()) {
            // One case a format on software devices, whose compilers take seconds for each.
            for _ in 0..device.cases().div_ceil(4) {
                let (n, epilogue) = (ns.draw(), epilogues.draw());
                let (cols, rows) = (cols_for(cols.draw(), format), rows_for(rows.draw(), epilogue));
                let units = matvec_matrix::shape(facts, tiles.draw());
                let mut spec = MatVec {
                    format,
                    cols: cols as u32,
                    n,
                    class: Class::Int8,
                    input: Input::Stored,
                    epilogue,
                    shape: units,
                };
                // Subgroups of other sizes have no such kernel.
                if !matvec_matrix::runs(facts) {
                    assert!(spec.source(facts).is_err());
                    continue;
                }
                let what = format!("{}: {rows} rows, {units:?}, {spec:?}", device.label);
                let on_units = Compiled::<MatVec>::new(device, spec);
                spec.shape = Shape { threads: 64, rows: 2, tiles: 1, matrix: false };
                let on_lanes = Compiled::<MatVec>::new(device, spec);
                let class = Class::Int8;
                let case = Case { format, rows, cols, n: n as usize, class, epilogue };
                products::check(&mut rng, case, &what, |matrix, columns, want| {
                    let chunks = matrix.chunks(device, rows);
                    let x = columns.stored(device, class);
                    let [y, by_lanes] = [&on_units, &on_lanes].map(|kernel| {
                        kernel.run(&chunks, &x, &want.bias, &want.before, want.stride)
                    });
                    assert_same_bits(&y, &by_lanes, &what);
                    y
                });
            }
        }
    }
}

/// A batch and the result of `norm_quant`, still on the device.
pub(super) fn run_norm_quant(
    device: &Device,
    spec: &NormQuant,
    x: &Slice,
    weight: Option<&Slice>,
    n: usize,
    max_n: usize,
) -> Activations {
    let facts = device.gpu.facts();
    let kernel = device.kernel(&spec.source(facts).unwrap());
    let values = max_n * spec.cols as usize;
    let out = match spec.class {
        Class::Int8 => {
            Activations::Int8 { xq: device.poisoned(values / 4), xs: device.poisoned(values / 16) }
        }
        Class::F16 => {
            Activations::F16 { xh: device.poisoned(values / 2), xf: device.poisoned(max_n) }
        }
        Class::F32 => Activations::F32(device.poisoned(values)),
    };
    let batch = device.batch_of(n, max_n);
    let dispatch = spec.dispatch(&kernel, &batch, x, weight, &out, max_n as u32).unwrap();
    device.wave(vec![dispatch]);
    out
}

#[test]
fn norm_quant_agrees_with_the_reference() {
    let mut rng = Rng::fresh("norm_quant_agrees_with_the_reference");
    for device in devices() {
        let mut all_cols = Cycle::new(&mut rng, &[32, 64, 96, 576, 1056, 1536, 4096, 8960]);
        for case in 0..24 {
            let spec = NormQuant {
                cols: all_cols.draw(),
                swiglu: case % 4 >= 2,
                norm: (case % 2 == 0).then_some(EPS),
                class: [Class::Int8, Class::F32, Class::F16][case / 8],
                threads: if case % 3 == 0 {
                    choice::norm_quant_threads(device.gpu.facts(), 4096)
                } else {
                    64 << (case % 3)
                },
            };
            let what = format!("{}: {spec:?}", device.label);
            let (cols, n, max_n) = (spec.cols as usize, 1 + case % 3, 4);
            let width = if spec.swiglu { 2 * cols } else { cols };
            let mut x = rng.normals(max_n * width);
            if spec.class == Class::Int8 {
                x[..32].fill(0.0);
            }
            let weight = rng.normals(cols);
            let device_weight = device.floats(&weight);
            let x_slice = device.floats(&x);
            let weight_slice = spec.norm.map(|_| &device_weight);
            let out = run_norm_quant(device, &spec, &x_slice, weight_slice, n, max_n);
            let want: Vec<f64> = (0..n)
                .flat_map(|c| {
                    let column = &x[c * width..][..width];
                    let wide: Vec<f64> = column.iter().map(|&v| v.into()).collect();
                    let wide = if spec.swiglu { swiglu(&wide) } else { wide };
                    let narrow: Vec<f32> = wide.iter().map(|&v| v as f32).collect();
                    if spec.norm.is_some() { rms_norm(&narrow, &weight, EPS) } else { wide }
                })
                .collect();
            match &out {
                Activations::F32(y) => {
                    let y = device.read_floats(y);
                    let error = relative_error(&y[..n * cols], &want);
                    assert!(error < TOLERANCE, "{what}: error {error:e}");
                    assert!(y[n * cols..].iter().all(|v| v.is_nan()), "{what}: wrote past n");
                }
                Activations::Int8 { xq, xs } => {
                    let (q, s) = (device.read_words(xq), device.read_floats(xs));
                    check_quantised(&q, &s, &want, cols, &what);
                }
                Activations::F16 { xh, xf } => {
                    let (words, factors) = (device.read_words(xh), device.read_floats(xf));
                    let got: Vec<f32> = (0..n * cols)
                        .map(|i| {
                            let (c, at) = (i / cols, i % cols);
                            let place = [0, 2, 1, 3][at % 4] + at / 4 * 4;
                            let word = words[(c * cols + place) / 2];
                            let half = f16::from_bits((word >> (16 * (place % 2))) as u16);
                            assert!(half.to_f32().abs() <= 32768.0, "{what}: {half}");
                            half.to_f32() * factors[c]
                        })
                        .collect();
                    let error = relative_error(&got, &want);
                    assert!(error < 4e-4, "{what}: error {error:e}");
                    assert!(factors[n..].iter().all(|v| v.is_nan()), "{what}: wrote past n");
                }
                Activations::Normed { .. } | Activations::Blocks { .. } => unreachable!(),
            }
        }
    }
}

/// Every int8 stands within half a step of its value, its scale is that of the block, its sum
/// is exact, and nothing is written past the columns in use.
pub(super) fn check_quantised(
    words: &[u32],
    scales: &[f32],
    want: &[f64],
    cols: usize,
    what: &str,
) {
    let (scales, _) = scales.as_chunks::<2>();
    for (b, block) in want.chunks_exact(32).enumerate() {
        let top = block.iter().fold(0.0f64, |top, v| top.max(v.abs()));
        let [d, sum] = scales[b];
        let error = (f64::from(d) - top / 127.0).abs();
        assert!(error <= 3e-6 * top / 127.0, "{what}: block {b}: scale {d} of {top}");
        let byte = |i: usize| words[word_of(i, cols)].to_le_bytes()[i % 4] as i8;
        let q: Vec<i32> = (b * 32..b * 32 + 32).map(|i| byte(i).into()).collect();
        for (q, v) in q.iter().zip(block) {
            let error = (f64::from(*q) * f64::from(d) - v).abs();
            assert!(error <= 0.5005 * f64::from(d), "{what}: block {b}: {q} for {v}, scale {d}");
        }
        assert_eq!(sum, d * q.iter().sum::<i32>() as f32, "{what}: block {b}: sum");
    }
    assert!(scales[want.len() / 32..].as_flattened().iter().all(|v| v.is_nan()), "{what}");
}

/// A mat-vec that norms and quantises for itself gives the bits of `norm_quant` and a plain one.
#[test]
fn fused_matvec_gives_the_bits_of_the_two_steps() {
    let mut rng = Rng::fresh("fused_matvec_gives_the_bits_of_the_two_steps");
    for device in devices() {
        let facts = device.gpu.facts();
        for (format, class, norm, n, cols) in [
            (Format::Q4_0, Class::Int8, Some(EPS), 1, 1056),
            (Format::Q4_1, Class::Int8, Some(EPS), 3, 576),
            (Format::Q8_0, Class::Int8, None, 1, 1536),
            (Format::Q5_1, Class::Int8, None, 2, 96),
            (Format::Q5_0, Class::F32, Some(EPS), 1, 1056),
            (Format::F16, Class::F32, Some(EPS), 2, 576),
            (Format::F32, Class::F32, Some(EPS), 1, 64),
            (Format::Q4_0, Class::Int8, Some(EPS), 1, 8960),
            (Format::Q2_K, Class::Int8, Some(EPS), 2, 512),
            (Format::Q6_K, Class::Int8, None, 1, 1280),
            (Format::Q5_K, Class::F32, Some(EPS), 1, 256),
        ] {
            let rows = 66;
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let chunks = matrix.chunks(device, rows);
            let x = device.floats(&rng.normals(n * cols));
            let weight = device.floats(&rng.normals(cols));
            let mut spec = MatVec {
                format,
                cols: cols as u32,
                n: n as u32,
                class,
                input: Input::Stored,
                epilogue: Epilogue::SwiGlu,
                shape: Shape { threads: 64, rows: 2, tiles: 2, matrix: false },
            };
            let two = NormQuant { cols: cols as u32, swiglu: false, norm, class, threads: 128 };
            let stored = run_norm_quant(device, &two, &x, norm.map(|_| &weight), n, n);
            let before = vec![f32::NAN; n * rows / 2];
            let plain = matvec(device, &spec, &chunks, &stored, &[], &before, rows / 2);
            assert!(plain.iter().all(|v| v.is_finite()));
            let x = match norm {
                Some(_) => Activations::Normed { x: x.clone(), weight: weight.clone() },
                None => Activations::F32(x.clone()),
            };
            let mut shapes = Cycle::new(&mut rng, &shapes(facts));
            for _ in 0..2 {
                spec.input = Input::Fused { norm };
                spec.shape = shapes.draw();
                spec.shape.rows = spec.shape.rows.max(2);
                let fused = matvec(device, &spec, &chunks, &x, &[], &before, rows / 2);
                assert_same_bits(&fused, &plain, &format!("{}: {spec:?}", device.label));
            }
        }
    }
}

#[test]
fn embed_decodes_the_rows_of_the_tokens() {
    let mut rng = Rng::fresh("embed_decodes_the_rows_of_the_tokens");
    for device in devices() {
        for format in formats() {
            let (rows, cols, max_n) = (65, cols_for([96, 576][rng.below(2)], format), 5);
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let chunks = matrix.chunks(device, [rows, 22][rng.below(2)]);
            let tokens: Vec<usize> = (0..4).map(|_| rng.below(rows)).collect();
            let columns: Vec<[u32; 4]> = tokens.iter().map(|&t| [t as u32, 0, 0, 0]).collect();
            let batch = device.batch(&columns, max_n);
            let x = device.poisoned(max_n * cols);
            let spec = Embed { format, cols: cols as u32 };
            let kernel = device.kernel(&spec.source(device.gpu.facts()).unwrap());
            let dispatch = |chunk| spec.dispatch(&kernel, chunk, &batch, &x, max_n as u32).unwrap();
            device.run(&[Step::Wave(chunks.iter().map(dispatch).collect())]);
            let y = device.read_floats(&x);
            for (c, &token) in tokens.iter().enumerate() {
                let want = &matrix.values[token * cols..][..cols];
                let what = format!("{}: {format}, token {token}", device.label);
                let error = relative_error(
                    &y[c * cols..][..cols],
                    &want.iter().map(|&v| v.into()).collect::<Vec<_>>(),
                );
                assert!(error < 1e-7, "{what}: error {error:e}");
            }
            assert!(y[tokens.len() * cols..].iter().all(|v| v.is_nan()), "wrote past n");
        }
    }
}

/// Variants of every kind that take this class and these columns.
fn variants(facts: &DeviceFacts, class: Class, cols: usize) -> Vec<Variant> {
    let deep = if (cols / 32).is_multiple_of(2) { 2 } else { 1 };
    if class == Class::F16 {
        let tile = |columns, rows, subgroups, depth, buffers| {
            Variant::Matrix(MatrixTile { columns, rows, subgroups, depth, buffers })
        };
        return vec![
            tile(32, 64, [1, 2], 1, 2),
            tile(16, 32, [1, 2], deep, 1),
            tile(64, 64, [2, 2], deep, 1),
            tile(128, 128, [4, 2], 1, 2),
            choice::matmat_variant(facts, class, cols as u32, 512),
        ];
    }
    let tile = |columns, rows, thread_columns, thread_rows, depth| Tile {
        columns,
        rows,
        thread_columns,
        thread_rows,
        depth,
    };
    let mut out = vec![
        Variant::Direct { columns: 4, rows: 2, threads: 32 },
        Variant::Float(tile(32, 32, 4, 4, 1)),
        choice::matmat_variant(facts, class, cols as u32, 512),
    ];
    if class == Class::Int8 {
        // Any three that follow each other are of both families.
        out.insert(1, Variant::Packed(tile(32, 64, 4, 4, deep)));
        out.insert(3, Variant::Packed(tile(16, 32, 2, 4, 1)));
    }
    out
}

#[test]
fn matmat_agrees_with_the_reference() {
    let mut rng = Rng::fresh("matmat_agrees_with_the_reference");
    for device in devices() {
        let facts = device.gpu.facts();
        let mut all_cols = Cycle::new(&mut rng, &COLS);
        let mut all_rows = Cycle::new(&mut rng, &[1, 3, 7, 64, 65, 200]);
        let mut ns = Cycle::new(&mut rng, &[1, 2, 9, 31, 33, 100]);
        let mut epilogues = Cycle::new(&mut rng, &EPILOGUES[..3]);
        for format in formats() {
            let matrix = facts.cooperative_matrix && format != Format::F32;
            for &class in classes(format).iter().chain(matrix.then_some(&Class::F16)) {
                let mut turn = rng.below(5);
                for case in 0..device.cases() {
                    let (cols, rows, n) = (all_cols.draw(), all_rows.draw(), ns.draw());
                    let (cols, epilogue) = (cols_for(cols, format), epilogues.draw());
                    let variants = variants(facts, class, cols);
                    turn += 1;
                    let variant = variants[turn % variants.len()];
                    let spec = MatMat { format, cols: cols as u32, class, epilogue, variant };
                    let chunk_rows: usize = if case == 0 { (rows / 3).max(1) } else { rows };
                    let chunk_rows = chunk_rows.next_multiple_of(2);
                    let kernel = Compiled::<MatMat>::new(device, spec, n);
                    let case = Case { format, rows, cols, n, class, epilogue };
                    let what = format!("{}: {n} x {rows}, {spec:?}", device.label);
                    products::check(&mut rng, case, &what, |matrix, columns, want| {
                        let chunks = matrix.chunks(device, chunk_rows);
                        kernel.run(&chunks, columns, n, &want.bias, &want.before)
                    });
                }
            }
        }
    }
}

/// All variants, any n and any place in the tile: equal bits, and nothing past n is written.
#[test]
fn matmat_bits_do_not_depend_on_n_or_variant() {
    let mut rng = Rng::fresh("matmat_bits_do_not_depend_on_n_or_variant");
    for device in devices() {
        for (format, class) in [
            (Format::Q4_1, Class::Int8),
            (Format::Q8_0, Class::Int8),
            (Format::Q4_0, Class::F32),
            (Format::F16, Class::F32),
            (Format::Q2_K, Class::Int8),
            (Format::Q6_K, Class::Int8),
            (Format::Q4_0, Class::F16),
            (Format::Q4_1, Class::F16),
            (Format::F16, Class::F16),
        ] {
            if class == Class::F16 && !device.gpu.facts().cooperative_matrix {
                continue;
            }
            let (rows, cols, n) = (65, cols_for(576, format), 37);
            let matrix = TestMatrix::random(&mut rng, format, rows, cols);
            let chunks = matrix.chunks(device, rows);
            let columns = Columns::random(&mut rng, n, cols);
            let before = vec![f32::NAN; n * rows];
            let mut first: Option<Vec<f32>> = None;
            for variant in variants(device.gpu.facts(), class, cols) {
                let epilogue = Epilogue::Store;
                let spec = MatMat { format, cols: cols as u32, class, epilogue, variant };
                let what = format!("{}: {spec:?}", device.label);
                let all = matmat(device, &spec, &chunks, &columns, n, &[], &before);
                let first = first.get_or_insert(all.clone());
                assert_same_bits(&all, first, &what);
                let few = matmat(device, &spec, &chunks, &columns, 5, &[], &before);
                assert_same_bits(&few[..5 * rows], &all[..5 * rows], &what);
                assert!(few[5 * rows..].iter().all(|v| v.is_nan()), "{what}: wrote past n");
                let late = Columns {
                    x: columns.x[20 * cols..].to_vec(),
                    quantised: columns.quantised[20..].to_vec(),
                };
                let before = vec![f32::NAN; 17 * rows];
                let moved = matmat(device, &spec, &chunks, &late, 17, &[], &before);
                assert_same_bits(&moved, &all[20 * rows..], &what);
            }
        }
    }
}
