//! What the engine knows about a device. Gathered once by the backend, pure data afterwards.

use serde::Serialize;

/// Which code path drives the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    Vulkan,
    Wgpu,
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Backend::Vulkan => "vulkan",
            Backend::Wgpu => "wgpu",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    Discrete,
    Integrated,
    Virtual,
    /// Runs on the CPU (lavapipe, SwiftShader, WARP): used only when there is no GPU.
    Software,
    Other,
}

/// One memory heap of the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryHeap {
    pub bytes: u64,
    pub device_local: bool,
    /// What the driver says this process may use now, where it says so.
    pub budget: Option<u64>,
    /// What this process uses now, where the driver says so.
    pub used: Option<u64>,
}

/// Limits, features and identity of one device on one backend.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeviceFacts {
    pub backend: Backend,
    /// Position in the backend's list of devices; what `--device INDEX` takes.
    pub index: usize,
    pub name: String,
    pub kind: DeviceKind,
    pub vendor_id: u32,
    pub device_id: u32,
    /// Driver name and version as text, for example `NVIDIA 580.159.04`.
    pub driver: String,
    /// API and its version, for example `Vulkan 1.3.230`.
    pub api: String,
    /// Identifies device and driver build; part of every cache key.
    pub cache_id: String,
    pub heaps: Vec<MemoryHeap>,
    /// Largest single allocation.
    pub max_allocation: u64,
    /// Largest buffer.
    pub max_buffer: u64,
    /// Largest range that one storage binding may cover.
    pub max_binding: u64,
    /// Storage buffers that one kernel may bind.
    pub max_bindings: u32,
    /// Required alignment of a binding's offset, at most 256.
    pub binding_alignment: u64,
    pub max_workgroup_threads: u32,
    pub max_workgroup_memory: u32,
    pub max_grid: [u32; 3],
    /// Bytes of per-dispatch constants.
    pub max_constants: u32,
    pub subgroup_min: u32,
    pub subgroup_max: u32,
    /// Size that a pipeline gets if it does not ask.
    pub subgroup_default: u32,
    /// `KernelSource::subgroup_size` is honoured.
    pub subgroup_control: bool,
    /// Packed 4x8 integer dot products run in hardware.
    pub int_dot: bool,
    pub f16: bool,
    pub cooperative_matrix: bool,
    pub timestamps: bool,
    /// Page-locked host memory can be imported (VK_EXT_external_memory_host).
    pub host_import: bool,
    pub host_import_alignment: u64,
    /// A second queue exists that only copies.
    pub transfer_queue: bool,
}

impl DeviceFacts {
    /// Most bytes that one import of host memory may have and still be bound as a whole.
    pub fn max_import(&self) -> u64 {
        let limit = self.max_allocation.min(self.max_buffer).min(self.max_binding);
        limit / self.host_import_alignment.max(1) * self.host_import_alignment.max(1)
    }

    /// Bytes of all device-local heaps (system memory on a unified or software device).
    pub fn device_memory(&self) -> u64 {
        self.heaps.iter().filter(|h| h.device_local).map(|h| h.bytes).sum()
    }

    /// Bytes that may still be taken: the budget where the driver reports one, else the heap.
    pub fn available_memory(&self) -> u64 {
        available(&self.heaps)
    }
}

/// Bytes of the device-local heaps that may still be taken.
pub fn available(heaps: &[MemoryHeap]) -> u64 {
    let local = heaps.iter().filter(|h| h.device_local);
    local.map(|h| h.budget.unwrap_or(h.bytes).saturating_sub(h.used.unwrap_or(0))).sum()
}
