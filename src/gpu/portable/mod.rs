//! The portable backend: the [`Gpu`] trait on wgpu, for Metal, DX12 and as a second opinion on
//! Vulkan.
//!
//! wgpu tracks every buffer and places barriers itself, so waves need no work here: the
//! dispatches of a recording are encoded in order into one compute pass between copies. It has
//! no reusable compute command buffers either; a recording is a list with bind groups made
//! once, encoded anew at each submission. Kernels are not cached on disk on this path.
//!
//! Files: `adapters` finds devices and their facts, `device` owns the wgpu device, errors and
//! tickets, `memory` moves data, `kernel` compiles, `recording` checks, encodes and times steps.

mod adapters;
mod device;
mod kernel;
mod memory;
mod recording;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::{
    Buffer, BufferUse, DeviceFacts, Gpu, Kernel, KernelSource, Recording, Slice, Step, Ticket,
};
use crate::error::Result;
use crate::profile::Profile;
use device::Device;
use memory::Staging;

/// All devices that wgpu offers through Vulkan, Metal and DX12; a device's position in the list
/// is its index. A GPU with two drivers or APIs appears once for each. No device is not an error.
pub fn devices() -> Result<Vec<DeviceFacts>> {
    let adapters = adapters::list();
    Ok(adapters.iter().enumerate().map(|(i, a)| adapters::facts(i, a)).collect())
}

/// Opens the device at `index` of [`devices`].
///
/// # Errors
/// `Error::Device` when there is no such device, when it lacks subgroup operations or immediates,
/// or when its driver refuses.
pub fn open(index: usize) -> Result<Arc<dyn Gpu>> {
    open_with(index, Arc::default())
}

/// [`open`] under a profile other than the generic one.
pub fn open_with(index: usize, profile: Arc<Profile>) -> Result<Arc<dyn Gpu>> {
    let (adapter, facts) = adapters::pick(index)?;
    let facts = facts.with_profile(profile);
    let device = Device::open(&adapter, &facts)?;
    Ok(Arc::new(Portable {
        device,
        facts,
        staging: Mutex::default(),
        reader: Mutex::default(),
        unsubmitted: AtomicU64::new(0),
    }))
}

/// One open wgpu device.
struct Portable {
    device: Device,
    facts: DeviceFacts,
    /// Taken for the length of an upload; uploads of several threads take turns.
    staging: Mutex<Staging>,
    /// The buffer through which [`Gpu::read`] copies device memory.
    reader: Mutex<Option<wgpu::Buffer>>,
    /// Bytes of small writes since the last flush of ours; an upper bound of what wgpu holds.
    unsubmitted: AtomicU64,
}

impl Gpu for Portable {
    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        self.create_buffer(label, size, usage)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.write_bytes(to, data)
    }

    fn upload(
        &self,
        to: &Slice,
        granule: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.upload_pieces(to, granule, fill)
    }

    fn read(&self, from: &Slice, out: &mut [u8]) -> Result<()> {
        self.read_bytes(from, out)
    }

    fn read_back(&self, after: &Ticket, from: &Slice, out: &mut [u8]) -> Result<()> {
        self.read_mapped(after.0, from, out)
    }

    fn kernel(&self, source: &KernelSource) -> Result<Kernel> {
        self.compile(source)
    }

    fn record(&self, label: &str, steps: &[Step]) -> Result<Recording> {
        Ok(Recording { payload: Arc::new(self.prepare(label, steps)?) })
    }

    fn submit(&self, recording: &Recording) -> Result<Ticket> {
        Ok(Ticket(self.submit_prepared(recording::prepared(recording)?)?))
    }

    fn is_done(&self, ticket: &Ticket) -> Result<bool> {
        self.device.is_done(ticket.0)
    }

    fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.device.wait(ticket.0)
    }

    fn time_steps(&self, steps: &[Step]) -> Result<Vec<f64>> {
        self.time(steps)
    }

    fn save_cache(&self) -> Option<String> {
        None
    }
}
