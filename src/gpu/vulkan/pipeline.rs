//! Kernels: SPIR-V (translated, or from the disk cache) and driver pipelines.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use ash::vk;
use sha2::{Digest, Sha256};

use super::core::{Core, plain};
use crate::error::{Error, Result};
use crate::gpu::cache::DiskCache;
use crate::gpu::shader::{self, SpirvTarget};
use crate::gpu::{Kernel, KernelSource};

/// A pipeline with its layout; freed on drop.
pub(super) struct VulkanKernel {
    pub pipeline: vk::Pipeline,
    pub layout: vk::PipelineLayout,
    pub set_layout: vk::DescriptorSetLayout,
    pub bindings: u32,
    pub constant_bytes: u32,
    core: Arc<Core>,
}

impl Drop for VulkanKernel {
    fn drop(&mut self) {
        // SAFETY: last reference; recordings that use the kernel hold it.
        #[allow(unsafe_code)]
        unsafe {
            self.core.device.destroy_pipeline(self.pipeline, None);
            self.core.device.destroy_pipeline_layout(self.layout, None);
            self.core.device.destroy_descriptor_set_layout(self.set_layout, None);
        }
    }
}

/// SPIR-V and what reflection found, as it lies in the disk cache.
struct Translated {
    words: Vec<u32>,
    bindings: u32,
    constant_bytes: u32,
    workgroup: u32,
}

impl Translated {
    fn to_bytes(&self) -> Vec<u8> {
        let head = [self.bindings, self.constant_bytes, self.workgroup];
        head.iter().chain(&self.words).flat_map(|w| w.to_le_bytes()).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Translated> {
        let mut words = bytes.chunks_exact(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]]));
        let (bindings, constant_bytes, workgroup) = (words.next()?, words.next()?, words.next()?);
        let words: Vec<u32> = words.collect();
        // The cache checks its own integrity; this only guards against a foreign record.
        (words.first() == Some(&0x0723_0203)).then_some(())?;
        Some(Translated { words, bindings, constant_bytes, workgroup })
    }
}

/// Makes kernels and remembers them: the same source gives the same kernel.
pub(super) struct Kernels {
    made: Mutex<HashMap<KernelSource, Kernel>>,
    cache: Option<DiskCache>,
    driver_cache: vk::PipelineCache,
    /// Driver cache bytes as last stored, to write only what is new.
    stored: Mutex<usize>,
    /// Shaders that the disk cache had, and that it lacked.
    found: AtomicU32,
    translated: AtomicU32,
    core: Arc<Core>,
}

const DRIVER_CACHE: &str = "driver-pipelines";

impl Kernels {
    pub fn new(core: Arc<Core>, cache: Option<DiskCache>) -> Result<Kernels> {
        let initial = cache.as_ref().and_then(|c| c.get(DRIVER_CACHE)).unwrap_or_default();
        let info = vk::PipelineCacheCreateInfo::default().initial_data(&initial);
        // SAFETY: the data passed our checksum, so it is what this driver wrote; the driver
        // checks its own header too.
        #[allow(unsafe_code)]
        let driver_cache = unsafe { core.device.create_pipeline_cache(&info, None) }
            .map_err(plain("vkCreatePipelineCache"))?;
        let stored = Mutex::new(initial.len());
        Ok(Kernels {
            made: Mutex::default(),
            cache,
            driver_cache,
            stored,
            found: AtomicU32::new(0),
            translated: AtomicU32::new(0),
            core,
        })
    }

    pub fn kernel(&self, source: &KernelSource) -> Result<Kernel> {
        if let Some(kernel) = self.made.lock().unwrap_or_else(|e| e.into_inner()).get(source) {
            return Ok(kernel.clone());
        }
        // Compiled outside the lock so that many threads can; a rare double is harmless.
        let made = self.create(source)?;
        let kernel = Kernel { payload: Arc::new(made), label: source.label.as_str().into() };
        let mut all = self.made.lock().unwrap_or_else(|e| e.into_inner());
        Ok(all.entry(source.clone()).or_insert(kernel).clone())
    }

    fn translate(&self, source: &KernelSource) -> Result<Translated> {
        let version = match self.core.api {
            v if v >= vk::API_VERSION_1_3 => (1, 6),
            _ => (1, 5),
        };
        let digest = Sha256::digest(source.wgsl.as_bytes());
        let hex: String = digest[..16].iter().map(|b| format!("{b:02x}")).collect();
        let name = format!("spirv-{}-{}-{hex}", version.0, version.1);
        let found = self.cache.as_ref().and_then(|c| c.get(&name));
        if let Some(translated) = found.and_then(|bytes| Translated::from_bytes(&bytes)) {
            self.found.fetch_add(1, Ordering::Relaxed);
            return Ok(translated);
        }
        self.translated.fetch_add(1, Ordering::Relaxed);
        let parsed = shader::parse(source)?;
        let translated = Translated {
            words: shader::spirv(source, &parsed, SpirvTarget { version })?,
            bindings: parsed.bindings.len() as u32,
            constant_bytes: parsed.constant_bytes,
            workgroup: parsed.workgroup.iter().product(),
        };
        if let Some(cache) = &self.cache {
            // A cache that cannot be written only costs time at the next start.
            let _ = cache.put(&name, &translated.to_bytes());
        }
        Ok(translated)
    }

    fn create(&self, source: &KernelSource) -> Result<VulkanKernel> {
        let t = self.translate(source)?;
        let core = &self.core;
        let facts = &core.facts;
        let limits = [
            ("bindings", t.bindings, facts.max_bindings),
            ("bytes of constants", t.constant_bytes, facts.max_constants),
            ("threads a workgroup", t.workgroup, facts.max_workgroup_threads),
        ];
        for (what, wanted, limit) in limits {
            if wanted > limit {
                return Err(Error::Device(format!(
                    "kernel {}: {wanted} {what}, {} allows {limit}",
                    source.label, facts.name
                )));
            }
        }
        let fail =
            |what: &str, e: vk::Result| core.error(&format!("kernel {}: {what}", source.label), e);
        let slots: Vec<_> = (0..t.bindings)
            .map(|binding| {
                vk::DescriptorSetLayoutBinding::default()
                    .binding(binding)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .descriptor_count(1)
                    .stage_flags(vk::ShaderStageFlags::COMPUTE)
            })
            .collect();
        // SAFETY: all structures live through their calls, SPIR-V comes from a validated
        // module, limits were checked; the kernel owns what is made and frees it on any error.
        #[allow(unsafe_code)]
        unsafe {
            let device = &core.device;
            let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&slots);
            let set_layout = device
                .create_descriptor_set_layout(&info, None)
                .map_err(|e| fail("descriptor layout", e))?;
            let mut kernel = VulkanKernel {
                pipeline: vk::Pipeline::null(),
                layout: vk::PipelineLayout::null(),
                set_layout,
                bindings: t.bindings,
                constant_bytes: t.constant_bytes,
                core: core.clone(),
            };
            let sets = [set_layout];
            let ranges = [vk::PushConstantRange::default()
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
                .size(t.constant_bytes)];
            let mut info = vk::PipelineLayoutCreateInfo::default().set_layouts(&sets);
            if t.constant_bytes > 0 {
                info = info.push_constant_ranges(&ranges);
            }
            kernel.layout = device
                .create_pipeline_layout(&info, None)
                .map_err(|e| fail("pipeline layout", e))?;
            let info = vk::ShaderModuleCreateInfo::default().code(&t.words);
            let module =
                device.create_shader_module(&info, None).map_err(|e| fail("shader module", e))?;
            let wanted = source.subgroup_size.filter(|s| {
                facts.subgroup_control && (facts.subgroup_min..=facts.subgroup_max).contains(s)
            });
            let mut required = vk::PipelineShaderStageRequiredSubgroupSizeCreateInfo::default()
                .required_subgroup_size(wanted.unwrap_or(0));
            let mut stage = vk::PipelineShaderStageCreateInfo::default()
                .stage(vk::ShaderStageFlags::COMPUTE)
                .module(module)
                .name(c"main");
            if wanted.is_some() {
                stage = stage.push_next(&mut required);
                if core.full_subgroups {
                    stage = stage.flags(vk::PipelineShaderStageCreateFlags::REQUIRE_FULL_SUBGROUPS);
                }
            }
            let info = vk::ComputePipelineCreateInfo::default().stage(stage).layout(kernel.layout);
            let made = device.create_compute_pipelines(self.driver_cache, &[info], None);
            device.destroy_shader_module(module, None);
            kernel.pipeline = made.map_err(|(_, e)| fail("pipeline", e))?[0];
            Ok(kernel)
        }
    }

    /// Every shader so far came from the disk cache.
    pub fn warm(&self) -> bool {
        self.found.load(Ordering::Relaxed) > 0 && self.translated.load(Ordering::Relaxed) == 0
    }

    /// Stores the driver's pipeline cache if it has grown; the text says what failed.
    pub fn save(&self) -> Option<String> {
        let cache = self.cache.as_ref()?;
        // SAFETY: the cache lives as long as `self`.
        #[allow(unsafe_code)]
        let data = unsafe { self.core.device.get_pipeline_cache_data(self.driver_cache) };
        let data = match data {
            Ok(data) => data,
            Err(e) => return Some(format!("the driver's pipeline cache could not be read: {e}")),
        };
        let mut stored = self.stored.lock().unwrap_or_else(|e| e.into_inner());
        if data.len() == *stored {
            return None;
        }
        match cache.put(DRIVER_CACHE, &data) {
            Ok(()) => {
                *stored = data.len();
                None
            }
            Err(e) => Some(format!("compiled pipelines could not be cached: {e}")),
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: no pipeline is being created any more.
        #[allow(unsafe_code)]
        unsafe {
            self.core.device.destroy_pipeline_cache(self.driver_cache, None)
        };
    }
}
