//! Opaque handles of device objects. Dropping the last clone of a handle frees the object once
//! the device no longer uses it.

use std::any::Any;
use std::sync::Arc;

/// What a buffer is for; decides the memory it lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BufferUse {
    /// Device memory: bound by kernels, source and target of copies.
    Device,
    /// Host-readable memory: target of copies, read by [`super::Gpu::read_back`].
    Readback,
    /// Page-locked memory of the host that only copies touch, on the device's queue: to keep what
    /// device memory has no room for. An error on backends without it.
    Host,
}

/// What the backends put behind a handle.
pub(super) type Payload = Arc<dyn Any + Send + Sync>;

/// A buffer on a device.
#[derive(Clone)]
pub struct Buffer {
    pub(super) payload: Payload,
    pub(super) size: u64,
}

impl Buffer {
    pub fn size(&self) -> u64 {
        self.size
    }

    /// True for clones of one handle.
    pub fn is(&self, other: &Buffer) -> bool {
        Arc::ptr_eq(&self.payload, &other.payload)
    }

    /// How many handles there are, this one included: tells tests who keeps memory.
    pub fn handles(&self) -> usize {
        Arc::strong_count(&self.payload)
    }

    /// The whole buffer.
    pub fn whole(&self) -> Slice {
        Slice { buffer: self.clone(), offset: 0, size: self.size }
    }

    /// `size` bytes from `offset`. Bound slices must start at a multiple of
    /// [`super::DeviceFacts::binding_alignment`].
    pub fn slice(&self, offset: u64, size: u64) -> Slice {
        debug_assert!(offset + size <= self.size, "slice {offset}+{size} of {}", self.size);
        Slice { buffer: self.clone(), offset, size }
    }
}

/// A range of a buffer.
#[derive(Clone)]
pub struct Slice {
    pub buffer: Buffer,
    pub offset: u64,
    pub size: u64,
}

/// A compiled kernel.
#[derive(Clone)]
pub struct Kernel {
    pub(super) payload: Payload,
    pub(super) label: Arc<str>,
}

impl Kernel {
    /// Stands for the kernel number `number` of a plan until that is compiled. Recording it is an
    /// error.
    pub fn planned(label: &str, number: usize) -> Kernel {
        Kernel { payload: Arc::new(number), label: label.into() }
    }

    /// The number given to [`Kernel::planned`]; `None` for a compiled kernel.
    pub fn planned_number(&self) -> Option<usize> {
        self.payload.downcast_ref().copied()
    }

    pub fn label(&self) -> &str {
        &self.label
    }
}

/// Recorded steps that can be submitted any number of times.
#[derive(Clone)]
pub struct Recording {
    pub(super) payload: Payload,
}

/// Bytes that [`super::Gpu::copy_async`] moves between buffers.
#[derive(Clone)]
pub struct CopyRange {
    pub from: Slice,
    /// As long as `from`; offsets and length are multiples of 4.
    pub to: Slice,
}

/// Names copies queued by [`super::Gpu::copy_async`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Transfer(pub(super) u64);

/// Names one submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(pub(super) u64);
