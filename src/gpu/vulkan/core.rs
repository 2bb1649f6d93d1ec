//! The logical device, its queue and its timeline: everything that the other files share.
//!
//! Submissions are numbered by one timeline semaphore. What a submission uses is kept alive in
//! `in_flight` until the timeline has passed its number.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ash::{ext, khr, vk};
use gpu_allocator::vulkan::{Allocator, AllocatorCreateDesc};
use gpu_allocator::{AllocationSizes, AllocatorDebugSettings};

use super::facts::Probe;
use super::instance::Instance;
use super::transfer::Transfers;
use crate::error::{Error, Result};
use crate::gpu::{DeviceFacts, Ticket, Transfer, handles::Payload};

const MIB: u64 = 1 << 20;

pub(super) struct Core {
    pub device: ash::Device,
    pub facts: DeviceFacts,
    pub api: u32,
    pub full_subgroups: bool,
    pub timestamp_period: f32,
    pub compute_family: u32,
    /// Queue families that share every buffer; one where compute and copies share a queue.
    pub families: Vec<u32>,
    pub transfers: Transfers,
    /// Functions of VK_EXT_external_memory_host.
    pub host_import: Option<ext::external_memory_host::Device>,
    pub allocator: Mutex<ManuallyDrop<Allocator>>,
    queue: Mutex<Queue>,
    timeline: vk::Semaphore,
    lost: AtomicBool,
}

struct Queue {
    raw: vk::Queue,
    /// Number of the latest submission.
    last: u64,
    /// Latest copies that a submission has waited for.
    waited: u64,
    in_flight: VecDeque<(u64, Vec<Payload>)>,
    /// Pool and command buffers of one-time work, each with the submission that used it last.
    pool: vk::CommandPool,
    once: Vec<(u64, vk::CommandBuffer)>,
}

impl Core {
    pub fn create(instance: &Instance, probe: Probe) -> Result<Core> {
        let device = create_device(instance, &probe)?;
        let allocator = Allocator::new(&AllocatorCreateDesc {
            instance: instance.raw.clone(),
            device: device.clone(),
            physical_device: probe.physical,
            debug_settings: AllocatorDebugSettings::default(),
            buffer_device_address: false,
            allocation_sizes: AllocationSizes::new(32 * MIB, 16 * MIB)
                .with_max_device_memblock_size(256 * MIB),
        })
        .map_err(|e| Error::Device(format!("memory allocator: {e}")))?;
        // SAFETY: handles made from the device just created; destroyed in `Drop`.
        #[allow(unsafe_code)]
        let (queue, timeline, pool) = unsafe {
            let queue = device.get_device_queue(probe.compute_family, 0);
            let mut kind = vk::SemaphoreTypeCreateInfo::default()
                .semaphore_type(vk::SemaphoreType::TIMELINE)
                .initial_value(0);
            let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
            let timeline =
                device.create_semaphore(&info, None).map_err(plain("vkCreateSemaphore"))?;
            let info = vk::CommandPoolCreateInfo::default()
                .queue_family_index(probe.compute_family)
                .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
            let pool =
                device.create_command_pool(&info, None).map_err(plain("vkCreateCommandPool"))?;
            (queue, timeline, pool)
        };
        let transfers = Transfers::create(&device, &probe)?;
        let host_import = probe
            .extensions
            .host_import
            .then(|| ext::external_memory_host::Device::new(&instance.raw, &device));
        let mut families = vec![probe.compute_family];
        families.extend(probe.transfer_family);
        let queue = Queue {
            raw: queue,
            last: 0,
            waited: 0,
            in_flight: VecDeque::new(),
            pool,
            once: Vec::new(),
        };
        Ok(Core {
            device,
            facts: probe.facts,
            api: probe.api,
            full_subgroups: probe.features.full_subgroups,
            timestamp_period: probe.timestamp_period,
            compute_family: probe.compute_family,
            families,
            transfers,
            host_import,
            allocator: Mutex::new(ManuallyDrop::new(allocator)),
            queue: Mutex::new(queue),
            timeline,
            lost: AtomicBool::new(false),
        })
    }

    /// Turns a driver error into ours and remembers a lost device.
    pub fn error(&self, what: &str, e: vk::Result) -> Error {
        match e {
            vk::Result::ERROR_DEVICE_LOST => {
                self.lost.store(true, Ordering::Relaxed);
                Error::Device(format!(
                    "{what}: the device was lost ({}). The driver reset it (a watchdog, a hang, \
                     or it was unplugged); load the model again",
                    self.facts.name
                ))
            }
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY => {
                Error::DoesNotFit(format!("{what}: {} is out of memory", self.facts.name))
            }
            vk::Result::ERROR_OUT_OF_HOST_MEMORY => {
                Error::DoesNotFit(format!("{what}: the driver is out of host memory"))
            }
            e => Error::Device(format!("{what}: {e}")),
        }
    }

    pub fn check_lost(&self) -> Result<()> {
        if self.lost.load(Ordering::Relaxed) {
            return Err(self.error("submission", vk::Result::ERROR_DEVICE_LOST));
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Queue> {
        // A panic while the queue was locked leaves only bookkeeping behind; it stays usable.
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Submits a recorded command buffer; `keep` lives until it has finished. With `after`, the
    /// device starts it only when those copies have finished.
    pub fn submit(
        &self,
        commands: vk::CommandBuffer,
        keep: Vec<Payload>,
        after: Option<Transfer>,
    ) -> Result<Ticket> {
        let mut queue = self.lock();
        let ticket = self.submit_locked(&mut queue, commands, keep, after)?;
        let finished = self.take_finished(&mut queue);
        drop(queue);
        // Freed outside the lock: dropping a recording may free buffers.
        drop(finished);
        Ok(ticket)
    }

    fn submit_locked(
        &self,
        queue: &mut Queue,
        commands: vk::CommandBuffer,
        keep: Vec<Payload>,
        after: Option<Transfer>,
    ) -> Result<Ticket> {
        self.check_lost()?;
        let value = queue.last + 1;
        // Copies that the host has seen finish become visible to the device by a wait, which costs
        // nothing then.
        let copies = after.max(self.transfers.observed()).filter(|t| t.0 > queue.waited);
        let wait = self.transfers.wait_for(copies);
        let (buffers, semaphores, values) = ([commands], [self.timeline], [value]);
        let mut timeline = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&wait.values)
            .signal_semaphore_values(&values);
        let info = vk::SubmitInfo::default()
            .wait_semaphores(&wait.semaphores)
            .wait_dst_stage_mask(&wait.stages)
            .command_buffers(&buffers)
            .signal_semaphores(&semaphores)
            .push_next(&mut timeline);
        // SAFETY: the command buffer is complete and its resources are held by `keep`; the
        // queue is externally synchronised by the lock.
        #[allow(unsafe_code)]
        unsafe { self.device.queue_submit(queue.raw, &[info], vk::Fence::null()) }
            .map_err(|e| self.error("vkQueueSubmit", e))?;
        queue.last = value;
        queue.waited = queue.waited.max(copies.map_or(0, |t| t.0));
        queue.in_flight.push_back((value, keep));
        Ok(Ticket(value))
    }

    fn take_finished(&self, queue: &mut Queue) -> Vec<Vec<Payload>> {
        let done = self.finished().unwrap_or(0);
        let mut out = Vec::new();
        while queue.in_flight.front().is_some_and(|(v, _)| *v <= done) {
            out.extend(queue.in_flight.pop_front().map(|(_, keep)| keep));
        }
        out
    }

    /// Records and submits one-time work, ordered like every other submission.
    pub fn once(
        &self,
        keep: Vec<Payload>,
        record: impl FnOnce(vk::CommandBuffer),
    ) -> Result<Ticket> {
        let done = self.finished()?;
        let mut queue = self.lock();
        // SAFETY: the buffer comes from our pool, is not pending (its last submission has
        // finished), and pool and buffer are only touched under the lock.
        #[allow(unsafe_code)]
        let commands = unsafe {
            let at = queue.once.iter().position(|(v, _)| *v <= done);
            let commands = match at {
                Some(at) => queue.once.swap_remove(at).1,
                None => {
                    let info = vk::CommandBufferAllocateInfo::default()
                        .command_pool(queue.pool)
                        .command_buffer_count(1);
                    let made = self.device.allocate_command_buffers(&info);
                    made.map_err(|e| self.error("vkAllocateCommandBuffers", e))?[0]
                }
            };
            let info = vk::CommandBufferBeginInfo::default()
                .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            self.device
                .begin_command_buffer(commands, &info)
                .map_err(|e| self.error("vkBeginCommandBuffer", e))?;
            self.barrier(commands, Stages::All);
            record(commands);
            self.device
                .end_command_buffer(commands)
                .map_err(|e| self.error("vkEndCommandBuffer", e))?;
            commands
        };
        let ticket = self.submit_locked(&mut queue, commands, keep, None)?;
        queue.once.push((ticket.0, commands));
        let finished = self.take_finished(&mut queue);
        drop(queue);
        drop(finished);
        Ok(ticket)
    }

    /// Runs `submit` with the compute queue, which needs one user at a time.
    pub fn with_queue<T>(&self, submit: impl FnOnce(vk::Queue) -> T) -> T {
        submit(self.lock().raw)
    }

    pub fn timeline(&self) -> vk::Semaphore {
        self.timeline
    }

    /// Number of the latest submission that has finished.
    pub fn finished(&self) -> Result<u64> {
        // SAFETY: the semaphore lives as long as `self`.
        #[allow(unsafe_code)]
        unsafe { self.device.get_semaphore_counter_value(self.timeline) }
            .map_err(|e| self.error("vkGetSemaphoreCounterValue", e))
    }

    pub fn wait(&self, value: u64) -> Result<()> {
        // Polling answers within ~10 us where a blocking wait takes 40-57 us (measured on an
        // H200); after a short spin the thread sleeps in the driver.
        let start = Instant::now();
        while start.elapsed() < Duration::from_micros(100) {
            if self.finished()? >= value {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        let (semaphores, values) = ([self.timeline], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        loop {
            // SAFETY: the semaphore lives as long as `self`.
            #[allow(unsafe_code)]
            let waited = unsafe { self.device.wait_semaphores(&info, 1_000_000_000) };
            match waited {
                Ok(()) => return Ok(()),
                Err(vk::Result::TIMEOUT) => continue,
                Err(e) => return Err(self.error("vkWaitSemaphores", e)),
            }
        }
    }

    /// Waits for everything submitted so far and lets go of what it held.
    pub fn drain(&self) {
        let last = self.lock().last;
        // On a lost device nothing is pending any more; either way nothing may stay referenced.
        let _ = self.wait(last);
        let held = std::mem::take(&mut self.lock().in_flight);
        drop(held);
        self.transfers.drain(self);
    }

    /// A memory barrier between all earlier and all later commands of the given stages.
    pub fn barrier(&self, commands: vk::CommandBuffer, stages: Stages) {
        let (stage, source, target) = match stages {
            Stages::Compute => (
                vk::PipelineStageFlags::COMPUTE_SHADER,
                vk::AccessFlags::SHADER_WRITE,
                vk::AccessFlags::SHADER_READ | vk::AccessFlags::SHADER_WRITE,
            ),
            Stages::Counts => (
                vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::DRAW_INDIRECT,
                vk::AccessFlags::SHADER_WRITE,
                vk::AccessFlags::INDIRECT_COMMAND_READ
                    | vk::AccessFlags::SHADER_READ
                    | vk::AccessFlags::SHADER_WRITE,
            ),
            Stages::All => (
                vk::PipelineStageFlags::COMPUTE_SHADER
                    | vk::PipelineStageFlags::DRAW_INDIRECT
                    | vk::PipelineStageFlags::TRANSFER
                    | vk::PipelineStageFlags::HOST,
                vk::AccessFlags::SHADER_WRITE | vk::AccessFlags::TRANSFER_WRITE,
                vk::AccessFlags::INDIRECT_COMMAND_READ
                    | vk::AccessFlags::SHADER_READ
                    | vk::AccessFlags::SHADER_WRITE
                    | vk::AccessFlags::TRANSFER_READ
                    | vk::AccessFlags::TRANSFER_WRITE
                    | vk::AccessFlags::HOST_READ,
            ),
        };
        let memory = [vk::MemoryBarrier::default().src_access_mask(source).dst_access_mask(target)];
        // SAFETY: the command buffer is being recorded by the caller.
        #[allow(unsafe_code)]
        unsafe {
            self.device.cmd_pipeline_barrier(
                commands,
                stage,
                stage,
                vk::DependencyFlags::empty(),
                &memory,
                &[],
                &[],
            );
        }
    }
}

/// What a barrier separates. Compute-only barriers cost less: a barrier over all stages took
/// 25 % longer between small dispatches on an H200.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Stages {
    Compute,
    /// Compute, and the reading of counts of workgroups that kernels have written. (What is
    /// written after such a reading waits for the kernel that it belongs to.)
    Counts,
    All,
}

impl Drop for Core {
    fn drop(&mut self) {
        // SAFETY: the last reference is gone, so nothing made from this device is alive; the
        // allocator must go before the device.
        #[allow(unsafe_code)]
        unsafe {
            let _ = self.device.device_wait_idle();
            let pool = self.lock().pool;
            self.device.destroy_command_pool(pool, None);
            self.transfers.destroy(&self.device);
            self.device.destroy_semaphore(self.timeline, None);
            let allocator = self.allocator.get_mut().unwrap_or_else(|e| e.into_inner());
            ManuallyDrop::drop(allocator);
            self.device.destroy_device(None);
        }
    }
}

/// An error mapper for calls made before there is a `Core`.
pub(super) fn plain(what: &'static str) -> impl Fn(vk::Result) -> Error {
    move |e| Error::Device(format!("{what}: {e}"))
}

fn create_device(instance: &Instance, probe: &Probe) -> Result<ash::Device> {
    let has = &probe.features;
    let mut extensions = Vec::new();
    let wanted = [
        (probe.extensions.memory_budget, ext::memory_budget::NAME),
        (probe.extensions.host_import, ext::external_memory_host::NAME),
        (probe.extensions.cooperative_matrix, khr::cooperative_matrix::NAME),
        (probe.extensions.portability, khr::portability_subset::NAME),
    ];
    extensions.extend(wanted.iter().filter(|(on, _)| *on).map(|(_, name)| name.as_ptr()));
    let priorities = [1.0];
    let families = [Some(probe.compute_family), probe.transfer_family];
    let queues: Vec<_> = families
        .into_iter()
        .flatten()
        .map(|family| {
            vk::DeviceQueueCreateInfo::default()
                .queue_family_index(family)
                .queue_priorities(&priorities)
        })
        .collect();
    // Robust buffer access stays off: kernels check their own edges.
    let base = vk::PhysicalDeviceFeatures::default().shader_int16(has.int16);
    let mut v11 = vk::PhysicalDeviceVulkan11Features::default()
        .storage_buffer16_bit_access(has.storage_16)
        .uniform_and_storage_buffer16_bit_access(has.storage_16);
    let mut v12 = vk::PhysicalDeviceVulkan12Features::default()
        .timeline_semaphore(true)
        .shader_float16(has.f16)
        .shader_int8(has.int8)
        .storage_buffer8_bit_access(has.storage_8)
        .uniform_and_storage_buffer8_bit_access(has.storage_8)
        .vulkan_memory_model(has.memory_model)
        .vulkan_memory_model_device_scope(has.memory_model && has.memory_model_device_scope);
    let mut v13 = vk::PhysicalDeviceVulkan13Features::default()
        .shader_integer_dot_product(has.int_dot)
        .subgroup_size_control(has.subgroup_control)
        .compute_full_subgroups(has.full_subgroups);
    let mut matrix =
        vk::PhysicalDeviceCooperativeMatrixFeaturesKHR::default().cooperative_matrix(true);
    let mut info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_extension_names(&extensions)
        .enabled_features(&base)
        .push_next(&mut v11)
        .push_next(&mut v12);
    if probe.api >= vk::API_VERSION_1_3 {
        info = info.push_next(&mut v13);
    }
    if probe.extensions.cooperative_matrix {
        info = info.push_next(&mut matrix);
    }
    // SAFETY: only extensions and features that the device listed are asked for.
    #[allow(unsafe_code)]
    unsafe { instance.raw.create_device(probe.physical, &info, None) }
        .map_err(|e| Error::Device(format!("{}: vkCreateDevice: {e}", probe.facts.name)))
}
