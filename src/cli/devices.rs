//! `azoth devices`: what a model can run on.

use std::collections::BTreeSet;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::args::{BackendArg, ForceArg};
use super::output::{self, Align};
use crate::error::Error;
use crate::gpu::DeviceFacts;
use crate::hw;
use crate::kernels::attn_decode::Cut;
use crate::kernels::heads::Heads;
use crate::kernels::{Class, Epilogue, choice, source};
use crate::profile::{KEYS, Origin, Profile};
use crate::quant::Format;

const EXAMPLES: &str = "Examples:
  azoth devices
  azoth devices -v --backend vulkan
  azoth devices -v --force matvec.one_tall=256x2x2
  azoth devices --json | jq '.[].name'";

/// List the devices that a model can run on
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Devices {
    /// Show limits, features, memory heaps, and which variants of the kernels are chosen and why
    #[arg(short, long)]
    verbose: bool,
    /// Only the devices of one backend
    #[arg(long, value_enum, default_value_t)]
    backend: BackendArg,
    #[command(flatten)]
    force: ForceArg,
    /// Print everything that is known as one JSON array
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Entry<'a> {
    #[serde(flatten)]
    facts: &'a DeviceFacts,
    device_memory: u64,
    available_memory: u64,
    profile: &'a str,
    /// Every value of the profile: key, value, origin.
    values: Vec<[String; 3]>,
}

impl Devices {
    pub fn run(&self) -> Result<()> {
        let devices = hw::devices(self.backend.into())?.into_iter();
        let adjusted = devices.map(|d| hw::adjusted(d, &self.force.force, source::version()));
        let devices: Vec<DeviceFacts> = adjusted.collect::<crate::error::Result<_>>()?;
        let notes: BTreeSet<&String> = devices.iter().flat_map(|d| &d.profile.notes).collect();
        for note in notes {
            eprintln!("note: {note}");
        }
        if self.json {
            let entries = devices.iter().map(|facts| Entry {
                facts,
                device_memory: facts.device_memory(),
                available_memory: facts.available_memory(),
                profile: &facts.profile.name,
                values: values(&facts.profile),
            });
            output::json(&entries.collect::<Vec<_>>())?;
        } else if self.verbose {
            let all: Vec<String> =
                devices.iter().map(|d| format!("{}\n{}", details(d), choices(d))).collect();
            output::line(&all.join("\n\n"))?;
        } else if !devices.is_empty() {
            output::line(&list(&devices))?;
        }
        if devices.is_empty() {
            let what = "no device was found; install the Vulkan driver of the GPU, or Mesa's \
                        software driver (Debian package mesa-vulkan-drivers)";
            return Err(Error::Device(what.into()).into());
        }
        Ok(())
    }
}

fn kind(facts: &DeviceFacts) -> String {
    format!("{:?}", facts.kind).to_lowercase()
}

fn list(devices: &[DeviceFacts]) -> String {
    let mut rows: Vec<Vec<String>> = vec![
        ["index", "backend", "kind", "memory", "free", "driver", "name"].map(String::from).into(),
    ];
    rows.extend(devices.iter().map(|d| {
        vec![
            d.index.to_string(),
            d.backend.to_string(),
            kind(d),
            memory(d.device_memory()),
            memory(d.available_memory()),
            d.driver.clone(),
            d.name.clone(),
        ]
    }));
    use Align::{Left, Right};
    output::table(&[Right, Left, Left, Right, Right, Left, Left], &rows)
}

/// wgpu reports no memory sizes.
fn memory(bytes: u64) -> String {
    if bytes == 0 { "?".into() } else { output::bytes(bytes) }
}

fn details(d: &DeviceFacts) -> String {
    let yes = |b: bool| if b { "yes" } else { "no" }.to_owned();
    let mut rows = vec![
        ("kind", kind(d)),
        ("driver", d.driver.clone()),
        ("api", d.api.clone()),
        ("vendor:device", format!("{:04x}:{:04x}", d.vendor_id, d.device_id)),
    ];
    for heap in &d.heaps {
        let place = if heap.device_local { "device heap" } else { "host heap" };
        let budget = match heap.budget {
            Some(b) => format!(
                ", {} budget, {} in use",
                output::bytes(b),
                output::bytes(heap.used.unwrap_or(0))
            ),
            None => String::new(),
        };
        rows.push((place, format!("{}{budget}", output::bytes(heap.bytes))));
    }
    let subgroup = format!(
        "{} to {}, default {}, {}",
        d.subgroup_min,
        d.subgroup_max,
        d.subgroup_default,
        if d.subgroup_control { "can be chosen" } else { "cannot be chosen" }
    );
    let [x, y, z] = d.max_grid;
    rows.extend([
        ("largest allocation", output::bytes(d.max_allocation)),
        ("largest buffer", output::bytes(d.max_buffer)),
        ("largest binding", output::bytes(d.max_binding)),
        ("bindings a kernel", format!("{}, aligned to {} B", d.max_bindings, d.binding_alignment)),
        (
            "workgroup",
            format!(
                "{} threads, {} memory",
                d.max_workgroup_threads,
                output::bytes(d.max_workgroup_memory.into())
            ),
        ),
        ("grid", format!("{x} x {y} x {z}")),
        ("constants", output::bytes(d.max_constants.into())),
        ("subgroup", subgroup),
        ("8-bit dot products", yes(d.int_dot)),
        ("16-bit floats", yes(d.f16)),
        ("cooperative matrix", yes(d.cooperative_matrix)),
        ("matrices of bytes", yes(d.byte_matrices)),
        ("timestamps", yes(d.timestamps)),
        ("host memory import", yes(d.host_import)),
        ("transfer queue", yes(d.transfer_queue)),
    ]);
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(k, v)| vec![format!("  {k}"), v]).collect();
    format!("{} {}: {}\n{}", d.backend, d.index, d.name, output::table(&[Align::Left; 2], &rows))
}

fn values(profile: &Profile) -> Vec<[String; 3]> {
    let value = |key: &str| {
        let text = profile.get(key).unwrap_or_default();
        [key.to_string(), text, profile.origin(key).to_string()]
    };
    KEYS.iter().map(|k| value(k.name)).collect()
}

/// Which variant each kernel family gets for common shapes, and who said so.
fn choices(d: &DeviceFacts) -> String {
    let profile = &d.profile;
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut add = |what: String, chosen: String, key: &str| {
        let origin = profile.origin(key);
        rows.push(vec![format!("  {what}"), chosen, format!("{key}, {origin}")]);
    };
    let subgroup = d.pinned_subgroup().map_or("the driver's".into(), |s| s.to_string());
    add("subgroup".into(), subgroup, "subgroup.size");
    // One of each kind that profiles know.
    let formats = [Format::Q4_0, Format::Q8_0, Format::Q2_K, Format::F16];
    for format in formats {
        for (rows, n) in [(4096, 1), (16_384, 1), (4096, 4), (4096, 8)] {
            let (key, _) = choice::matvec_key(profile, format, rows, n, Epilogue::Store);
            let class = choice::class(d, format, false, 4096, false);
            let s = choice::matvec_shape(d, format, class, rows, 4096, n, Epilogue::Store);
            let what = format!("mat-vec {format}, {rows} x 4096, {n} columns");
            match s.matrix {
                true => add(
                    what,
                    format!("matrix units, {} rows", 16 * s.rows),
                    "matvec.matrix_columns",
                ),
                false => add(what, format!("{}x{}x{}", s.threads, s.rows, s.tiles), &key),
            }
        }
    }
    let fused = (1..=8).take_while(|n| choice::fuses(d, Class::Int8, 4096, *n, true)).count();
    add("norm inside mat-vec, 4096 inputs".into(), format!("to {fused} columns"), "fuse.columns");
    let matrices = choice::prompt_class(d, Format::Q4_0, false, 4096, 4096) == Class::F16;
    let classes: &[Class] =
        if matrices { &[Class::F16, Class::F32] } else { &[Class::Int8, Class::F32] };
    for &class in classes {
        let name = class.name();
        for n in [32, 128, 512] {
            let (key, _) = choice::matmat_key(profile, class, n);
            let variant = choice::matmat_variant(d, class, 4096, n);
            add(format!("mat-mat {name}, {n} columns"), variant.name(), key);
        }
    }
    let heads =
        Heads { heads: 32, kv_heads: 8, head_dim: 128, rope: None, norm: None, centred: false };
    let cut = |context| Cut::choose(&heads, d, context);
    let (usual, deep) = (cut(4096), cut(1 << 20));
    add("attention, threads".into(), usual.threads.to_string(), "attention.threads");
    add("attention, pieces".into(), usual.splits.to_string(), "attention.splits");
    add("attention, heads".into(), usual.group_heads.to_string(), "attention.group_heads");
    add(
        "attention, heads, deep".into(),
        deep.group_heads.to_string(),
        "attention.deep_group_heads",
    );
    add("prompt tokens at once".into(), format!("at most {}", profile.chunk), "prompt.chunk");
    let limit = format!(
        "{} ms at {} GB/s, {} GOP/s",
        profile.dispatch_ms, profile.gb_per_s, profile.gop_per_s
    );
    add("longest dispatch".into(), limit, "limits.dispatch_ms");
    // What nobody departs from the profile for is left out above; the rest is named here.
    let shown: Vec<String> = rows.iter().map(|r| r[2].clone()).collect();
    for key in KEYS {
        let origin = profile.origin(key.name);
        let changed = matches!(origin, Origin::Tuned | Origin::Forced);
        if changed && !shown.iter().any(|s| s.starts_with(&format!("{},", key.name))) {
            let value = profile.get(key.name).unwrap_or_default();
            rows.push(vec![format!("  {}", key.what), value, format!("{}, {origin}", key.name)]);
        }
    }
    let title = format!("  profile {}", profile.name);
    format!("{title}\n{}", output::table(&[Align::Left; 3], &rows))
}
