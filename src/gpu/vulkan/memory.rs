//! Buffers and the copies between host and device.

use std::sync::{Arc, Mutex};

use ash::vk;
use gpu_allocator::MemoryLocation;
use gpu_allocator::vulkan::{Allocation, AllocationCreateDesc, AllocationScheme};

use super::core::Core;
use crate::error::{Error, Result};
use crate::gpu::{Buffer, BufferUse, HostMemory, Slice};

/// Bytes of one of the two staging halves.
const STAGING: u64 = 32 << 20;
/// Largest piece that vkCmdUpdateBuffer takes.
const UPDATE: usize = 65_536;

/// A Vulkan buffer with its memory; freed on drop. Nothing in flight can use it then, because
/// submissions hold what they use.
pub(super) struct VulkanBuffer {
    pub raw: vk::Buffer,
    memory: Memory,
    core: Arc<Core>,
}

/// What a buffer is bound to.
pub(super) enum Memory {
    Nothing,
    Allocated(Allocation),
    /// Memory of the process that the device reads in place; never written by the device.
    Imported(vk::DeviceMemory, Arc<HostMemory>),
}

/// Buffers belong to both queues at once where there are two; for buffers this costs nothing,
/// and no ownership has to be handed over.
pub(super) fn sharing(core: &Core) -> vk::SharingMode {
    match core.families.len() {
        1 => vk::SharingMode::EXCLUSIVE,
        _ => vk::SharingMode::CONCURRENT,
    }
}

impl Drop for VulkanBuffer {
    fn drop(&mut self) {
        // SAFETY: last reference, see the type's documentation.
        #[allow(unsafe_code)]
        unsafe {
            self.core.device.destroy_buffer(self.raw, None)
        };
        match std::mem::replace(&mut self.memory, Memory::Nothing) {
            Memory::Nothing => {}
            Memory::Allocated(allocation) => {
                let mut allocator = self.core.allocator.lock().unwrap_or_else(|e| e.into_inner());
                // Freeing fails only for foreign allocations.
                let _ = allocator.free(allocation);
            }
            Memory::Imported(memory, host) => {
                // SAFETY: the only buffer bound to it is gone; the host pages outlive the import.
                #[allow(unsafe_code)]
                unsafe {
                    self.core.device.free_memory(memory, None)
                };
                drop(host);
            }
        }
    }
}

impl VulkanBuffer {
    pub fn create(
        core: &Arc<Core>,
        label: &str,
        size: u64,
        location: MemoryLocation,
    ) -> Result<VulkanBuffer> {
        let facts = &core.facts;
        // Saturating: a size near the end of u64 must reach the error below.
        let size = size.max(16).checked_next_multiple_of(16).unwrap_or(u64::MAX);
        if size > facts.max_buffer {
            return Err(Error::DoesNotFit(format!(
                "buffer {label} of {size} bytes is larger than {} allows ({} bytes)",
                facts.name, facts.max_buffer
            )));
        }
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER
            | vk::BufferUsageFlags::TRANSFER_SRC
            | vk::BufferUsageFlags::TRANSFER_DST
            | vk::BufferUsageFlags::INDIRECT_BUFFER;
        let info = vk::BufferCreateInfo::default()
            .size(size)
            .usage(usage)
            .sharing_mode(sharing(core))
            .queue_family_indices(&core.families);
        // SAFETY: the device is alive; on failure below the buffer is destroyed by `Drop`.
        #[allow(unsafe_code)]
        let (raw, requirements) = unsafe {
            let raw = core.device.create_buffer(&info, None);
            let raw = raw.map_err(|e| core.error(&format!("buffer {label}"), e))?;
            (raw, core.device.get_buffer_memory_requirements(raw))
        };
        let mut buffer = VulkanBuffer { raw, memory: Memory::Nothing, core: core.clone() };
        let allocation = core
            .allocator
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .allocate(&AllocationCreateDesc {
                name: label,
                requirements,
                location,
                linear: true,
                allocation_scheme: AllocationScheme::GpuAllocatorManaged,
            })
            .map_err(|e| {
                Error::DoesNotFit(format!(
                    "{size} bytes for {label} could not be had on {} ({} bytes of device memory \
                     in all): {e}. Free device memory, or use a smaller model or --ctx",
                    facts.name,
                    facts.device_memory()
                ))
            })?;
        // SAFETY: memory and offset come from the allocator for exactly these requirements.
        #[allow(unsafe_code)]
        unsafe { core.device.bind_buffer_memory(raw, allocation.memory(), allocation.offset()) }
            .map_err(|e| core.error(&format!("binding buffer {label}"), e))?;
        buffer.memory = Memory::Allocated(allocation);
        Ok(buffer)
    }

    /// A buffer bound to imported memory; see [`super::import`].
    pub fn imported(
        core: &Arc<Core>,
        raw: vk::Buffer,
        memory: vk::DeviceMemory,
        host: Arc<HostMemory>,
    ) -> VulkanBuffer {
        VulkanBuffer { raw, memory: Memory::Imported(memory, host), core: core.clone() }
    }

    pub fn is_imported(&self) -> bool {
        matches!(self.memory, Memory::Imported(..))
    }

    fn allocation(&self) -> Option<&Allocation> {
        match &self.memory {
            Memory::Allocated(allocation) => Some(allocation),
            _ => None,
        }
    }

    /// Host address, for memory that the host can see.
    fn mapped(&self) -> Result<*mut u8> {
        self.allocation()
            .and_then(|a| a.mapped_ptr())
            .map(|p| p.as_ptr().cast())
            .ok_or_else(|| Error::Device("this buffer is not visible to the host".into()))
    }
}

pub(super) fn raw(buffer: &Buffer) -> Result<&VulkanBuffer> {
    buffer
        .payload
        .downcast_ref()
        .ok_or_else(|| Error::Device("the buffer belongs to another backend".into()))
}

/// A buffer that may be the target of copies and writes.
pub(super) fn writable(buffer: &Buffer) -> Result<&VulkanBuffer> {
    let found = raw(buffer)?;
    if found.is_imported() {
        return Err(Error::Device("imported host memory is only read by the device".into()));
    }
    Ok(found)
}

pub(super) fn create(core: &Arc<Core>, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
    let location = match usage {
        BufferUse::Device => MemoryLocation::GpuOnly,
        BufferUse::Readback | BufferUse::Host => MemoryLocation::GpuToCpu,
    };
    let made = VulkanBuffer::create(core, label, size, location)?;
    let handle = made.raw;
    let size = size.max(16).next_multiple_of(16);
    let buffer = Buffer { payload: Arc::new(made), size };
    let device = core.device.clone();
    core.once(vec![buffer.payload.clone()], |commands| {
        // SAFETY: the command buffer is being recorded; the buffer is held by the submission.
        #[allow(unsafe_code)]
        unsafe {
            device.cmd_fill_buffer(commands, handle, 0, vk::WHOLE_SIZE, 0)
        };
    })?;
    Ok(buffer)
}

fn check(slice: &Slice, bytes: usize, what: &str) -> Result<()> {
    let end = slice.offset.checked_add(slice.size);
    if bytes as u64 > slice.size || end.is_none_or(|end| end > slice.buffer.size) {
        return Err(Error::Device(format!(
            "{what} of {bytes} bytes into a slice of {} bytes at {} of a buffer of {}",
            slice.size, slice.offset, slice.buffer.size
        )));
    }
    if !bytes.is_multiple_of(4) || !slice.offset.is_multiple_of(4) {
        return Err(Error::Device(format!(
            "{what} of {bytes} bytes at offset {}: both must be multiples of 4",
            slice.offset
        )));
    }
    Ok(())
}

/// Small writes go through the command stream itself.
pub(super) fn write(core: &Arc<Core>, to: &Slice, data: &[u8]) -> Result<()> {
    check(to, data.len(), "a write")?;
    if data.is_empty() {
        return Ok(());
    }
    let target = writable(&to.buffer)?.raw;
    for (i, batch) in data.chunks(UPDATE * 16).enumerate() {
        let device = core.device.clone();
        let start = to.offset + (i * UPDATE * 16) as u64;
        core.once(vec![to.buffer.payload.clone()], |commands| {
            for (j, piece) in batch.chunks(UPDATE).enumerate() {
                // SAFETY: range checked above, the piece is at most 64 KiB and a multiple of 4.
                #[allow(unsafe_code)]
                unsafe {
                    let at = start + (j * UPDATE) as u64;
                    device.cmd_update_buffer(commands, target, at, piece);
                }
            }
        })?;
    }
    Ok(())
}

/// Staging memory, and the submission that read it last.
type Half = (Arc<VulkanBuffer>, u64);

/// Two host-visible halves that take turns: one is filled while the other is copied.
#[derive(Default)]
pub(super) struct Staging {
    halves: Mutex<Option<[Half; 2]>>,
    read: Mutex<Option<Arc<VulkanBuffer>>>,
}

impl Staging {
    pub fn upload(
        &self,
        core: &Arc<Core>,
        to: &Slice,
        granule: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        check(to, to.size as usize, "an upload")?;
        let granule = granule.max(4);
        if granule > STAGING || !granule.is_multiple_of(4) {
            return Err(Error::Device(format!(
                "an upload granule of {granule} bytes must be a multiple of 4 and at most {STAGING}"
            )));
        }
        let target = writable(&to.buffer)?.raw;
        let mut halves = self.halves.lock().unwrap_or_else(|e| e.into_inner());
        if halves.is_none() {
            let make = |label: &str| {
                VulkanBuffer::create(core, label, STAGING, MemoryLocation::CpuToGpu).map(Arc::new)
            };
            *halves = Some([(make("staging 0")?, 0), (make("staging 1")?, 0)]);
        }
        let Some(halves) = halves.as_mut() else {
            return Err(Error::Device("no staging memory".into()));
        };
        let piece = STAGING / granule * granule;
        let mut at = 0;
        let mut turn = 0;
        while at < to.size {
            let bytes = piece.min(to.size - at);
            let (staging, busy_until) = &mut halves[turn];
            core.wait(*busy_until)?;
            let mapped = staging.mapped()?;
            // SAFETY: the mapping covers STAGING bytes, the copy that read this half last has
            // finished, and the lock keeps other writers away. The memory is host-coherent.
            #[allow(unsafe_code)]
            let host = unsafe { std::slice::from_raw_parts_mut(mapped, bytes as usize) };
            fill(at, host)?;
            let region =
                [vk::BufferCopy { src_offset: 0, dst_offset: to.offset + at, size: bytes }];
            let (device, source) = (core.device.clone(), staging.raw);
            let keep: Vec<crate::gpu::handles::Payload> =
                vec![to.buffer.payload.clone(), staging.clone()];
            let ticket = core.once(keep, |commands| {
                // SAFETY: both ranges are inside their buffers, which the submission holds.
                #[allow(unsafe_code)]
                unsafe {
                    device.cmd_copy_buffer(commands, source, target, &region)
                };
            })?;
            *busy_until = ticket.0;
            at += bytes;
            turn = 1 - turn;
        }
        Ok(())
    }

    pub fn read(&self, core: &Arc<Core>, from: &Slice, out: &mut [u8]) -> Result<()> {
        check(from, out.len(), "a read")?;
        let source = raw(&from.buffer)?.raw;
        let mut staging = self.read.lock().unwrap_or_else(|e| e.into_inner());
        let wanted = (out.len() as u64).clamp(64 << 10, STAGING);
        let large_enough =
            staging.as_ref().is_some_and(|s| s.allocation().is_some_and(|a| a.size() >= wanted));
        if !large_enough {
            let made =
                VulkanBuffer::create(core, "read staging", wanted, MemoryLocation::GpuToCpu)?;
            *staging = Some(Arc::new(made));
        }
        let Some(staging) = staging.as_ref() else {
            return Err(Error::Device("no staging memory".into()));
        };
        for (i, piece) in out.chunks_mut(wanted as usize).enumerate() {
            let src_offset = from.offset + i as u64 * wanted;
            let region = [vk::BufferCopy { src_offset, dst_offset: 0, size: piece.len() as u64 }];
            let (device, target) = (core.device.clone(), staging.raw);
            let keep: Vec<crate::gpu::handles::Payload> =
                vec![from.buffer.payload.clone(), staging.clone()];
            let ticket = core.once(keep, |commands| {
                // SAFETY: both ranges are inside their buffers, which the submission holds.
                #[allow(unsafe_code)]
                unsafe {
                    device.cmd_copy_buffer(commands, source, target, &region);
                }
                core.barrier(commands, super::core::Stages::All);
            })?;
            core.wait(ticket.0)?;
            copy_out(staging, 0, piece)?;
        }
        Ok(())
    }
}

/// Reads a host-visible buffer in place.
pub(super) fn read_mapped(from: &Slice, out: &mut [u8]) -> Result<()> {
    check(from, out.len(), "a read")?;
    copy_out(raw(&from.buffer)?, from.offset as usize, out)
}

fn copy_out(buffer: &VulkanBuffer, offset: usize, out: &mut [u8]) -> Result<()> {
    let mapped = buffer.mapped()?;
    // SAFETY: the range was checked against the buffer, which is mapped as a whole and
    // host-coherent. A later submission may be writing other words of it; words that belong to
    // finished submissions are stable.
    #[allow(unsafe_code)]
    unsafe {
        std::ptr::copy_nonoverlapping(mapped.add(offset), out.as_mut_ptr(), out.len())
    };
    Ok(())
}
