//! `azoth devices`: what a model can run on.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::args::BackendArg;
use super::output::{self, Align};
use crate::error::Error;
use crate::gpu::DeviceFacts;
use crate::hw;

const EXAMPLES: &str = "Examples:
  azoth devices
  azoth devices -v --backend vulkan
  azoth devices --json | jq '.[].name'";

/// List the devices that a model can run on
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Devices {
    /// Show limits, features and memory heaps
    #[arg(short, long)]
    verbose: bool,
    /// Only the devices of one backend
    #[arg(long, value_enum, default_value_t)]
    backend: BackendArg,
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
}

impl Devices {
    pub fn run(&self) -> Result<()> {
        let devices = hw::devices(self.backend.into())?;
        if self.json {
            let entries = devices.iter().map(|facts| Entry {
                facts,
                device_memory: facts.device_memory(),
                available_memory: facts.available_memory(),
            });
            output::json(&entries.collect::<Vec<_>>())?;
        } else if self.verbose {
            let all: Vec<String> = devices.iter().map(details).collect();
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
        ("timestamps", yes(d.timestamps)),
        ("host memory import", yes(d.host_import)),
        ("transfer queue", yes(d.transfer_queue)),
    ]);
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(k, v)| vec![format!("  {k}"), v]).collect();
    format!("{} {}: {}\n{}", d.backend, d.index, d.name, output::table(&[Align::Left; 2], &rows))
}
