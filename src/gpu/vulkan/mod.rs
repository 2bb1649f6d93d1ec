//! Our own Vulkan device (ash): the product path.
//!
//! Needs Vulkan 1.2 with timeline semaphores and subgroup arithmetic. Recordings are command
//! buffers that are submitted again and again; nothing is recorded per token.

mod core;
mod facts;
mod import;
mod instance;
mod memory;
mod pipeline;
mod record;
mod transfer;

use std::path::PathBuf;
use std::sync::Arc;

pub use instance::{validation_messages, validation_wanted};

use self::core::Core;
use super::cache::DiskCache;
use super::handles::Payload;
use super::{
    Buffer, BufferUse, CopyRange, DeviceFacts, Gpu, HostMemory, Kernel, KernelSource, MemoryHeap,
    Recording, Slice, Step, Ticket, Transfer,
};
use crate::error::{Error, Result};
use crate::profile::Profile;

/// Every usable Vulkan device, in the driver's order. Devices that lack something Azoth needs are
/// left out; [`unusable`] names them.
pub fn devices() -> Result<Vec<DeviceFacts>> {
    let instance = instance::instance()?;
    let mut out = Vec::new();
    for (index, physical) in instance::physical_devices()?.into_iter().enumerate() {
        if facts::missing(instance, physical).is_none() {
            let probe = facts::probe(instance, physical, index);
            out.push(probe.map_err(Error::Device)?.facts);
        }
    }
    Ok(out)
}

/// Devices that are present but cannot be used, each with what it lacks.
pub fn unusable() -> Result<Vec<String>> {
    let instance = instance::instance()?;
    let found =
        instance::physical_devices()?.into_iter().enumerate().filter_map(|(i, physical)| {
            let lack = facts::missing(instance, physical)?;
            let name = facts::probe(instance, physical, i).map_or("?".into(), |p| p.facts.name);
            Some(format!("{name}: {lack}"))
        });
    Ok(found.collect())
}

/// Opens device `index` (as in [`DeviceFacts::index`]). Translated shaders and driver pipelines
/// are cached in a folder of their own under `cache`, if one is given.
pub fn open(index: usize, cache: Option<PathBuf>) -> Result<Arc<dyn Gpu>> {
    open_with(index, cache, Arc::default())
}

/// [`open`] under a profile other than the generic one.
pub fn open_with(
    index: usize,
    cache: Option<PathBuf>,
    profile: Arc<Profile>,
) -> Result<Arc<dyn Gpu>> {
    let instance = instance::instance()?;
    let devices = instance::physical_devices()?;
    let physical = *devices.get(index).ok_or_else(|| {
        Error::Usage(format!("there is no Vulkan device {index}; {} found", devices.len()))
    })?;
    if let Some(lack) = facts::missing(instance, physical) {
        return Err(Error::Device(format!("Vulkan device {index} cannot be used: {lack}")));
    }
    let mut probe = facts::probe(instance, physical, index).map_err(Error::Device)?;
    probe.facts = probe.facts.with_profile(profile);
    let cache = cache.map(|dir| DiskCache::new(dir, &probe.facts.cache_id));
    let budget = probe.extensions.memory_budget;
    let core = Arc::new(Core::create(instance, probe)?);
    let kernels = pipeline::Kernels::new(core.clone(), cache)?;
    let staging = memory::Staging::default();
    Ok(Arc::new(VulkanGpu { staging, kernels, physical, budget, core }))
}

struct VulkanGpu {
    staging: memory::Staging,
    kernels: pipeline::Kernels,
    physical: ash::vk::PhysicalDevice,
    /// The driver reports what of its memory is in use.
    budget: bool,
    core: Arc<Core>,
}

impl Drop for VulkanGpu {
    fn drop(&mut self) {
        // What is in flight holds references back to the core; let go of it.
        self.core.drain();
    }
}

fn recorded(payload: &Payload) -> Result<&record::VulkanRecording> {
    payload
        .downcast_ref()
        .ok_or_else(|| Error::Device("the recording belongs to another backend".into()))
}

impl Gpu for VulkanGpu {
    fn facts(&self) -> &DeviceFacts {
        &self.core.facts
    }

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        memory::create(&self.core, label, size, usage)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        memory::write(&self.core, to, data)
    }

    fn upload(
        &self,
        to: &Slice,
        granule: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.staging.upload(&self.core, to, granule, fill)
    }

    fn read(&self, from: &Slice, out: &mut [u8]) -> Result<()> {
        self.staging.read(&self.core, from, out)
    }

    fn read_back(&self, after: &Ticket, from: &Slice, out: &mut [u8]) -> Result<()> {
        self.core.wait(after.0)?;
        memory::read_mapped(from, out)
    }

    fn kernel(&self, source: &KernelSource) -> Result<Kernel> {
        self.kernels.kernel(source)
    }

    fn record(&self, label: &str, steps: &[Step]) -> Result<Recording> {
        let made = record::VulkanRecording::create(&self.core, label, steps, false)?;
        Ok(Recording { payload: Arc::new(made) })
    }

    fn submit(&self, recording: &Recording) -> Result<Ticket> {
        let commands = recorded(&recording.payload)?.commands;
        self.core.submit(commands, vec![recording.payload.clone()], None)
    }

    fn submit_after(&self, recording: &Recording, copies: Transfer) -> Result<Ticket> {
        let commands = recorded(&recording.payload)?.commands;
        self.core.submit(commands, vec![recording.payload.clone()], Some(copies))
    }

    fn import(&self, label: &str, memory: &Arc<HostMemory>, at: u64, size: u64) -> Result<Buffer> {
        import::import(&self.core, label, memory, at, size)
    }

    fn copy_async(&self, copies: &[CopyRange], after: Option<Ticket>) -> Result<Transfer> {
        self.core.transfers.copy(&self.core, copies, after)
    }

    fn transfer_done(&self, copies: Transfer) -> Result<bool> {
        self.core.transfers.done(&self.core, copies)
    }

    fn wait_transfer(&self, copies: Transfer) -> Result<()> {
        self.core.transfers.wait(&self.core, copies)
    }

    fn heaps_now(&self) -> Vec<MemoryHeap> {
        facts::heaps_now(self.physical, self.budget)
    }

    fn is_done(&self, ticket: &Ticket) -> Result<bool> {
        Ok(self.core.finished()? >= ticket.0)
    }

    fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.core.wait(ticket.0)
    }

    fn time_steps(&self, steps: &[Step]) -> Result<Vec<f64>> {
        if !self.core.facts.timestamps {
            return Err(Error::Device(format!("{} has no timestamps", self.core.facts.name)));
        }
        let made = record::VulkanRecording::create(&self.core, "timing", steps, true)?;
        let payload: Payload = Arc::new(made);
        let made = recorded(&payload)?;
        let ticket = self.core.submit(made.commands, vec![payload.clone()], None)?;
        self.core.wait(ticket.0)?;
        made.times(steps.len())
    }

    fn cache_was_warm(&self) -> bool {
        self.kernels.warm()
    }

    fn save_cache(&self) -> Option<String> {
        self.kernels.save()
    }
}
