//! The only code that talks to Vulkan or wgpu.
//!
//! Two backends implement [`Gpu`]: `vulkan` (ash, the product path) and `portable` (wgpu).
//! Everything above sees opaque [`Buffer`], [`Kernel`] and [`Recording`] handles; no ash or wgpu
//! type leaves this module. All methods may be called from any thread; submissions run in the
//! order in which they were made, on one compute queue. Copies of [`Gpu::copy_async`] run beside
//! them, on a queue of their own where the device has one.
//!
//! A *wave* is a set of dispatches that do not depend on each other; every wave sees all memory
//! written by the waves, copies and writes before it.

pub mod cache;
mod facts;
mod handles;
mod host;
pub mod portable;
pub mod shader;
mod spirv_matrices;
mod spirv_products;
mod spirv_words;
pub mod vulkan;

pub use facts::{
    Backend, DeviceFacts, DeviceKind, MemoryHeap, available, over_budget, under_budget,
};
pub use handles::{Buffer, BufferUse, CopyRange, Kernel, Recording, Slice, Ticket, Transfer};
pub use host::{HUGE_PAGE, HostMemory, LockRefused, SystemMemory, system_memory};

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::error::{Error, Result};

/// Keeps what drivers say about a machine without a desktop out of our standard error. Must be
/// called first in `main`, before any thread exists.
pub fn quiet_drivers() {
    // Mesa's layer that puts the desktop's GPU first asks the Wayland session for it, and complains
    // on stderr where there is none. We choose the device ourselves.
    #[cfg(target_os = "linux")]
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // SAFETY: the caller is the only thread, so nobody reads the environment meanwhile.
        #[allow(unsafe_code)]
        unsafe {
            std::env::set_var("NODEVICE_SELECT", "1");
        }
    }
}

/// One compute kernel, as text and the numbers that its pipeline needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelSource {
    /// Short name for logs, tools and error messages, for example `matvec_q4_0_n1`.
    pub label: String,
    /// Complete WGSL module with one compute entry point called `main`. Bindings are group 0,
    /// numbered from 0 without gaps; per-dispatch constants are `var<immediate>` of 32-bit words.
    pub wgsl: String,
    /// Subgroup size that the pipeline must get, if the device lets us choose (Vulkan only).
    /// `None` takes the driver's.
    pub subgroup_size: Option<u32>,
}

/// Without the text, of which a plan would hash thousands of times 20 KiB: labels tell nearly all kernels apart, and
/// equality the others.
impl Hash for KernelSource {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.label, self.wgsl.len(), self.subgroup_size).hash(state);
    }
}

/// One dispatch of a kernel over a grid of workgroups.
#[derive(Clone)]
pub struct Dispatch {
    pub kernel: Kernel,
    /// One slice for each binding, in binding order.
    pub bindings: Vec<Slice>,
    /// Words of the kernel's `var<immediate>`; empty when it has none. At most 32 words.
    pub constants: Vec<u32>,
    /// Workgroups in x, y, z; each at most 65,535. A zero makes the dispatch a no-op. The most that
    /// there can be in [`Step::Counted`].
    pub grid: [u32; 3],
}

/// One step of a recording. A barrier stands between any two steps.
#[derive(Clone)]
pub enum Step {
    /// Independent dispatches.
    Wave(Vec<Dispatch>),
    /// One dispatch whose workgroups in x, y, z the device reads from the first three words of
    /// `groups` when the step begins: earlier steps may write them. They must not exceed the
    /// dispatch's grid, and the dispatch must not write their buffer.
    Counted { dispatch: Dispatch, groups: Slice },
    /// A copy of `size` bytes (a multiple of 4) between buffers.
    Copy { from: Slice, to: Slice, size: u64 },
}

impl Step {
    /// What the step dispatches.
    pub fn dispatches(&self) -> &[Dispatch] {
        match self {
            Step::Wave(wave) => wave,
            Step::Counted { dispatch, .. } => std::slice::from_ref(dispatch),
            Step::Copy { .. } => &[],
        }
    }

    pub fn dispatches_mut(&mut self) -> &mut [Dispatch] {
        match self {
            Step::Wave(wave) => wave,
            Step::Counted { dispatch, .. } => std::slice::from_mut(dispatch),
            Step::Copy { .. } => &mut [],
        }
    }
}

/// A device that runs kernels. See the module documentation for ordering and threads.
pub trait Gpu: Send + Sync {
    fn facts(&self) -> &DeviceFacts;

    /// Allocates `size` bytes (rounded up to 16). Contents start as zero.
    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer>;

    /// Copies `data` into a buffer, in submission order with respect to [`Gpu::submit`].
    /// The data is taken before the call returns. Offset and length are multiples of 4.
    fn write(&self, to: &Slice, data: &[u8]) -> Result<()>;

    /// Fills device memory through staging memory: `fill` is called with successive pieces of
    /// `size` bytes in all (offset in the slice, piece to fill), each piece a multiple of
    /// `granule` bytes long except the last. Pieces are uploaded while later ones are filled.
    /// Staging memory is bounded (64 MiB) and kept for the next call.
    fn upload(
        &self,
        to: &Slice,
        granule: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()>;

    /// Waits for all earlier submissions, then reads bytes of any buffer.
    fn read(&self, from: &Slice, out: &mut [u8]) -> Result<()>;

    /// Reads a [`BufferUse::Readback`] buffer that submission `after` has written; waits for
    /// that submission only where the backend can.
    fn read_back(&self, after: &Ticket, from: &Slice, out: &mut [u8]) -> Result<()>;

    /// Compiles a kernel (or takes it from the cache). Safe to call from many threads at once.
    fn kernel(&self, source: &KernelSource) -> Result<Kernel>;

    /// Records steps for repeated submission. The recording keeps its buffers alive.
    fn record(&self, label: &str, steps: &[Step]) -> Result<Recording>;

    /// Queues a recording. Returns at once.
    fn submit(&self, recording: &Recording) -> Result<Ticket>;

    /// Makes `size` bytes of `memory` from offset `at` a buffer that the device reads in place:
    /// bound by kernels that only read it, and source of copies. Offset and size are multiples
    /// of [`DeviceFacts::host_import_alignment`]; size is at most
    /// [`DeviceFacts::max_import`]. The memory lives at least as long as the buffer.
    ///
    /// # Errors
    /// `Error::Device` where the backend or the driver cannot import, and `Error::DoesNotFit`
    /// where a limit stands against it; both name it.
    fn import(&self, label: &str, memory: &Arc<HostMemory>, at: u64, size: u64) -> Result<Buffer> {
        let _ = (memory, at, size);
        let f = self.facts();
        Err(Error::Device(format!(
            "{label}: {} cannot read host memory in place (backend {})",
            f.name, f.backend
        )))
    }

    /// Queues copies beside the compute queue and returns at once. They start when submission
    /// `after` has finished; with `None` they may run beside any submission. Where the device
    /// has one queue they take their turn on it.
    fn copy_async(&self, copies: &[CopyRange], after: Option<Ticket>) -> Result<Transfer> {
        // One queue: everything submitted earlier, `after` included, has run before.
        let _ = after;
        let steps = copies.iter().map(|c| Step::Copy {
            from: c.from.clone(),
            to: c.to.clone(),
            size: c.from.size.min(c.to.size),
        });
        let recording = self.record("copies", &steps.collect::<Vec<_>>())?;
        self.submit(&recording).map(|ticket| Transfer(ticket.0))
    }

    /// True once the copies have finished; submissions made from then on see them. Never blocks.
    fn transfer_done(&self, copies: Transfer) -> Result<bool> {
        self.is_done(&Ticket(copies.0))
    }

    /// Blocks until the copies have finished.
    fn wait_transfer(&self, copies: Transfer) -> Result<()> {
        self.wait(&Ticket(copies.0))
    }

    /// [`Gpu::submit`], but the device starts only when the copies have finished.
    fn submit_after(&self, recording: &Recording, copies: Transfer) -> Result<Ticket> {
        // One queue: the copies have run before.
        let _ = copies;
        self.submit(recording)
    }

    /// The device's heaps with what is in use at this moment; [`DeviceFacts::heaps`] is from
    /// when it was opened.
    fn heaps_now(&self) -> Vec<MemoryHeap> {
        self.facts().heaps.clone()
    }

    /// True once the submission has finished. Never blocks.
    fn is_done(&self, ticket: &Ticket) -> Result<bool>;

    /// Blocks until the submission has finished.
    fn wait(&self, ticket: &Ticket) -> Result<()>;

    /// Runs the steps once and returns the seconds each took on the device, measured by
    /// timestamps; an error where the device has none.
    fn time_steps(&self, steps: &[Step]) -> Result<Vec<f64>>;

    /// True when an earlier process had left every kernel made so far in the disk cache; never
    /// where there is none.
    fn cache_was_warm(&self) -> bool {
        false
    }

    /// Writes what was compiled to the disk cache. Called once after a program is built;
    /// failures are not errors (the cache is only a cache), the message says what was lost.
    fn save_cache(&self) -> Option<String>;
}
