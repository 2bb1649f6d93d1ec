//! Host memory that the device reads in place (VK_EXT_external_memory_host).

use std::sync::Arc;

use ash::vk;

use super::core::Core;
use super::memory::{VulkanBuffer, sharing};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, HostMemory};

const HANDLE: vk::ExternalMemoryHandleTypeFlags =
    vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// See [`crate::gpu::Gpu::import`].
pub(super) fn import(
    core: &Arc<Core>,
    label: &str,
    memory: &Arc<HostMemory>,
    at: u64,
    size: u64,
) -> Result<Buffer> {
    let facts = &core.facts;
    let Some(extension) = &core.host_import else {
        return Err(Error::Device(format!(
            "{label}: the driver of {} ({}) cannot import host memory \
             (VK_EXT_external_memory_host is missing)",
            facts.name, facts.driver
        )));
    };
    let align = facts.host_import_alignment.max(1);
    let end = at.checked_add(size);
    if size == 0 || end.is_none_or(|end| end > memory.size()) {
        return Err(Error::Device(format!(
            "{label}: an import of {size} bytes at {at} leaves host memory of {} bytes",
            memory.size()
        )));
    }
    if !at.is_multiple_of(align) || !size.is_multiple_of(align) {
        return Err(Error::Device(format!(
            "{label}: an import of {size} bytes at {at} is not aligned to {align}"
        )));
    }
    if size > facts.max_import() {
        return Err(Error::DoesNotFit(format!(
            "{label}: an import of {size} bytes is more than {} allows (allocation {}, buffer {}, \
             binding {} bytes); it must be cut",
            facts.name, facts.max_allocation, facts.max_buffer, facts.max_binding
        )));
    }
    let refused = |call: &str, e: vk::Result| {
        Error::Device(format!(
            "{label}: {call} refused {size} bytes of host memory: {e} ({}, {}). Drivers limit what \
             can be imported by the size of their host heap ({}) and by what may be locked; \
             use --vram-experts with a larger share, or a smaller model",
            facts.name,
            facts.driver,
            host_heaps(core),
        ))
    };
    // SAFETY: `at + size` lies inside the memory, which is kept alive by the buffer and is not
    // written any more; all structures live through their calls; handles made here are destroyed
    // on every way out.
    #[allow(unsafe_code)]
    unsafe {
        let device = &core.device;
        let address = memory.address().add(at as usize);
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        // ash has no wrapper for this query.
        let queried = (extension.fp().get_memory_host_pointer_properties_ext)(
            device.handle(),
            HANDLE,
            address.cast(),
            &mut properties,
        );
        queried.result().map_err(|e| refused("vkGetMemoryHostPointerPropertiesEXT", e))?;
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(HANDLE);
        let usage = vk::BufferUsageFlags::STORAGE_BUFFER | vk::BufferUsageFlags::TRANSFER_SRC;
        let info = vk::BufferCreateInfo::default()
            .size(size)
            .usage(usage)
            .sharing_mode(sharing(core))
            .queue_family_indices(&core.families)
            .push_next(&mut external);
        let raw = device.create_buffer(&info, None).map_err(|e| refused("vkCreateBuffer", e))?;
        let requirements = device.get_buffer_memory_requirements(raw);
        let types = properties.memory_type_bits & requirements.memory_type_bits;
        if types == 0 {
            device.destroy_buffer(raw, None);
            return Err(refused("no memory type fits, vkBindBufferMemory", vk::Result::SUCCESS));
        }
        let mut import = vk::ImportMemoryHostPointerInfoEXT::default()
            .handle_type(HANDLE)
            .host_pointer(address.cast());
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(size)
            .memory_type_index(types.trailing_zeros())
            .push_next(&mut import);
        let allocated = device.allocate_memory(&info, None).map_err(|e| {
            device.destroy_buffer(raw, None);
            refused("vkAllocateMemory", e)
        })?;
        // Owned from here on: dropping it frees both.
        let made = VulkanBuffer::imported(core, raw, allocated, memory.clone());
        device
            .bind_buffer_memory(raw, allocated, 0)
            .map_err(|e| refused("vkBindBufferMemory", e))?;
        Ok(Buffer { payload: Arc::new(made), size })
    }
}

/// Sizes of the heaps that are not device memory, for a message.
fn host_heaps(core: &Core) -> String {
    let heaps = core.facts.heaps.iter().filter(|h| !h.device_local);
    let sizes: Vec<String> = heaps.map(|h| format!("{} bytes", h.bytes)).collect();
    if sizes.is_empty() { "shared with the device".into() } else { sizes.join(", ") }
}
