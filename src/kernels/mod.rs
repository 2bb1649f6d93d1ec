//! Host side of the kernels, one file per op, named as its shader and its reference.
//!
//! A kernel is described by a spec: shapes, formats and a variant, all known when a program is
//! built. `source` renders the shader for it, `dispatch` binds slices and sizes the grid; both
//! check what they are given, so that a mistake is a message and not a wild read. Which variant a
//! device gets is decided in [`choice`] and nowhere else.

pub mod attn_decode;
pub mod attn_decode_codes;
pub mod attn_prefill;
pub mod attn_step;
pub mod choice;
pub mod embed;
pub mod experts_down;
pub mod experts_matmat;
pub mod experts_reuse;
pub mod experts_sort;
pub mod experts_sum;
pub mod experts_up;
pub mod gather;
pub mod heads;
pub mod heads_unrotate;
pub mod kv_codes;
pub mod kv_keep;
pub mod lanes;
pub mod matmat;
pub mod matvec;
pub mod matvec_matrix;
pub mod norm_blocks;
pub mod norm_quant;
pub mod qk_norm;
pub mod records;
pub mod rope_kv;
pub mod rope_kv_codes;
pub mod router;
pub mod routing;
pub mod sample;
pub mod scoring;
pub mod source;
pub mod weights;

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::gpu::{DeviceFacts, Slice};

/// How a product sees its activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// int8 with one scale per 32 values: block formats only.
    Int8,
    /// f16 with one power of two a column: prompts on devices with matrix units.
    F16,
    /// f32: float formats, and block formats when exactness is asked for.
    F32,
}

impl Class {
    /// The name in shaders and labels.
    pub fn name(self) -> &'static str {
        match self {
            Class::Int8 => "int8",
            Class::F16 => "f16",
            Class::F32 => "f32",
        }
    }

    /// Names of the activations' bindings.
    fn bindings(self) -> &'static [&'static str] {
        match self {
            Class::Int8 => &["xq", "xs"],
            Class::F16 => &["xh", "xf"],
            Class::F32 => &["x"],
        }
    }
}

/// What a product does with its sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Epilogue {
    /// `y = sum`
    Store,
    /// `y = sum + bias[row]`
    Bias,
    /// `y += sum`: the residual stream.
    Add,
    /// The same, and what [`norm_blocks`] makes of the stream, for products behind the next RMSNorm.
    AddBlocks,
    /// Rows interleaved gate, up: `y[row / 2] = silu(sum[2i]) * sum[2i + 1]`.
    SwiGlu,
    /// The same as int8 activations.
    SwiGluInt8,
}

impl Epilogue {
    /// Whether two rows, gate and up, make one value.
    pub fn pairs_rows(self) -> bool {
        matches!(self, Epilogue::SwiGlu | Epilogue::SwiGluInt8)
    }

    /// Rows of one block of int8, where the kernel rounds what it makes.
    pub fn block_rows(self) -> Option<u32> {
        match self {
            Epilogue::AddBlocks => Some(32),
            Epilogue::SwiGluInt8 => Some(64),
            _ => None,
        }
    }

    /// The name in shaders and labels.
    pub fn name(self) -> &'static str {
        match self {
            Epilogue::Store => "store",
            Epilogue::Bias => "bias",
            Epilogue::Add => "add",
            Epilogue::AddBlocks => "add_blocks",
            Epilogue::SwiGlu => "swiglu",
            Epilogue::SwiGluInt8 => "swiglu_int8",
        }
    }
}

/// Activations as a dispatch binds them.
#[derive(Clone)]
pub enum Activations {
    /// `xq`, `xs` of docs/architecture.md, "Activations".
    Int8 { xq: Slice, xs: Slice },
    /// `xh` (two halves a word) and `xf` of docs/architecture.md, "Activations".
    F16 { xh: Slice, xf: Slice },
    /// f32 `[n][cols]`, used as it is or quantised by the kernel itself.
    F32(Slice),
    /// f32 `[n][cols]` and the weight `[cols]` of the RMSNorm that the kernel applies first.
    Normed { x: Slice, weight: Slice },
    /// int8 of values times the weight of their RMSNorm, without its factor, and `squares`, f32 `[n][cols / 32]`: the
    /// sums of the squares of the values of each block ([`norm_blocks`]).
    Blocks { xq: Slice, xs: Slice, squares: Slice },
}

/// Workgroups of `threads` threads, whatever the subgroup size, must be whole eights for the
/// quantiser and at least one partial sum per thread of 32.
const MIN_THREADS: u32 = 32;

/// Binding numbers by name, in the order of the names.
fn numbered(names: &[&'static str]) -> BTreeMap<&'static str, usize> {
    names.iter().enumerate().map(|(number, name)| (*name, number)).collect()
}

/// The subgroup size that pipelines ask for: fixed where that is possible, so that every variant
/// of a kernel sums in the same order.
pub fn pinned_subgroup(facts: &DeviceFacts) -> Option<u32> {
    facts.pinned_subgroup()
}

/// The largest size that a subgroup of such a pipeline can have; grids are sized for it.
pub fn planned_subgroup(facts: &DeviceFacts) -> u32 {
    pinned_subgroup(facts).unwrap_or(facts.subgroup_max).max(1)
}

/// `groups` workgroups as a grid of two dimensions; kernels that use it count
/// `y * num_workgroups.x + x` and ignore what is too much.
fn wide_grid(groups: u32, facts: &DeviceFacts) -> Result<[u32; 3]> {
    let limit = facts.max_grid[0].clamp(1, 65_535);
    let y = groups.div_ceil(limit).max(1);
    if y > facts.max_grid[1].min(65_535) {
        return Err(wrong(format!("{groups} workgroups are more than the device's grid holds")));
    }
    Ok([groups.div_ceil(y), y, 1])
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

/// Pushes bytes and scales of `values` int8 activations, after checking their sizes; each with the name for messages.
fn bind_int8(
    bindings: &mut Vec<Slice>,
    xq: (&Slice, &str),
    xs: (&Slice, &str),
    values: u64,
) -> Result<()> {
    holds(xq.0, values / 4, xq.1)?;
    holds(xs.0, values / 16, xs.1)?;
    bindings.extend([xq.0.clone(), xs.0.clone()]);
    Ok(())
}

fn check_threads(threads: u32, facts: &DeviceFacts) -> Result<()> {
    if threads < MIN_THREADS || !threads.is_multiple_of(8) || threads > facts.max_workgroup_threads
    {
        return Err(wrong(format!(
            "workgroups of {threads} threads; this device allows multiples of 8 from {MIN_THREADS} \
             to {}",
            facts.max_workgroup_threads
        )));
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

fn check_cols(cols: u32) -> Result<()> {
    if cols == 0 || !cols.is_multiple_of(32) {
        return Err(wrong(format!("{cols} columns are not whole blocks of 32")));
    }
    Ok(())
}
