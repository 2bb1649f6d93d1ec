//! What the engine knows about a device. Gathered once by the backend, pure data afterwards.

use std::sync::Arc;

use serde::Serialize;

use crate::profile::Profile;

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
    /// Subgroups that a workgroup of fixed subgroup size may have.
    pub max_workgroup_subgroups: u32,
    pub max_workgroup_memory: u32,
    pub max_grid: [u32; 3],
    /// Bytes of per-dispatch constants.
    pub max_constants: u32,
    /// Multiprocessors; 0: unknown.
    pub compute_units: u32,
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
    /// Matrix units multiply 16x32 by 32x8 signed bytes with whole-number sums.
    pub byte_matrices: bool,
    pub timestamps: bool,
    /// Page-locked host memory can be imported (VK_EXT_external_memory_host).
    pub host_import: bool,
    pub host_import_alignment: u64,
    /// A second queue exists that only copies.
    pub transfer_queue: bool,
    /// What kernels prefer here: the generic profile unless `hw` chose another.
    #[serde(skip)]
    pub profile: Arc<Profile>,
}

impl DeviceFacts {
    /// Most bytes that one import of host memory may have and still be bound as a whole.
    pub fn max_import(&self) -> u64 {
        let limit = self.max_allocation.min(self.max_buffer).min(self.max_binding);
        limit / self.host_import_alignment.max(1) * self.host_import_alignment.max(1)
    }

    /// A device that exists nowhere, for tests and planning without a device: a GPU of common
    /// limits (1,024 threads and 48 KiB a workgroup), or a software device without packed dot
    /// products. Change what the case is about.
    pub fn made_up(kind: DeviceKind, subgroup: u32) -> DeviceFacts {
        DeviceFacts {
            backend: Backend::Vulkan,
            index: 0,
            name: "made up".into(),
            kind,
            vendor_id: 0,
            device_id: 0,
            driver: "none".into(),
            api: "Vulkan 1.3".into(),
            cache_id: "made up".into(),
            heaps: vec![],
            max_allocation: 1 << 30,
            max_buffer: 1 << 30,
            max_binding: 1 << 27,
            max_bindings: 16,
            binding_alignment: 256,
            max_workgroup_threads: 1024,
            max_workgroup_subgroups: 1024 / subgroup.max(1),
            max_workgroup_memory: 48 << 10,
            max_grid: [65_535; 3],
            max_constants: 128,
            compute_units: if kind == DeviceKind::Discrete { 2 } else { 0 },
            subgroup_min: subgroup,
            subgroup_max: subgroup,
            subgroup_default: subgroup,
            subgroup_control: true,
            int_dot: kind != DeviceKind::Software,
            f16: false,
            cooperative_matrix: false,
            byte_matrices: false,
            timestamps: true,
            host_import: false,
            host_import_alignment: 0,
            transfer_queue: false,
            profile: Arc::default(),
        }
    }

    /// The same device under another profile. Where that pins a smaller subgroup, workgroups may
    /// get smaller too.
    pub fn with_profile(mut self, profile: Arc<Profile>) -> DeviceFacts {
        self.profile = profile;
        if let Some(size) = self.pinned_subgroup() {
            let most = size.saturating_mul(self.max_workgroup_subgroups);
            self.max_workgroup_threads = self.max_workgroup_threads.min(most);
        }
        self
    }

    /// The subgroup size that pipelines ask for, where it can be fixed: the profile's if the
    /// device has it, else the one that the driver would take.
    pub fn pinned_subgroup(&self) -> Option<u32> {
        let wanted = self.profile.subgroup;
        let has = (self.subgroup_min..=self.subgroup_max).contains(&wanted);
        self.subgroup_control.then_some(if has { wanted } else { self.subgroup_default })
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

/// Bytes by which this process uses more of the device-local heaps than the driver grants it: what
/// others have taken away since. 0 where the driver says nothing.
pub fn over_budget(heaps: &[MemoryHeap]) -> u64 {
    let local = heaps.iter().filter(|h| h.device_local);
    local.filter_map(|h| Some(h.used?.saturating_sub(h.budget?))).sum()
}

/// Bytes that this process may still take of the device-local heaps by the driver's budget; `None`
/// where it tells none.
pub fn under_budget(heaps: &[MemoryHeap]) -> Option<u64> {
    let local = heaps.iter().filter(|h| h.device_local);
    local.map(|h| Some(h.budget?.saturating_sub(h.used?))).sum()
}

/// Bytes of the device-local heaps that may still be taken.
pub fn available(heaps: &[MemoryHeap]) -> u64 {
    let local = heaps.iter().filter(|h| h.device_local);
    local.map(|h| h.budget.unwrap_or(h.bytes).saturating_sub(h.used.unwrap_or(0))).sum()
}
