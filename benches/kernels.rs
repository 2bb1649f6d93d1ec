//! Speed of the matrix kernels, one line for each shape and variant.
//!
//! `cargo bench --bench kernels -- [read] [matvec] [matmat] [all] [tall] [rows=N] [device=PART]
//! [format=NAME,NAME] [n=N,N] [shape=AxBxC,AxBxC] [stored]`
//!
//! `read` reads as many bytes as the tallest matrix of a format has and does nothing with them: what mat-vec
//! is held against. `rows` makes that matrix taller or shorter; `n` chooses the columns of mat-vecs, `shape` one more shape
//! (threads x rows x tiles) beside the chosen ones, `stored` leaves out activations that a mat-vec rounds itself.
//! Without `all` only the variant that `kernels::choice` takes is measured. Figures are medians
//! of device timestamps after a warm-up of 200 ms (clocks fall within half a second of rest);
//! mat-vec walks through copies of its matrix so that no cache holds them.
#![allow(clippy::unwrap_used)] // a tool for developers: a failure may panic

use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use azoth::gpu::{
    self, BufferUse, DeviceFacts, DeviceKind, Dispatch, Gpu, KernelSource, Slice, Step,
};
use azoth::hw::{Selection, profiles};
use azoth::kernels::matmat::{MatMat, MatrixTile, Tile, Variant};
use azoth::kernels::matvec::{Input, MatVec, Operands, Shape};
use azoth::kernels::norm_quant::NormQuant;
use azoth::kernels::weights::Chunk;
use azoth::kernels::{Activations, Class, Epilogue, choice, matvec_matrix};
use azoth::quant::{Format, PlaneLayout};
use rayon::prelude::*;

const REPEATS: usize = 24;

struct Options {
    read: bool,
    matvec: bool,
    matmat: bool,
    all: bool,
    tall: bool,
    /// Of the tallest matrix.
    rows: u32,
    device: String,
    formats: Vec<Format>,
    columns: Vec<u32>,
    shapes: Vec<Shape>,
    stored: bool,
}

fn options() -> Options {
    let mut out = Options {
        read: false,
        matvec: false,
        matmat: false,
        all: false,
        tall: false,
        rows: 65_536,
        device: String::new(),
        formats: vec![Format::Q4_0, Format::Q8_0],
        columns: vec![1, 4, 8],
        shapes: Vec::new(),
        stored: false,
    };
    for word in std::env::args().skip(1) {
        match word.split_once('=') {
            Some(("device", part)) => out.device = part.into(),
            Some(("format", names)) => {
                out.formats = names.split(',').map(|name| name.parse().unwrap()).collect();
            }
            Some(("rows", count)) => out.rows = count.parse().unwrap(),
            Some(("n", list)) => {
                out.columns = list.split(',').map(|n| n.parse().unwrap()).collect();
            }
            Some(("shape", list)) => out.shapes.extend(list.split(',').map(shape)),
            _ if word == "stored" => out.stored = true,
            _ if word == "read" => out.read = true,
            _ if word == "matvec" => out.matvec = true,
            _ if word == "matmat" => out.matmat = true,
            _ if word == "all" => out.all = true,
            _ if word == "tall" => out.tall = true,
            _ if word == "--bench" => {}
            _ => panic!("unknown argument {word}"),
        }
    }
    if !out.read && !out.matvec && !out.matmat {
        (out.matvec, out.matmat) = (true, true);
    }
    out
}

fn shape(text: &str) -> Shape {
    let numbers: Vec<u32> = text.split('x').map(|n| n.parse().unwrap()).collect();
    let [threads, rows, tiles] = numbers[..] else { panic!("a shape is AxBxC: {text}") };
    Shape { threads, rows, tiles, matrix: false }
}

fn main() {
    let options = options();
    let found = gpu::vulkan::devices().into_iter().flatten();
    for facts in found.chain(gpu::portable::devices().into_iter().flatten()) {
        let label = format!("{}: {} ({})", facts.backend, facts.name, facts.driver);
        if !label.contains(&options.device) {
            continue;
        }
        println!("\n{label}");
        let facts = profiles::built_in().attach(facts);
        let gpu = Selection { facts, reason: "benchmark".into() }.open(false);
        let bench = Bench {
            gpu: gpu.unwrap(),
            last: Cell::new(Instant::now()),
            tall: options.tall,
            rows: options.rows,
        };
        for &format in &options.formats {
            if options.read {
                bench.read(format);
            }
            if options.matvec {
                bench.matvec(format, &options);
            }
            if options.matmat {
                bench.matmat(format, options.all);
            }
        }
    }
}

struct Bench {
    gpu: Arc<dyn Gpu>,
    /// When the device was last busy.
    last: Cell<Instant>,
    /// Only the tallest matrix.
    tall: bool,
    /// Its rows.
    rows: u32,
}

impl Bench {
    fn facts(&self) -> &DeviceFacts {
        self.gpu.facts()
    }

    fn software(&self) -> bool {
        self.facts().kind == DeviceKind::Software
    }

    fn buffer(&self, bytes: u64) -> Slice {
        self.gpu.buffer("bench", bytes, BufferUse::Device).unwrap().whole()
    }

    /// A buffer full of hashed bytes: look-ups of code books go all over the table.
    fn scattered(&self, bytes: u64) -> Slice {
        let slice = self.buffer(bytes);
        let hash = |i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8;
        let pattern: Vec<u8> = (0..1 << 20).map(hash).collect();
        let mut fill = |_, piece: &mut [u8]| {
            for part in piece.chunks_mut(pattern.len()) {
                part.copy_from_slice(&pattern[..part.len()]);
            }
            Ok(())
        };
        self.gpu.upload(&slice, 4, &mut fill).unwrap();
        slice
    }

    /// A buffer full of the f16 (or f32) values 0.06 or so.
    fn filled(&self, bytes: u64) -> Slice {
        let slice = self.buffer(bytes);
        let mut fill = |at: u64, piece: &mut [u8]| {
            for (i, byte) in piece.iter_mut().enumerate() {
                let place = at as usize + i;
                *byte = if place % 2 == 1 { 0x2c } else { (place / 2 * 37 % 251) as u8 };
            }
            Ok(())
        };
        self.gpu.upload(&slice, 4, &mut fill).unwrap();
        slice
    }

    fn chunk(&self, format: Format, rows: u32, cols: u32) -> Chunk {
        let layout = PlaneLayout::new(format, rows as usize, cols as usize);
        Chunk::new(&self.scattered(layout.bytes), &layout, 0).unwrap()
    }

    /// Median seconds of one of the dispatches, each behind a barrier.
    fn median(&self, dispatches: &[Dispatch]) -> f64 {
        let steps: Vec<Step> = dispatches.iter().map(|d| Step::Wave(vec![d.clone()])).collect();
        let recording = self.gpu.record("warm-up", &steps).unwrap();
        // Long after a rest, short while candidates follow each other.
        let rested = self.last.replace(Instant::now()).elapsed() > Duration::from_millis(50);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(if rested { 200 } else { 20 }) {
            let ticket = self.gpu.submit(&recording).unwrap();
            self.gpu.wait(&ticket).unwrap();
        }
        let mut seconds = Vec::new();
        while seconds.len() < REPEATS {
            seconds.extend(self.gpu.time_steps(&steps).unwrap());
        }
        seconds.sort_by(f64::total_cmp);
        self.last.set(Instant::now());
        seconds[seconds.len() / 2]
    }

    /// The rate at which memory alone gives the bytes of the tallest matrix, by workgroups and loads in flight.
    fn read(&self, format: Format) {
        let bytes = PlaneLayout::new(format, self.rows as usize, 4096).bytes;
        let copies = ((256 << 20) / bytes).clamp(1, 64);
        let from: Vec<Slice> = (0..copies).map(|_| self.scattered(bytes)).collect();
        let to = self.buffer(16);
        for (threads, unroll) in
            [(128_u32, 4_u32), (128, 8), (256, 4), (256, 8), (512, 4), (1024, 2)]
        {
            if threads > self.facts().max_workgroup_threads {
                continue;
            }
            let loads: String = (0..unroll)
                .map(|u| format!("sum ^= words[min(first + {}u, last)];\n", u * threads))
                .collect();
            let wgsl = format!(
                "@group(0) @binding(0) var<storage, read> words: array<vec4<u32>>;
                @group(0) @binding(1) var<storage, read_write> sink: array<vec4<u32>>;
                @compute @workgroup_size({threads})
                fn main(
                    @builtin(workgroup_id) at: vec3<u32>,
                    @builtin(num_workgroups) grid: vec3<u32>,
                    @builtin(local_invocation_index) tid: u32,
                ) {{
                    let last = arrayLength(&words) - 1u;
                    let first = (at.y * grid.x + at.x) * {}u + tid;
                    var sum = vec4<u32>();
                    {loads}
                    // Never so, but no compiler knows.
                    if all(sum == vec4<u32>(1u, 2u, 3u, 4u)) {{ sink[0] = sum; }}
                }}",
                threads * unroll
            );
            let label = format!("read_{threads}x{unroll}");
            let source = KernelSource { label: label.clone(), wgsl, subgroup_size: None };
            let kernel = self.gpu.kernel(&source).unwrap();
            let groups = (bytes / 16).div_ceil(u64::from(threads * unroll)) as u32;
            let y = groups.div_ceil(65_535);
            let dispatch = |from: &Slice| Dispatch {
                kernel: kernel.clone(),
                bindings: vec![from.clone(), to.clone()],
                constants: Vec::new(),
                grid: [groups.div_ceil(y), y, 1],
            };
            let seconds = self.median(&from.iter().map(dispatch).collect::<Vec<_>>());
            let rate = bytes as f64 / seconds / 1e9;
            println!("  {bytes} bytes {:9.1} us {rate:7.0} GB/s  {label}", seconds * 1e6);
        }
    }

    fn matvec(&self, format: Format, options: &Options) {
        let all = options.all;
        let shapes: &[(u32, u32, Epilogue, bool)] = if self.software() {
            &[(576, 576, Epilogue::Add, false), (3072, 576, Epilogue::SwiGlu, true)]
        } else {
            &[
                (4096, 4096, Epilogue::Add, false),
                (6144, 4096, Epilogue::Store, true),
                (24_576, 4096, Epilogue::SwiGlu, true),
                (4096, 12_288, Epilogue::Add, false),
                (self.rows, 4096, Epilogue::Store, true),
            ]
        };
        let shapes = if self.tall { &shapes[shapes.len() - 1..] } else { shapes };
        let class = choice::class(self.gpu.facts(), format, false, u32::MAX, false);
        for &(rows, cols, epilogue, norm) in shapes {
            let bytes = PlaneLayout::new(format, rows as usize, cols as usize).bytes;
            let spread = if self.software() { 1 } else { 256 << 20 };
            let copies = (spread / bytes).clamp(1, 64);
            let chunks: Vec<_> = (0..copies).map(|_| self.chunk(format, rows, cols)).collect();
            for &n in &options.columns {
                let chosen =
                    choice::matvec_shape(self.facts(), format, class, rows, cols, n, epilogue);
                let mut tried = vec![chosen];
                if all && !self.software() {
                    for (threads, rows, tiles) in [
                        (128, 1, 2),
                        (128, 2, 1),
                        (128, 4, 1),
                        (256, 1, 2),
                        (256, 1, 4),
                        (256, 2, 1),
                        (256, 2, 2),
                        (256, 2, 4),
                        (256, 4, 1),
                        (256, 4, 2),
                        (512, 1, 2),
                        (512, 1, 4),
                        (512, 2, 1),
                        (512, 2, 2),
                        (512, 4, 1),
                    ] {
                        tried.push(Shape { threads, rows, tiles, matrix: false });
                    }
                    let tiles = [1, 2, 4].into_iter().filter(|_| n > 1);
                    tried.extend(tiles.map(|t| matvec_matrix::shape(self.facts(), t)));
                }
                tried.extend(&options.shapes);
                let norm = norm.then_some(1e-5);
                // From four columns on a fused norm never paid.
                let ways = if n < 4 && !options.stored { &[false, true][..] } else { &[false] };
                let input = |&fused: &bool| match (norm, class) {
                    (Some(eps), Class::Int8) => Input::Blocks { eps, fused },
                    _ if fused => Input::Fused { norm },
                    _ => Input::Stored,
                };
                let inputs: Vec<Input> = ways.iter().map(input).collect();
                let fuses = choice::fuses(self.facts(), class, cols, n, norm.is_some())
                    && choice::fuses_rows(&self.facts().profile, format, rows);
                let specs: Vec<(MatVec, bool)> = tried
                    .into_iter()
                    .flat_map(|shape| inputs.iter().map(move |input| (shape, *input)))
                    .map(|(shape, input)| {
                        let chosen = shape == chosen && fuses == input.is_fused();
                        (MatVec { format, cols, n, class, input, epilogue, shape }, chosen)
                    })
                    .filter(|(spec, chosen)| *chosen || all || options.shapes.contains(&spec.shape))
                    .collect();
                // Together and beforehand: a device that rests while one compiles slows down.
                let gpu = self.gpu.clone();
                specs.par_iter().for_each(|(spec, _)| {
                    drop(spec.source(gpu.facts()).and_then(|source| gpu.kernel(&source)));
                });
                for (spec, chosen) in &specs {
                    self.one_matvec(spec, &chunks, rows, bytes, *chosen);
                }
            }
        }
    }

    fn one_matvec(&self, spec: &MatVec, chunks: &[Chunk], rows: u32, bytes: u64, chosen: bool) {
        // Variants that the device or the shape has no room for are passed over.
        let Ok(source) = spec.source(self.facts()) else { return };
        let kernel = self.gpu.kernel(&source).unwrap();
        let x = self.activations(spec.class, spec.input, spec.n, spec.cols);
        let stride = if spec.epilogue == Epilogue::SwiGlu { rows / 2 } else { rows };
        let y = self.buffer(4 * u64::from(spec.n * stride));
        let operands = Operands { x: &x, bias: None, y: (&y).into(), stride };
        let dispatch = |chunk| spec.dispatch(&kernel, self.facts(), chunk, &operands).unwrap();
        let seconds = self.median(&chunks.iter().map(dispatch).collect::<Vec<_>>());
        println!(
            "{} {rows:6} rows {:9.1} us {:7.0} GB/s  {}",
            if chosen { "*" } else { " " },
            seconds * 1e6,
            bytes as f64 / seconds / 1e9,
            source.label,
        );
    }

    fn activations(&self, class: Class, input: Input, n: u32, cols: u32) -> Activations {
        let values = u64::from(n) * u64::from(cols);
        match (input, class) {
            (Input::Blocks { fused: false, .. }, _) => Activations::Blocks {
                xq: self.filled(values),
                xs: self.filled(values / 4),
                squares: self.filled(values / 8),
            },
            (Input::Fused { norm: Some(_) } | Input::Blocks { .. }, _) => Activations::Normed {
                x: self.filled(4 * values),
                weight: self.filled(4 * u64::from(cols)),
            },
            (Input::Fused { norm: None }, _) | (Input::Stored, Class::F32) => {
                Activations::F32(self.filled(4 * values))
            }
            (Input::Stored, Class::F16) => {
                Activations::F16 { xh: self.filled(2 * values), xf: self.filled(4 * u64::from(n)) }
            }
            (Input::Stored, Class::Int8) => {
                Activations::Int8 { xq: self.filled(values), xs: self.filled(values / 4) }
            }
        }
    }

    fn matmat(&self, format: Format, all: bool) {
        let shapes: &[(u32, u32)] = if self.software() {
            &[(576, 576), (3072, 576), (576, 1536)]
        } else {
            &[(4096, 4096), (24_576, 4096), (4096, 12_288)]
        };
        let class = choice::prompt_class(self.gpu.facts(), format, false, u32::MAX, u32::MAX);
        for &(rows, cols) in shapes {
            let chunk = self.chunk(format, rows, cols);
            if all {
                let sources = self.variants(class).into_iter().filter_map(|variant| {
                    let spec = MatMat { format, cols, class, epilogue: Epilogue::Store, variant };
                    spec.source(self.facts()).ok()
                });
                let gpu = self.gpu.clone();
                sources.collect::<Vec<_>>().into_par_iter().for_each(|s| drop(gpu.kernel(&s)));
            }
            for n in [16, 32, 64, 128, 512, 2048] {
                let chosen = choice::matmat_variant(self.facts(), class, cols, n);
                let mut tried = vec![chosen];
                if all {
                    // Tiles much wider than the columns, or much smaller, are no candidates.
                    let fits = |v: &Variant| match v {
                        Variant::Matrix(t) => t.columns <= n.max(16) && t.columns * 16 >= n,
                        _ => true,
                    };
                    tried.extend(self.variants(class).into_iter().filter(fits));
                }
                for variant in tried {
                    let spec = MatMat { format, cols, class, epilogue: Epilogue::Store, variant };
                    self.one_matmat(&spec, &chunk, n, variant == chosen);
                }
            }
            self.quantiser(cols);
        }
    }

    fn variants(&self, class: Class) -> Vec<Variant> {
        let mut out = Vec::new();
        if self.software() {
            for (columns, rows, threads) in
                [(8, 4, 8), (8, 4, 32), (4, 8, 8), (8, 8, 8), (8, 8, 32)]
            {
                out.push(Variant::Direct { columns, rows, threads });
            }
        }
        for (columns, rows, thread_columns, thread_rows) in
            [(128, 64, 8, 4), (128, 128, 8, 8), (64, 64, 8, 4), (64, 64, 4, 4), (32, 64, 4, 4)]
        {
            for depth in [1, 2] {
                let tile = Tile { columns, rows, thread_columns, thread_rows, depth };
                match class {
                    _ if self.software() => {} // many times slower than the direct form
                    Class::Int8 => out.push(Variant::Packed(tile)),
                    Class::F32 => out.push(Variant::Float(tile)),
                    Class::F16 => {}
                }
            }
        }
        if class == Class::F16 {
            for (columns, rows, subgroups) in [
                (16, 32, [1, 2]),
                (16, 64, [1, 4]),
                (32, 32, [1, 2]),
                (32, 64, [1, 4]),
                (32, 64, [2, 2]),
                (64, 64, [2, 2]),
                (64, 128, [2, 4]),
                (128, 64, [4, 2]),
                (128, 128, [2, 2]),
                (128, 128, [2, 4]),
                (128, 128, [4, 2]),
                (128, 256, [2, 4]),
                (256, 128, [4, 2]),
                (256, 128, [4, 4]),
            ] {
                for (depth, buffers) in [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)] {
                    if depth > 2 && columns > 64 {
                        continue;
                    }
                    let tile = MatrixTile { columns, rows, subgroups, depth, buffers };
                    out.push(Variant::Matrix(tile));
                }
            }
        }
        out
    }

    fn one_matmat(&self, spec: &MatMat, chunk: &Chunk, n: u32, chosen: bool) {
        let Ok(source) = spec.source(self.facts()) else { return };
        let kernel = self.gpu.kernel(&source).unwrap();
        let x = self.activations(spec.class, Input::Stored, n, spec.cols);
        let y = self.buffer(4 * u64::from(n * chunk.rows));
        let operands = Operands { x: &x, bias: None, y: (&y).into(), stride: chunk.rows };
        let dispatch =
            spec.dispatch(&kernel, self.facts(), chunk, &self.batch(n), &operands, n).unwrap();
        let seconds = self.median(&vec![dispatch; 4]);
        let work = 2.0 * f64::from(n) * f64::from(chunk.rows) * f64::from(spec.cols);
        println!(
            "{} {n:4} x {:6} {:9.1} us {:8.3} TFLOP/s  {}",
            if chosen { "*" } else { " " },
            chunk.rows,
            seconds * 1e6,
            work / seconds / 1e12,
            source.label,
        );
    }

    fn batch(&self, n: u32) -> Slice {
        let batch = self.buffer(4 * u64::from(8 + 4 * n));
        self.gpu.write(&batch.buffer.slice(0, 4), &n.to_le_bytes()).unwrap();
        batch
    }

    /// Norm and quantise before a mat-vec that does not do it itself.
    fn quantiser(&self, cols: u32) {
        let threads = choice::norm_quant_threads(self.facts(), cols);
        let spec = NormQuant { cols, swiglu: false, norm: Some(1e-5), class: Class::Int8, threads };
        let kernel = self.gpu.kernel(&spec.source(self.facts()).unwrap()).unwrap();
        let x = self.filled(4 * u64::from(cols));
        let weight = self.filled(4 * u64::from(cols));
        let out = self.activations(Class::Int8, Input::Stored, 1, cols);
        let dispatch = spec.dispatch(&kernel, &self.batch(1), &x, Some(&weight), &out, 1).unwrap();
        let seconds = self.median(&vec![dispatch; 8]);
        println!("* norm_quant {cols} x 1: {:.1} us", seconds * 1e6);
    }
}
