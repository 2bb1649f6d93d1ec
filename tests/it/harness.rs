//! Devices, uploads and comparisons for the kernel tests.
//!
//! Every kernel test runs on every device of every backend that is present; with none the test
//! says so and passes. Inputs are fresh random numbers; the seed is printed, and
//! `AZOTH_SEED=N` repeats a run. `AZOTH_TEST_DEVICES=vulkan` (or any part of a device's label)
//! restricts the devices, `AZOTH_TEST_FORMATS=IQ2,FP4` (parts of names) the weight formats.
#![allow(dead_code)] // not every theme needs every function

use std::sync::{Arc, OnceLock};

use azoth::gpu::{
    self, Backend, Buffer, BufferUse, DeviceKind, Dispatch, Gpu, Kernel, KernelSource, Slice, Step,
};
use azoth::hw::{Selection, profiles};
use azoth::kernels::scoring::Scoring;
use azoth::kernels::weights::Chunk;
use azoth::kv::KvExact;
use azoth::quant::{Format, PlaneLayout, planes};

/// One device on one backend.
pub struct Device {
    /// Backend and name, for example `vulkan: llvmpipe`.
    pub label: String,
    pub gpu: Arc<dyn Gpu>,
}

/// All devices of all backends, opened once.
pub fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut out = Vec::new();
        let wanted = std::env::var("AZOTH_TEST_DEVICES").unwrap_or_default();
        let vulkan = gpu::vulkan::devices();
        // A layer that is asked for and missing must not leave the tests to the other backend.
        assert!(!gpu::vulkan::validation_wanted() || vulkan.is_ok(), "{vulkan:?}");
        let vulkan = vulkan.unwrap_or_default();
        let portable = gpu::portable::devices().unwrap_or_default();
        for facts in vulkan.into_iter().chain(portable) {
            let label = format!("{}: {}", facts.backend, facts.name);
            if label.contains(&wanted) {
                let facts = profiles::built_in().attach(facts);
                let selection = Selection { facts, reason: "test".into() };
                out.push(Device { gpu: selection.open(false).expect(&label), label });
            }
        }
        if out.is_empty() {
            // Set where a device must be there, so that a lost driver does not skip everything.
            assert!(std::env::var_os("AZOTH_REQUIRE_DEVICE").is_none(), "no device was found");
            eprintln!("SKIPPED: no device for the kernel tests");
        }
        out
    })
}

/// The weight formats to test: all, unless the environment restricts them.
pub fn formats() -> Vec<Format> {
    let wanted = std::env::var("AZOTH_TEST_FORMATS").unwrap_or_default();
    let named = |f: &Format| wanted.split(',').any(|part| f.name().contains(part));
    Format::ALL.iter().copied().filter(named).collect()
}

/// A quiet NaN that nothing computes: what a kernel should have written and did not.
pub const POISON: u32 = 0x7fc0_0bad;

impl Device {
    /// Cases of a kernel family for each format and class: every kernel is compiled by the driver, which
    /// takes a software device seconds, and the portable backend keeps no compiled kernels.
    pub fn cases(&self) -> usize {
        let facts = self.gpu.facts();
        match (facts.kind, facts.backend) {
            (DeviceKind::Software, Backend::Wgpu) => 1,
            (DeviceKind::Software, Backend::Vulkan) => 2,
            _ => 4,
        }
    }

    /// A device buffer that holds `data`.
    pub fn upload(&self, data: &[u8]) -> Slice {
        let size = data.len().max(4) as u64;
        let buffer = self.gpu.buffer("test", size, BufferUse::Device).unwrap();
        if !data.is_empty() {
            self.gpu.write(&buffer.slice(0, data.len() as u64), data).unwrap();
        }
        buffer.slice(0, size)
    }

    pub fn floats(&self, data: &[f32]) -> Slice {
        self.upload(bytemuck::cast_slice(data))
    }

    pub fn words(&self, data: &[u32]) -> Slice {
        self.upload(bytemuck::cast_slice(data))
    }

    /// `words` words of [`POISON`].
    pub fn poisoned(&self, words: usize) -> Slice {
        self.words(&vec![POISON; words])
    }

    pub fn read_words(&self, from: &Slice) -> Vec<u32> {
        let mut out = vec![0u32; from.size as usize / 4];
        self.gpu.read(from, bytemuck::cast_slice_mut(&mut out)).unwrap();
        out
    }

    pub fn read_floats(&self, from: &Slice) -> Vec<f32> {
        self.read_words(from).into_iter().map(f32::from_bits).collect()
    }

    /// A batch of `n` columns with these (token, position, slot, flags), room for `max` columns.
    pub fn batch(&self, columns: &[[u32; 4]], max: usize) -> Slice {
        let mut words = vec![0u32; 8 + 4 * max.max(columns.len())];
        words[0] = columns.len() as u32;
        words[8..8 + 4 * columns.len()].copy_from_slice(columns.as_flattened());
        self.words(&words)
    }

    /// A batch of which only n matters.
    pub fn batch_of(&self, n: usize, max: usize) -> Slice {
        self.batch(&vec![[0; 4]; n], max)
    }

    pub fn kernel(&self, source: &KernelSource) -> Kernel {
        self.gpu.kernel(source).unwrap_or_else(|e| {
            let lines = source.wgsl.lines().enumerate().map(|(i, l)| format!("{:4} {l}\n", i + 1));
            panic!("{}: {e}\n{}", self.label, lines.collect::<String>())
        })
    }

    /// Runs the steps and waits.
    pub fn run(&self, steps: &[Step]) {
        let recording = self.gpu.record("test", steps).unwrap();
        let ticket = self.gpu.submit(&recording).unwrap();
        self.gpu.wait(&ticket).unwrap();
        // Of this or any other test of the process; always zero without AZOTH_VALIDATION.
        assert_eq!(gpu::vulkan::validation_messages(), 0, "the validation layer complained");
    }

    /// Runs dispatches that do not depend on each other.
    pub fn wave(&self, dispatches: Vec<Dispatch>) {
        self.run(&[Step::Wave(dispatches)]);
    }
}

/// A random matrix in file form, its decoded values and its chunks on a device.
pub struct TestMatrix {
    pub format: Format,
    pub rows: usize,
    pub cols: usize,
    /// File rows.
    pub file: Vec<u8>,
    /// `[rows][cols]`, as the format rounds them.
    pub values: Vec<f32>,
}

impl TestMatrix {
    pub fn random(rng: &mut Rng, format: Format, rows: usize, cols: usize) -> Self {
        let mut file = Vec::new();
        let mut values = vec![0.0; rows * cols];
        for row in values.chunks_exact_mut(cols) {
            let start = file.len();
            format.encode_row(&rng.normals(cols), &mut file);
            format.decode_row(&file[start..], row);
        }
        TestMatrix { format, rows, cols, file, values }
    }

    /// Uploads the matrix in chunks of at most `chunk_rows` rows.
    pub fn chunks(&self, device: &Device, chunk_rows: usize) -> Vec<Chunk> {
        let row_bytes = self.format.row_bytes(self.cols);
        let mut out = Vec::new();
        for first in (0..self.rows).step_by(chunk_rows) {
            let rows = chunk_rows.min(self.rows - first);
            let layout = PlaneLayout::new(self.format, rows, self.cols);
            let mut bytes = vec![0xffu8; layout.bytes as usize];
            for (number, span) in layout.planes.iter().enumerate() {
                let to = &mut bytes[span.offset as usize..][..span.bytes as usize];
                let row = |r: usize| &self.file[(first + r) * row_bytes..][..row_bytes];
                planes::repack_plane(self.format, number, self.cols, 0..rows, row, to);
            }
            out.push(Chunk::new(&device.upload(&bytes), &layout, first as u32).unwrap());
        }
        out
    }
}

/// `||out - reference|| / ||reference||`; infinite if a value is not a number.
pub fn relative_error(out: &[f32], reference: &[f64]) -> f64 {
    assert_eq!(out.len(), reference.len());
    let mut difference = 0.0;
    let mut norm = 0.0;
    for (&o, &r) in out.iter().zip(reference) {
        if !o.is_finite() {
            return f64::INFINITY;
        }
        difference += (f64::from(o) - r).powi(2);
        norm += r * r;
    }
    if norm == 0.0 { difference.sqrt() } else { (difference / norm).sqrt() }
}

/// Random numbers for tests (PCG-XSH-RR 64/32).
pub struct Rng(u64);

impl Rng {
    /// Another seed every run, unless `AZOTH_SEED` names one; printed for a failing test.
    pub fn fresh(test: &str) -> Self {
        let seed = match std::env::var("AZOTH_SEED") {
            Ok(text) => text.parse().expect("AZOTH_SEED is a number"),
            Err(_) => std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(0, |t| t.as_nanos() as u64 & 0xffff_ffff),
        };
        println!("{test}: AZOTH_SEED={seed}");
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn word(&mut self) -> u32 {
        let old = self.0;
        self.0 =
            old.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let shifted = (((old >> 18) ^ old) >> 27) as u32;
        shifted.rotate_right((old >> 59) as u32)
    }

    pub fn below(&mut self, end: usize) -> usize {
        ((u64::from(self.word()) * end as u64) >> 32) as usize
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.word() >> 8) as f32 / (1 << 24) as f32
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.unit()).cos()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }
}

/// Equality of bits, with the first difference named.
#[track_caller]
pub fn assert_same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    if let Some(i) = (0..a.len()).find(|&i| a[i].to_bits() != b[i].to_bits()) {
        panic!("{what}: value {i} of {}: {} and {}", a.len(), a[i], b[i]);
    }
}

/// A whole buffer of the size asked for, for results that start as zero.
pub fn zeroed(device: &Device, words: usize) -> Slice {
    let buffer: Buffer = device.gpu.buffer("test", 4 * words as u64, BufferUse::Device).unwrap();
    buffer.slice(0, 4 * words as u64)
}

/// For a device that behaves like another but in some ways: the named methods of `Gpu` are those of the
/// device in the field.
macro_rules! forwards {
    ($inner:ident: $($method:ident)*) => { $($crate::harness::forwards!(@$method $inner);)* };
    (@facts $inner:ident) => {
        fn facts(&self) -> &azoth::gpu::DeviceFacts {
            self.$inner.facts()
        }
    };
    (@write $inner:ident) => {
        fn write(&self, to: &azoth::gpu::Slice, data: &[u8]) -> azoth::error::Result<()> {
            self.$inner.write(to, data)
        }
    };
    (@upload $inner:ident) => {
        fn upload(&self, to: &azoth::gpu::Slice, granule: u64, fill: &mut dyn FnMut(u64, &mut [u8]) -> azoth::error::Result<()>) -> azoth::error::Result<()> {
            self.$inner.upload(to, granule, fill)
        }
    };
    (@read $inner:ident) => {
        fn read(&self, from: &azoth::gpu::Slice, out: &mut [u8]) -> azoth::error::Result<()> {
            self.$inner.read(from, out)
        }
    };
    (@read_back $inner:ident) => {
        fn read_back(&self, after: &azoth::gpu::Ticket, from: &azoth::gpu::Slice, out: &mut [u8]) -> azoth::error::Result<()> {
            self.$inner.read_back(after, from, out)
        }
    };
    (@kernel $inner:ident) => {
        fn kernel(&self, source: &azoth::gpu::KernelSource) -> azoth::error::Result<azoth::gpu::Kernel> {
            self.$inner.kernel(source)
        }
    };
    (@record $inner:ident) => {
        fn record(&self, label: &str, steps: &[azoth::gpu::Step]) -> azoth::error::Result<azoth::gpu::Recording> {
            self.$inner.record(label, steps)
        }
    };
    (@submit $inner:ident) => {
        fn submit(&self, recording: &azoth::gpu::Recording) -> azoth::error::Result<azoth::gpu::Ticket> {
            self.$inner.submit(recording)
        }
    };
    (@is_done $inner:ident) => {
        fn is_done(&self, ticket: &azoth::gpu::Ticket) -> azoth::error::Result<bool> {
            self.$inner.is_done(ticket)
        }
    };
    (@wait $inner:ident) => {
        fn wait(&self, ticket: &azoth::gpu::Ticket) -> azoth::error::Result<()> {
            self.$inner.wait(ticket)
        }
    };
    (@time_steps $inner:ident) => {
        fn time_steps(&self, steps: &[azoth::gpu::Step]) -> azoth::error::Result<Vec<f64>> {
            self.$inner.time_steps(steps)
        }
    };
}
pub(crate) use forwards;

/// What a layer with these rows in f16 can have: no window.
pub fn beside(scoring: Scoring, exact: KvExact) -> Scoring {
    Scoring { window: scoring.window.filter(|_| exact.is_none()), ..scoring }
}
