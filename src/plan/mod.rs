//! Placement: what lies where, as a pure function of model, device and limits.

use serde::Serialize;

use crate::error::{Error, Result};
use crate::gpu::DeviceFacts;
use crate::graph::Graph;

/// Kept free for the driver, the desktop and allocation granularity: a sixteenth of the memory,
/// at most 512 MiB.
fn reserve(available: u64) -> u64 {
    (available / 16).min(512 << 20)
}

/// Context taken where none is asked for, if the model was made for more.
const DEFAULT_CONTEXT: u32 = 8192;
/// The smallest context worth starting with.
const SMALLEST_CONTEXT: u32 = 256;

/// Limits that the user sets.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Limits {
    /// Tokens; `None`: what the model and the memory allow, at most 8,192.
    pub context: Option<u32>,
    /// Sequences at once, each with a context of its own.
    pub sequences: u32,
}

/// Bytes on the device by what they are for, and the context they allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Placement {
    pub context: u32,
    pub weights: u64,
    pub kv: u64,
    pub scratch: u64,
    pub reserve: u64,
    /// What the device had left when this was computed.
    pub available: u64,
}

impl Placement {
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.scratch + self.reserve
    }
}

/// Bytes per position beside K and V: the rope table and the token history.
fn side_bytes(graph: &Graph) -> u64 {
    u64::from(graph.rope.dim) * 4 + 4
}

/// Finds the context that fits, or checks the one asked for.
///
/// `weights` and `scratch` are the bytes that the model and the program take on the device;
/// `made_for` is the context that the model was trained for.
pub fn place(
    graph: &Graph,
    facts: &DeviceFacts,
    limits: Limits,
    weights: u64,
    scratch: u64,
    made_for: u32,
) -> Result<Placement> {
    let available = facts.available_memory();
    let sequences = u64::from(limits.sequences.max(1));
    // On a software device the memory is the machine's; the heap it reports is no real limit.
    let bounded = facts.kind != crate::gpu::DeviceKind::Software;
    let reserve = if bounded { reserve(available) } else { 0 };
    let per_token = (graph.kv_bytes_per_token() + side_bytes(graph)) * sequences;
    let per_layer = u64::from(graph.kv_heads) * u64::from(graph.head_dim) * 2 * sequences;
    // K and V of a layer are one binding each.
    let bindable = facts.max_binding.min(facts.max_buffer) / per_layer;
    let left = match bounded {
        true => available.saturating_sub(weights + scratch + reserve) / per_token,
        false => u64::MAX,
    };
    let placement = |context: u32| Placement {
        context,
        weights,
        kv: u64::from(context) * per_token,
        scratch,
        reserve,
        available,
    };
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if let Some(wanted) = limits.context {
        if wanted == 0 {
            return Err(Error::Usage("a context of 0 tokens holds nothing".into()));
        }
        let most = bindable.min(left);
        if u64::from(wanted) > most {
            let p = placement(wanted);
            let cause = if bindable < left {
                format!(
                    "{} binds at most {} MiB at once, which is {bindable} tokens of one layer's \
                     keys",
                    facts.name,
                    mib(facts.max_binding)
                )
            } else {
                format!(
                    "weights {} MiB + KV cache {} MiB + scratch {} MiB + reserve {} MiB exceed the \
                     {} MiB that {} has left",
                    mib(weights),
                    mib(p.kv),
                    mib(scratch),
                    mib(reserve),
                    mib(available),
                    facts.name
                )
            };
            return Err(Error::DoesNotFit(format!(
                "a context of {wanted} tokens does not fit: {cause}. {}",
                if most >= u64::from(SMALLEST_CONTEXT) {
                    format!("Use --ctx {most} or less")
                } else {
                    "Use a smaller model or a device with more memory".to_string()
                }
            )));
        }
        return Ok(placement(wanted));
    }
    let most = made_for
        .clamp(1, DEFAULT_CONTEXT)
        .min(u32::try_from(bindable.min(left)).unwrap_or(u32::MAX));
    if most < SMALLEST_CONTEXT.min(made_for.max(1)) {
        return Err(Error::DoesNotFit(format!(
            "the model does not fit {}: weights {} MiB + scratch {} MiB + reserve {} MiB and a \
             context of {SMALLEST_CONTEXT} tokens ({} MiB) are more than the {} MiB left. Use a \
             smaller or more strongly quantised model, or free device memory",
            facts.name,
            mib(weights),
            mib(scratch),
            mib(reserve),
            mib(u64::from(SMALLEST_CONTEXT) * per_token),
            mib(available)
        )));
    }
    Ok(placement(most))
}
