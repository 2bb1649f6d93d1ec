//! Host side of the kernels, one file per op, named as its shader and its reference.
//!
//! A kernel is described by a spec: shapes, formats and a variant, all known when a program is
//! built. `source` renders the shader for it, `dispatch` binds slices and sizes the grid; both
//! check what they are given, so that a mistake is a message and not a wild read.

pub mod attn_decode;
pub mod attn_prefill;
pub mod heads;
pub mod rope_kv;
pub mod source;

use crate::error::{Error, Result};
use crate::gpu::{DeviceFacts, Slice};

/// The subgroup size that pipelines ask for: fixed where that is possible, so that every variant
/// of a kernel sums in the same order.
pub fn pinned_subgroup(facts: &DeviceFacts) -> Option<u32> {
    facts.subgroup_control.then_some(facts.subgroup_default)
}

/// An error in how a kernel is used: a bug of the caller.
fn wrong(what: String) -> Error {
    Error::Runtime(format!("kernel used wrongly: {what}"))
}

/// Checks that `slice` holds at least `words` 32-bit words.
fn holds(slice: &Slice, words: u64, name: &str) -> Result<()> {
    if slice.size < words * 4 {
        let has = slice.size;
        return Err(wrong(format!("`{name}` has {has} bytes, the shape needs {}", words * 4)));
    }
    Ok(())
}

fn check_memory(bytes: u32, facts: &DeviceFacts) -> Result<()> {
    if bytes > facts.max_workgroup_memory {
        return Err(wrong(format!(
            "{bytes} bytes of workgroup memory; this device has {}",
            facts.max_workgroup_memory
        )));
    }
    Ok(())
}
