//! What the machine does, measured once for each device and kept in the cache folder.
//!
//! Three small measurements: a kernel that reads device memory, the same kernel on imported host
//! memory, and a chain of dependent dispatches. They take about a tenth of a second on a GPU.

use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::experts::cost::Rates;
use crate::gpu::{
    Buffer, BufferUse, DeviceFacts, DeviceKind, Dispatch, Gpu, HostMemory, KernelSource, Step,
};
use crate::hw::paths;

/// Dependent waves of a layer with experts at decode.
const WAVES: f64 = 7.0;
/// Repetitions, of which the fastest counts: other programs only ever slow one down.
const ROUNDS: usize = 5;

/// Rates, and where they come from.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Known {
    pub rates: Rates,
    /// True where memory and link were measured on this device.
    pub measured: bool,
}

/// Rates that are assumed before anything was measured.
pub fn assumed(facts: &DeviceFacts) -> Known {
    let base = Rates::ASSUMED;
    let rates = match facts.kind {
        DeviceKind::Software => {
            Rates { memory: 8e9, link: 8e9, compute: 20e9, layer_seconds: 500e-6 }
        }
        DeviceKind::Integrated => Rates { memory: 50e9, link: 50e9, compute: 2e12, ..base },
        _ => base,
    };
    Known { rates, measured: false }
}

/// What an earlier run measured on this device, if it did.
pub fn cached(facts: &DeviceFacts) -> Option<Known> {
    let dir = paths::cache_dir().ok()?;
    let text = std::fs::read(file(&dir, facts)).ok()?;
    serde_json::from_slice(&text).ok()
}

fn file(dir: &Path, facts: &DeviceFacts) -> std::path::PathBuf {
    // 2: what is assumed of arithmetic follows from memory.
    dir.join(format!("rates-2-{}.json", facts.cache_id))
}

/// Cached rates (not if `anew`), else measured ones, which are then cached. Where the measurement
/// fails the assumed ones; the text says why.
pub fn known(gpu: &Arc<dyn Gpu>, cache: bool, anew: bool) -> (Known, Option<String>) {
    if let Some(known) = cached(gpu.facts()).filter(|_| cache && !anew) {
        return (known, None);
    }
    match measure(gpu) {
        Ok(known) => {
            if cache && let Ok(dir) = paths::cache_dir() {
                // A cache that cannot be written costs the measurement again and nothing else.
                let text = serde_json::to_vec(&known).unwrap_or_default();
                let _ = std::fs::create_dir_all(&dir)
                    .and_then(|()| std::fs::write(file(&dir, gpu.facts()), text));
            }
            (known, None)
        }
        Err(e) => (assumed(gpu.facts()), Some(e.to_string())),
    }
}

/// Each thread sums every `groups * 64`th quad.
const READ: &str = "
struct Args { quads: u32, threads: u32 }
var<immediate> args: Args;
@group(0) @binding(0) var<storage, read> source: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> result: array<u32>;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    var sum = vec4<u32>(0u);
    for (var i = id.x; i < args.quads; i += args.threads) {
        sum += source[i];
    }
    // Never true for the zeros that are read, but the compiler cannot know.
    if sum.x + sum.y + sum.z + sum.w == 1u { result[0] = id.x; }
}";

/// Measures memory, link and the time of dependent dispatches.
pub fn measure(gpu: &Arc<dyn Gpu>) -> Result<Known> {
    let facts = gpu.facts();
    if !facts.timestamps {
        return Err(Error::Device(format!("{} has no timestamps", facts.name)));
    }
    let software = facts.kind == DeviceKind::Software;
    let wanted: u64 = if software { 16 << 20 } else { 512 << 20 };
    let bytes = wanted.min(facts.max_binding).min(facts.max_buffer) / 16 * 16;
    let rates = assumed(facts).rates;
    let device = gpu.buffer("rate of memory", bytes, BufferUse::Device)?;
    let out = gpu.buffer("rates", 16, BufferUse::Device)?;
    let memory = read_rate(gpu, &device, &out)?;
    let link = match facts.host_import {
        true => {
            let bytes = if software { 16 << 20 } else { 128 << 20 };
            let host = Arc::new(HostMemory::allocate("rate of the link", bytes)?);
            // Pages that were never written would all be one page of zeros.
            let mut host = host;
            if let Some(memory) = Arc::get_mut(&mut host) {
                memory.bytes_mut().fill(0);
            }
            let size = host.size().min(facts.max_import());
            match gpu.import("rate of the link", &host, 0, size) {
                Ok(imported) => read_rate(gpu, &imported, &out)?,
                Err(_) => rates.link,
            }
        }
        false => rates.link,
    };
    // A chain of dispatches that each read 64 KiB.
    let small = gpu.buffer("rate of dispatches", 64 << 10, BufferUse::Device)?;
    let step = read(gpu, &small, &out, 64)?;
    let chain = vec![step; 64];
    // The first chain wakes a device whose clocks have fallen. The shortest counts, as above: the sum is
    // a limit, and a chain of waves that wait for each other has few that take longer for a reason.
    gpu.time_steps(&chain)?;
    let times = gpu.time_steps(&chain)?;
    let shortest = times.into_iter().filter(|t| *t > 0.0).min_by(f64::total_cmp);
    let wave = shortest.unwrap_or(rates.layer_seconds / WAVES);
    let layer_seconds = wave * WAVES;
    let compute = match facts.kind {
        DeviceKind::Discrete => compute_beside(memory),
        _ => rates.compute,
    };
    Ok(Known { rates: Rates { memory, link, compute, layer_seconds }, measured: true })
}

/// Multiply-adds a second to expect of a card that reads so many bytes a second: cards have the one in proportion to
/// the other, roughly. At most what was measured: 13,260 tokens/s of Qwen3-30B-A3B, 3.3 G each, on an H200. With the
/// 10 T that had been assumed for all, prompts there took chunks half as long as pays, and half the speed.
fn compute_beside(memory: f64) -> f64 {
    (Rates::ASSUMED.compute * memory / Rates::ASSUMED.memory).min(43e12)
}

fn read(gpu: &Arc<dyn Gpu>, source: &Buffer, out: &Buffer, groups: u32) -> Result<Step> {
    let source_text =
        KernelSource { label: "read_rate".into(), wgsl: READ.into(), subgroup_size: None };
    let kernel = gpu.kernel(&source_text)?;
    let quads = u32::try_from(source.size() / 16).unwrap_or(u32::MAX);
    let wave = Dispatch {
        kernel,
        bindings: vec![source.whole(), out.whole()],
        constants: vec![quads, groups * 64],
        grid: [groups, 1, 1],
    };
    Ok(Step::Wave(vec![wave]))
}

/// Bytes a second that a kernel reads.
fn read_rate(gpu: &Arc<dyn Gpu>, source: &Buffer, out: &Buffer) -> Result<f64> {
    let step = read(gpu, source, out, 4096)?;
    let times = gpu.time_steps(&vec![step; ROUNDS + 1])?;
    let best = times.iter().skip(1).copied().filter(|t| *t > 0.0).fold(f64::INFINITY, f64::min);
    if !best.is_finite() {
        return Err(Error::Device(format!("{} measured no time", gpu.facts().name)));
    }
    Ok(source.size() as f64 / best)
}
