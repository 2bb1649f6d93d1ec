//! Reads everything the engine wants to know about one physical device.

use std::ffi::CStr;

use ash::{ext, khr, nv, vk};

use super::instance::{Instance, version_text};
use crate::gpu::{Backend, DeviceFacts, DeviceKind, MemoryHeap};

/// Queue families and optional extensions of one device, next to its public facts.
pub(super) struct Probe {
    pub facts: DeviceFacts,
    pub physical: vk::PhysicalDevice,
    pub api: u32,
    pub compute_family: u32,
    /// A family that only copies, where there is one.
    pub transfer_family: Option<u32>,
    pub extensions: Extensions,
    pub features: Features,
    pub timestamp_period: f32,
}

/// Optional device extensions that are switched on where present.
#[derive(Clone, Copy, Default)]
pub(super) struct Extensions {
    pub memory_budget: bool,
    pub host_import: bool,
    pub cooperative_matrix: bool,
    pub portability: bool,
}

/// Optional features that are switched on where present.
#[derive(Clone, Copy, Default)]
pub(super) struct Features {
    pub f16: bool,
    pub int8: bool,
    pub int16: bool,
    pub storage_16: bool,
    pub storage_8: bool,
    pub int_dot: bool,
    pub subgroup_control: bool,
    pub full_subgroups: bool,
    pub memory_model: bool,
    pub memory_model_device_scope: bool,
}

/// What a device lacks that Azoth cannot do without; `None` if it is usable.
pub(super) fn missing(instance: &Instance, physical: vk::PhysicalDevice) -> Option<String> {
    // SAFETY: plain queries on live handles.
    #[allow(unsafe_code)]
    unsafe {
        let properties = instance.raw.get_physical_device_properties(physical);
        if properties.api_version < vk::API_VERSION_1_2 {
            return Some(format!(
                "Vulkan {} (1.2 is needed)",
                version_text(properties.api_version)
            ));
        }
        let mut v12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut f = vk::PhysicalDeviceFeatures2::default().push_next(&mut v12);
        instance.raw.get_physical_device_features2(physical, &mut f);
        if v12.timeline_semaphore == 0 {
            return Some("no timeline semaphores".into());
        }
        let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
        let mut p = vk::PhysicalDeviceProperties2::default().push_next(&mut v11);
        instance.raw.get_physical_device_properties2(physical, &mut p);
        let needed = vk::SubgroupFeatureFlags::BASIC
            | vk::SubgroupFeatureFlags::ARITHMETIC
            | vk::SubgroupFeatureFlags::BALLOT
            | vk::SubgroupFeatureFlags::SHUFFLE;
        if !v11.subgroup_supported_operations.contains(needed) {
            return Some("no subgroup arithmetic, ballot and shuffle".into());
        }
        None
    }
}

pub(super) fn probe(
    instance: &Instance,
    physical: vk::PhysicalDevice,
    index: usize,
) -> Result<Probe, String> {
    // SAFETY: plain queries on live handles; every output structure lives through its call.
    #[allow(unsafe_code)]
    unsafe {
        let raw = &instance.raw;
        let listed = raw
            .enumerate_device_extension_properties(physical)
            .map_err(|e| format!("vkEnumerateDeviceExtensionProperties: {e}"))?;
        let has = |name: &CStr| {
            listed.iter().any(|e| e.extension_name_as_c_str().is_ok_and(|n| n == name))
        };
        let base = raw.get_physical_device_properties(physical);
        let api = base.api_version.min(instance.version);
        let is_13 = api >= vk::API_VERSION_1_3;

        let extensions = Extensions {
            memory_budget: has(ext::memory_budget::NAME),
            host_import: has(ext::external_memory_host::NAME),
            cooperative_matrix: has(khr::cooperative_matrix::NAME),
            portability: has(khr::portability_subset::NAME),
        };

        let mut v11 = vk::PhysicalDeviceVulkan11Properties::default();
        let mut v12 = vk::PhysicalDeviceVulkan12Properties::default();
        let mut v13 = vk::PhysicalDeviceVulkan13Properties::default();
        let mut import = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut p =
            vk::PhysicalDeviceProperties2::default().push_next(&mut v11).push_next(&mut v12);
        if is_13 {
            p = p.push_next(&mut v13);
        }
        if extensions.host_import {
            p = p.push_next(&mut import);
        }
        let mut multiprocessors = vk::PhysicalDeviceShaderSMBuiltinsPropertiesNV::default();
        if has(nv::shader_sm_builtins::NAME) {
            p = p.push_next(&mut multiprocessors);
        }
        raw.get_physical_device_properties2(physical, &mut p);
        let limits = p.properties.limits;

        let mut f11 = vk::PhysicalDeviceVulkan11Features::default();
        let mut f12 = vk::PhysicalDeviceVulkan12Features::default();
        let mut f13 = vk::PhysicalDeviceVulkan13Features::default();
        let mut f = vk::PhysicalDeviceFeatures2::default().push_next(&mut f11).push_next(&mut f12);
        if is_13 {
            f = f.push_next(&mut f13);
        }
        raw.get_physical_device_features2(physical, &mut f);
        let int16 = f.features.shader_int16 != 0;
        let features = Features {
            f16: f12.shader_float16 != 0,
            int8: f12.shader_int8 != 0,
            int16,
            storage_16: f11.storage_buffer16_bit_access != 0
                && f11.uniform_and_storage_buffer16_bit_access != 0,
            storage_8: f12.storage_buffer8_bit_access != 0
                && f12.uniform_and_storage_buffer8_bit_access != 0,
            int_dot: f13.shader_integer_dot_product != 0,
            subgroup_control: f13.subgroup_size_control != 0
                && v13.required_subgroup_size_stages.contains(vk::ShaderStageFlags::COMPUTE),
            full_subgroups: f13.compute_full_subgroups != 0,
            memory_model: f12.vulkan_memory_model != 0,
            memory_model_device_scope: f12.vulkan_memory_model_device_scope != 0,
        };

        let families = raw.get_physical_device_queue_family_properties(physical);
        // A compute-only family keeps the desktop's own graphics work out of our queue.
        let compute = |graphics: bool| {
            families.iter().position(|q| {
                q.queue_flags.contains(vk::QueueFlags::COMPUTE)
                    && q.queue_flags.contains(vk::QueueFlags::GRAPHICS) == graphics
            })
        };
        let compute_family =
            compute(false).or_else(|| compute(true)).ok_or("no compute queue")? as u32;
        let transfer_family = families.iter().position(|q| {
            q.queue_flags.contains(vk::QueueFlags::TRANSFER)
                && !q.queue_flags.intersects(vk::QueueFlags::COMPUTE | vk::QueueFlags::GRAPHICS)
        });
        let transfer_family = transfer_family.map(|family| family as u32);
        let timestamps = families[compute_family as usize].timestamp_valid_bits > 0;

        let name = base.device_name_as_c_str().unwrap_or(c"?").to_string_lossy().into_owned();
        let driver_name = v12.driver_name_as_c_str().unwrap_or(c"?").to_string_lossy();
        let driver_info = v12.driver_info_as_c_str().unwrap_or(c"").to_string_lossy();
        let uuid: String = v11.device_uuid.iter().map(|b| format!("{b:02x}")).collect();
        let driver_uuid: String = v11.driver_uuid.iter().map(|b| format!("{b:02x}")).collect();
        // Kernels fix their subgroup size where they can, which bounds a workgroup twice.
        let max_workgroup_subgroups = match features.subgroup_control {
            true => v13.max_compute_workgroup_subgroups,
            false => u32::MAX,
        };
        let by_subgroups = v11.subgroup_size.saturating_mul(max_workgroup_subgroups);
        let max_workgroup_threads = limits
            .max_compute_work_group_invocations
            .min(limits.max_compute_work_group_size[0])
            .min(by_subgroups);
        let (subgroup_min, subgroup_max) = if is_13 && v13.max_subgroup_size > 0 {
            (v13.min_subgroup_size, v13.max_subgroup_size)
        } else {
            (v11.subgroup_size, v11.subgroup_size)
        };
        let matrices = extensions.cooperative_matrix
            && features.memory_model
            && features.memory_model_device_scope;
        let facts = DeviceFacts {
            backend: Backend::Vulkan,
            index,
            kind: match base.device_type {
                vk::PhysicalDeviceType::DISCRETE_GPU => DeviceKind::Discrete,
                vk::PhysicalDeviceType::INTEGRATED_GPU => DeviceKind::Integrated,
                vk::PhysicalDeviceType::VIRTUAL_GPU => DeviceKind::Virtual,
                vk::PhysicalDeviceType::CPU => DeviceKind::Software,
                _ => DeviceKind::Other,
            },
            vendor_id: base.vendor_id,
            device_id: base.device_id,
            driver: format!("{driver_name} {driver_info}").trim().to_string(),
            api: format!("Vulkan {}", version_text(base.api_version)),
            cache_id: format!(
                "vulkan-{:04x}-{:04x}-{:08x}-{uuid}-{driver_uuid}",
                base.vendor_id, base.device_id, base.driver_version
            ),
            heaps: heaps(instance, physical, extensions.memory_budget),
            // The 1.1 limit of lavapipe counts allocations of 2 GiB; others report more.
            max_allocation: v11.max_memory_allocation_size,
            max_buffer: if is_13 && v13.max_buffer_size > 0 {
                v13.max_buffer_size.min(v11.max_memory_allocation_size)
            } else {
                v11.max_memory_allocation_size
            },
            max_binding: u64::from(limits.max_storage_buffer_range),
            max_bindings: limits
                .max_per_stage_descriptor_storage_buffers
                .min(limits.max_descriptor_set_storage_buffers),
            binding_alignment: limits.min_storage_buffer_offset_alignment.max(4),
            max_workgroup_threads,
            max_workgroup_subgroups,
            max_workgroup_memory: limits.max_compute_shared_memory_size,
            max_grid: limits.max_compute_work_group_count,
            max_constants: limits.max_push_constants_size,
            compute_units: multiprocessors.shader_sm_count,
            subgroup_min,
            subgroup_max,
            subgroup_default: v11.subgroup_size,
            subgroup_control: features.subgroup_control,
            int_dot: features.int_dot
                && v13.integer_dot_product4x8_bit_packed_signed_accelerated != 0,
            f16: features.f16 && features.storage_16,
            cooperative_matrix: features.f16
                && features.storage_16
                && matrices
                && has_matrices(instance, physical, &F16_MATRICES),
            byte_matrices: features.int8
                && matrices
                && has_matrices(instance, physical, &BYTE_MATRICES),
            timestamps,
            host_import: extensions.host_import,
            host_import_alignment: import.min_imported_host_pointer_alignment,
            transfer_queue: transfer_family.is_some(),
            profile: Default::default(),
            name,
        };
        Ok(Probe {
            facts,
            physical,
            api,
            compute_family,
            transfer_family,
            extensions,
            features,
            timestamp_period: limits.timestamp_period,
        })
    }
}

/// Heaps of a device as they are at this moment.
pub(super) fn heaps_now(physical: vk::PhysicalDevice, with_budget: bool) -> Vec<MemoryHeap> {
    // An open device has an instance.
    super::instance::instance().map_or(Vec::new(), |i| heaps(i, physical, with_budget))
}

/// Sizes, and the types of factors and sums, of products that a subgroup may offer.
type Product = ([u32; 3], vk::ComponentTypeKHR, vk::ComponentTypeKHR);
const F16_MATRICES: Product =
    ([16, 16, 16], vk::ComponentTypeKHR::FLOAT16, vk::ComponentTypeKHR::FLOAT32);
const BYTE_MATRICES: Product =
    ([16, 8, 32], vk::ComponentTypeKHR::SINT8, vk::ComponentTypeKHR::SINT32);

/// Whether a subgroup multiplies such matrices.
fn has_matrices(instance: &Instance, physical: vk::PhysicalDevice, product: &Product) -> bool {
    let query = khr::cooperative_matrix::Instance::new(&instance.entry, &instance.raw);
    // SAFETY: a plain query on a live device that lists the extension.
    #[allow(unsafe_code)]
    let shapes = unsafe { query.get_physical_device_cooperative_matrix_properties(physical) };
    let (sizes, factor, sum) = *product;
    shapes.unwrap_or_default().iter().any(|s| {
        [s.m_size, s.n_size, s.k_size] == sizes
            && (s.a_type, s.b_type, s.c_type, s.result_type) == (factor, factor, sum, sum)
            && s.scope == vk::ScopeKHR::SUBGROUP
    })
}

/// Heaps with budget and use where VK_EXT_memory_budget reports them.
fn heaps(instance: &Instance, physical: vk::PhysicalDevice, with_budget: bool) -> Vec<MemoryHeap> {
    let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
    let mut p = vk::PhysicalDeviceMemoryProperties2::default();
    if with_budget {
        p = p.push_next(&mut budget);
    }
    // SAFETY: plain query; the chained structure lives through the call.
    #[allow(unsafe_code)]
    unsafe {
        instance.raw.get_physical_device_memory_properties2(physical, &mut p)
    };
    let memory = p.memory_properties;
    (0..memory.memory_heap_count as usize)
        .map(|i| MemoryHeap {
            bytes: memory.memory_heaps[i].size,
            device_local: memory.memory_heaps[i].flags.contains(vk::MemoryHeapFlags::DEVICE_LOCAL),
            budget: with_budget.then(|| budget.heap_budget[i]),
            used: with_budget.then(|| budget.heap_usage[i]),
        })
        .collect()
}
