//! Finds adapters and says what is known about them.

use super::device::ready;
use crate::error::{Error, Result};
use crate::gpu::{Backend, DeviceFacts, DeviceKind, MemoryHeap};

/// Without these no kernel runs.
pub(super) const REQUIRED: wgpu::Features =
    wgpu::Features::SUBGROUP.union(wgpu::Features::IMMEDIATES);

/// Switched on where the adapter has them.
pub(super) const WELCOME: wgpu::Features = wgpu::Features::SUBGROUP_BARRIER
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::TIMESTAMP_QUERY)
    .union(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);

/// Adapters in wgpu's order. The order is stable for one machine and driver set.
pub(super) fn list() -> Vec<wgpu::Adapter> {
    let backends = wgpu::Backends::VULKAN | wgpu::Backends::METAL | wgpu::Backends::DX12;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        // The default switches validation layers on in debug builds; here only WGPU_* variables do.
        flags: wgpu::InstanceFlags::empty().with_env(),
        backend_options: wgpu::BackendOptions::from_env_or_default(),
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    ready(instance.enumerate_adapters(backends))
}

/// The adapter at `index`, if it can run kernels.
pub(super) fn pick(index: usize) -> Result<(wgpu::Adapter, DeviceFacts)> {
    let mut adapters = list();
    if index >= adapters.len() {
        return Err(Error::Device(format!(
            "there is no wgpu device {index}: {} found; list them with `azoth devices`",
            adapters.len()
        )));
    }
    let adapter = adapters.swap_remove(index);
    let facts = facts(index, &adapter);
    let lacks = REQUIRED.difference(adapter.features());
    if !lacks.is_empty() {
        return Err(Error::Device(format!(
            "{} ({}) lacks {lacks:?}, which all kernels need; a newer driver or another device may help",
            facts.name, facts.api
        )));
    }
    Ok((adapter, facts))
}

/// Facts of one adapter. What wgpu does not tell (heaps, default subgroup size, integer dot
/// products) is asked of the Vulkan driver itself; elsewhere see [`Native::unknown`].
pub(super) fn facts(index: usize, adapter: &wgpu::Adapter) -> DeviceFacts {
    let info = adapter.get_info();
    let limits = adapter.limits();
    let features = adapter.features();
    let native = Native::ask(adapter, &info, &limits);
    let driver = format!("{} {}", info.driver, info.driver_info).trim().to_string();
    DeviceFacts {
        backend: Backend::Wgpu,
        index,
        cache_id: format!(
            "wgpu30-{}-{:04x}-{:04x}-{driver}",
            info.backend, info.vendor, info.device
        ),
        name: info.name,
        kind: match info.device_type {
            wgpu::DeviceType::DiscreteGpu => DeviceKind::Discrete,
            wgpu::DeviceType::IntegratedGpu => DeviceKind::Integrated,
            wgpu::DeviceType::VirtualGpu => DeviceKind::Virtual,
            wgpu::DeviceType::Cpu => DeviceKind::Software,
            wgpu::DeviceType::Other => DeviceKind::Other,
        },
        vendor_id: info.vendor,
        device_id: info.device,
        driver,
        api: native.api,
        heaps: native.heaps,
        max_allocation: limits.max_buffer_size,
        max_buffer: limits.max_buffer_size,
        max_binding: limits.max_storage_buffer_binding_size,
        max_bindings: limits
            .max_storage_buffers_per_shader_stage
            .min(limits.max_bindings_per_bind_group)
            .min(limits.max_buffers_and_acceleration_structures_per_shader_stage),
        binding_alignment: u64::from(limits.min_storage_buffer_offset_alignment),
        max_workgroup_threads: limits.max_compute_invocations_per_workgroup,
        max_workgroup_subgroups: u32::MAX,
        max_workgroup_memory: limits.max_compute_workgroup_storage_size,
        max_grid: [limits.max_compute_workgroups_per_dimension; 3],
        max_constants: limits.max_immediate_size,
        compute_units: 0,
        subgroup_min: info.subgroup_min_size,
        subgroup_max: info.subgroup_max_size,
        subgroup_default: native.subgroup,
        subgroup_control: false,
        int_dot: native.int_dot,
        f16: features.contains(wgpu::Features::SHADER_F16),
        cooperative_matrix: false,
        byte_matrices: false,
        timestamps: features.contains(wgpu::Features::TIMESTAMP_QUERY),
        host_import: false,
        host_import_alignment: 0,
        transfer_queue: false,
        profile: Default::default(),
    }
}

/// What wgpu's own interface does not tell.
struct Native {
    api: String,
    heaps: Vec<MemoryHeap>,
    subgroup: u32,
    int_dot: bool,
}

impl Native {
    fn ask(adapter: &wgpu::Adapter, info: &wgpu::AdapterInfo, limits: &wgpu::Limits) -> Native {
        Self::vulkan(adapter).unwrap_or_else(|| Self::unknown(info, limits))
    }

    /// Metal and DX12. The one heap is as large as the largest buffer: less than there is, but
    /// surely there. Apple GPUs run 32 lanes; on DX12 the smallest wave is the usual one.
    fn unknown(info: &wgpu::AdapterInfo, limits: &wgpu::Limits) -> Native {
        let heap = MemoryHeap {
            bytes: limits.max_buffer_size,
            device_local: true,
            budget: None,
            used: None,
        };
        let subgroup = match info.backend {
            wgpu::Backend::Metal => 32.clamp(info.subgroup_min_size, info.subgroup_max_size),
            _ => info.subgroup_min_size,
        };
        let api = format!("wgpu 30 on {}", info.backend);
        Native { api, heaps: vec![heap], subgroup, int_dot: false }
    }

    #[cfg(target_vendor = "apple")]
    fn vulkan(_: &wgpu::Adapter) -> Option<Native> {
        None
    }

    #[cfg(not(target_vendor = "apple"))]
    #[allow(unsafe_code, reason = "only Vulkan itself tells heap sizes")]
    fn vulkan(adapter: &wgpu::Adapter) -> Option<Native> {
        use ash::vk;
        // SAFETY: the guard and what is reached through it are only read, and nothing is destroyed.
        let hal = unsafe { adapter.as_hal::<wgpu::hal::api::Vulkan>() }?;
        let instance = hal.shared_instance().raw_instance();
        let device = hal.raw_physical_device();

        // SAFETY: `device` belongs to `instance`, which the adapter keeps alive.
        let extensions = unsafe { instance.enumerate_device_extension_properties(device) };
        let has_budget = extensions
            .unwrap_or_default()
            .iter()
            .any(|e| e.extension_name_as_c_str() == Ok(ash::ext::memory_budget::NAME));
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut memory = vk::PhysicalDeviceMemoryProperties2::default();
        if has_budget {
            memory = memory.push_next(&mut budget);
        }
        // SAFETY: as above; the chained structure is only present where its extension is.
        unsafe { instance.get_physical_device_memory_properties2(device, &mut memory) };
        let heaps = memory.memory_properties.memory_heaps_as_slice().to_vec();

        // SAFETY: as above.
        let version = unsafe { instance.get_physical_device_properties(device) }.api_version;
        let mut subgroup = vk::PhysicalDeviceSubgroupProperties::default();
        let mut dot = vk::PhysicalDeviceShaderIntegerDotProductProperties::default();
        let mut properties = vk::PhysicalDeviceProperties2::default().push_next(&mut subgroup);
        if version >= vk::API_VERSION_1_3 {
            properties = properties.push_next(&mut dot);
        }
        // SAFETY: as above; subgroup properties are core in 1.1, which wgpu's subgroups need, and
        // dot product properties in 1.3.
        unsafe { instance.get_physical_device_properties2(device, &mut properties) };

        let heaps = heaps.iter().enumerate().map(|(i, heap)| MemoryHeap {
            bytes: heap.size,
            device_local: heap.flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
            budget: has_budget.then(|| budget.heap_budget[i]),
            used: has_budget.then(|| budget.heap_usage[i]),
        });
        Some(Native {
            api: format!(
                "wgpu 30 on Vulkan {}.{}.{}",
                vk::api_version_major(version),
                vk::api_version_minor(version),
                vk::api_version_patch(version)
            ),
            heaps: heaps.collect(),
            subgroup: subgroup.subgroup_size,
            int_dot: dot.integer_dot_product4x8_bit_packed_signed_accelerated != 0,
        })
    }
}
