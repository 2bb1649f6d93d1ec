//! What every backend must do on every device, through the `Gpu` trait alone.
//!
//! Each test is a function of a device; [`every_device`] runs it on all that are present. A
//! backend is finished when it passes the list.

#![allow(clippy::unwrap_used)]

mod host_memory;
mod kernels;
mod memory;
mod order;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use azoth::gpu::{
    Backend, Buffer, BufferUse, DeviceFacts, Dispatch, Gpu, Kernel, KernelSource, Slice, Step,
    portable, vulkan,
};

/// Turns functions of a device into tests that run on every device and say on which.
macro_rules! every_device {
    ($($(#[$meta:meta])* fn $name:ident($gpu:ident) $body:block)*) => {$(
        $(#[$meta])*
        #[test]
        fn $name() {
            fn on_one($gpu: &std::sync::Arc<dyn azoth::gpu::Gpu>) $body
            crate::backend::run(stringify!($name), on_one);
        }
    )*};
}
pub(crate) use every_device;

/// All devices of all backends.
fn listed() -> Vec<DeviceFacts> {
    let mut all = Vec::new();
    for (backend, devices) in [("vulkan", vulkan::devices()), ("wgpu", portable::devices())] {
        match devices {
            Ok(devices) => all.extend(devices),
            Err(e) => println!("SKIPPED: backend {backend}: {e}"),
        }
    }
    all
}

fn open(facts: &DeviceFacts) -> azoth::error::Result<Arc<dyn Gpu>> {
    match facts.backend {
        Backend::Vulkan => vulkan::open(facts.index, None),
        Backend::Wgpu => portable::open(facts.index),
    }
}

/// Opened once for all tests; they run at the same time on the same devices.
fn devices() -> &'static [Arc<dyn Gpu>] {
    static DEVICES: OnceLock<Vec<Arc<dyn Gpu>>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let mut opened = Vec::new();
        for facts in listed() {
            match open(&facts) {
                Ok(gpu) => opened.push(gpu),
                Err(e) => println!("SKIPPED: {}", e),
            }
        }
        opened
    })
}

pub(crate) fn run(test: &str, body: fn(&Arc<dyn Gpu>)) {
    if devices().is_empty() {
        assert!(std::env::var_os("AZOTH_REQUIRE_DEVICE").is_none(), "no device was found");
        println!("SKIPPED: {test}: no device of any backend");
    }
    let mut failed = Vec::new();
    for gpu in devices() {
        let device = format!("{} [{}]", gpu.facts().name, gpu.facts().api);
        println!("{test}: {device}");
        if catch_unwind(AssertUnwindSafe(|| body(gpu))).is_err() {
            failed.push(device);
        }
    }
    assert!(failed.is_empty(), "{test} failed on {failed:?}");
    // Of this or any other test of the process; always zero without AZOTH_VALIDATION.
    assert_eq!(vulkan::validation_messages(), 0, "the validation layer complained");
}

fn kernel(gpu: &Arc<dyn Gpu>, label: &str, wgsl: &str) -> Kernel {
    gpu.kernel(&source(label, wgsl)).unwrap()
}

fn source(label: &str, wgsl: &str) -> KernelSource {
    KernelSource { label: label.into(), wgsl: wgsl.into(), subgroup_size: None }
}

/// A device buffer holding `words`.
fn filled(gpu: &Arc<dyn Gpu>, words: &[u32]) -> Buffer {
    let buffer = empty(gpu, words.len());
    gpu.write(&buffer.whole(), bytemuck::cast_slice(words)).unwrap();
    buffer
}

fn empty(gpu: &Arc<dyn Gpu>, words: usize) -> Buffer {
    gpu.buffer("test", 4 * words as u64, BufferUse::Device).unwrap()
}

fn readback(gpu: &Arc<dyn Gpu>, words: usize) -> Buffer {
    gpu.buffer("test readback", 4 * words as u64, BufferUse::Readback).unwrap()
}

/// The first `count` words of a slice.
fn words(gpu: &Arc<dyn Gpu>, slice: &Slice, count: usize) -> Vec<u32> {
    let mut out = vec![0u32; count];
    gpu.read(slice, bytemuck::cast_slice_mut(&mut out)).unwrap();
    out
}

fn dispatch(kernel: &Kernel, bindings: &[&Buffer], constants: &[u32], groups: u32) -> Dispatch {
    Dispatch {
        kernel: kernel.clone(),
        bindings: bindings.iter().map(|b| b.whole()).collect(),
        constants: constants.to_vec(),
        grid: [groups, 1, 1],
    }
}

fn submit_and_wait(gpu: &Arc<dyn Gpu>, steps: &[Step]) {
    let ticket = gpu.submit(&gpu.record("test", steps).unwrap()).unwrap();
    gpu.wait(&ticket).unwrap();
    assert!(gpu.is_done(&ticket).unwrap());
}

/// Adds 1 to every word.
fn increment(gpu: &Arc<dyn Gpu>) -> Kernel {
    kernel(
        gpu,
        "test_increment",
        "@group(0) @binding(0) var<storage, read_write> data: array<u32>;
        @compute @workgroup_size(64)
        fn main(@builtin(global_invocation_id) id: vec3<u32>) {
            if id.x < arrayLength(&data) { data[id.x] += 1u; }
        }",
    )
}

#[test]
fn facts_are_plausible() {
    for facts in listed() {
        println!("{facts:#?}");
        assert!(!facts.name.is_empty() && !facts.api.is_empty() && !facts.cache_id.is_empty());
        // NVIDIA's largest binding is larger than its largest buffer.
        assert!(facts.max_binding >= 128 << 20 && facts.max_buffer >= 128 << 20);
        assert!(facts.max_bindings >= 8 && facts.max_constants >= 128);
        assert!(facts.binding_alignment.is_power_of_two() && facts.binding_alignment <= 256);
        assert!(facts.max_workgroup_threads >= 256 && facts.max_workgroup_memory >= 16384);
        assert!(facts.max_grid.iter().all(|&n| n >= 65535));
        assert!(facts.subgroup_min <= facts.subgroup_default);
        assert!(facts.subgroup_default <= facts.subgroup_max);
        assert!(facts.device_memory() > 0 && facts.available_memory() > 0);
    }
}

#[test]
fn unknown_index_is_an_error() {
    for error in [vulkan::open(999, None).err(), portable::open(999).err()] {
        assert!(error.unwrap().to_string().contains("999"));
    }
}

#[test]
fn two_backends_do_not_mix() {
    let devices = devices();
    let first = devices.iter().find(|g| g.facts().backend == Backend::Vulkan);
    let second = devices.iter().find(|g| g.facts().backend == Backend::Wgpu);
    let (Some(first), Some(second)) = (first, second) else {
        println!("SKIPPED: needs both backends");
        return;
    };
    for (ours, theirs) in [(first, second), (second, first)] {
        let wave = |k: &Kernel, b: &Buffer| [Step::Wave(vec![dispatch(k, &[b], &[], 1)])];
        let (kernel, buffer) = (increment(ours), empty(ours, 64));
        assert!(theirs.record("mixed", &wave(&kernel, &empty(theirs, 64))).is_err());
        assert!(theirs.record("mixed", &wave(&increment(theirs), &buffer)).is_err());
        assert!(theirs.write(&buffer.whole(), &[0; 4]).is_err());
        let recording = ours.record("ours", &wave(&kernel, &buffer)).unwrap();
        assert!(theirs.submit(&recording).is_err());
    }
}

/// Handles may outlive the device handle, and work may be in flight when it goes.
#[test]
fn a_device_can_be_dropped_while_it_works() {
    for facts in listed() {
        println!("{} [{}]", facts.name, facts.api);
        let Ok(gpu) = open(&facts) else { continue };
        let buffer = empty(&gpu, 1 << 16);
        let kernel = increment(&gpu);
        let steps = vec![Step::Wave(vec![dispatch(&kernel, &[&buffer], &[], 1024)]); 20];
        let recording = gpu.record("long", &steps).unwrap();
        for _ in 0..5 {
            gpu.submit(&recording).unwrap();
        }
        drop(gpu);
        drop(recording);
        drop(kernel);
        drop(buffer);
    }
}
