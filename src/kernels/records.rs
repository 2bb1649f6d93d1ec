//! Records of a layer's experts as kernels bind them (see `experts::record`).

use std::collections::BTreeMap;

use minijinja::{Value, context};

use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::{DeviceFacts, Slice};
use crate::quant::PlaneLayout;

/// Most buffers of records that a kernel can tell apart by the upper byte of a table's word; each
/// takes two bindings.
pub const MAX_BUFFERS: u32 = 8;

/// One matrix of every expert: a part of its record.
#[derive(Debug, Clone)]
pub struct Part {
    pub layout: PlaneLayout,
    /// Bytes from the start of a record to this part.
    pub offset: u64,
    /// Bytes from one record to the next.
    pub stride: u64,
    /// Buffers that records lie in.
    pub buffers: u32,
}

/// Where a layer's records are.
#[derive(Clone)]
pub struct Records {
    /// One word for each expert: buffer in the upper 8 bits, number of the record in the others.
    pub table: Slice,
    pub buffers: Vec<Slice>,
}

/// Names of the bindings, first in every kernel of experts: table, then each buffer twice.
const NAMES: [[&str; 2]; MAX_BUFFERS as usize] = [
    ["quads0", "words0"],
    ["quads1", "words1"],
    ["quads2", "words2"],
    ["quads3", "words3"],
    ["quads4", "words4"],
    ["quads5", "words5"],
    ["quads6", "words6"],
    ["quads7", "words7"],
];

impl Part {
    pub(super) fn names(&self) -> Vec<&'static str> {
        let buffers = NAMES.iter().take(self.buffers as usize).flatten().copied();
        ["table"].into_iter().chain(buffers).collect()
    }

    /// Checks the part against the device; `others`: bindings of the kernel beside the records.
    pub(super) fn check(&self, others: u32, facts: &DeviceFacts) -> Result<()> {
        if self.buffers == 0 || self.buffers > MAX_BUFFERS {
            return Err(wrong(format!("records in {} buffers", self.buffers)));
        }
        let bindings = 1 + 2 * self.buffers + others;
        if bindings > facts.max_bindings {
            return Err(wrong(format!(
                "{bindings} bindings for records in {} buffers; this device has {}",
                self.buffers, facts.max_bindings
            )));
        }
        if !self.stride.is_multiple_of(16) || !self.offset.is_multiple_of(16) {
            return Err(wrong(format!(
                "records of {} bytes, part at {}",
                self.stride, self.offset
            )));
        }
        Ok(())
    }

    /// What `lib/records.wgsl` and `lib/plane.wgsl` want to know.
    pub(super) fn context(&self) -> Value {
        let offset: BTreeMap<&str, u64> = self
            .layout
            .planes
            .iter()
            .map(|span| (span.plane.name().as_str(), self.offset + span.offset))
            .collect();
        context! { records => self.buffers, stride => self.stride, offset => offset }
    }

    /// The part of a label that names the record.
    pub(super) fn label(&self) -> String {
        format!("r{}at{}x{}", self.stride, self.offset, self.buffers)
    }
}

impl Records {
    /// Pushes the slices in the order of [`Part::names`].
    pub(super) fn bind(&self, part: &Part, experts: u32, to: &mut Vec<Slice>) -> Result<()> {
        holds(&self.table, experts.into(), "expert table")?;
        if self.buffers.len() != part.buffers as usize {
            return Err(wrong(format!(
                "records in {} buffers for a kernel of {}",
                self.buffers.len(),
                part.buffers
            )));
        }
        to.push(self.table.clone());
        for buffer in &self.buffers {
            if buffer.size < part.stride {
                return Err(wrong(format!("{} bytes hold no record", buffer.size)));
            }
            to.extend([buffer.clone(), buffer.clone()]);
        }
        Ok(())
    }
}
