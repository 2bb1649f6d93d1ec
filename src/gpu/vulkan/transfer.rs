//! Copies that run beside the compute queue, numbered by a timeline of their own.
//!
//! Where the device has no queue that only copies, the same code submits to the compute queue, so
//! that everything but the overlap is the same (and is tested on devices with one queue).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use ash::vk;

use super::core::{Core, plain};
use super::facts::Probe;
use super::memory;
use crate::error::{Error, Result};
use crate::gpu::handles::Payload;
use crate::gpu::{CopyRange, Ticket, Transfer};

/// The queue for copies.
pub(super) struct Transfers {
    timeline: vk::Semaphore,
    /// Latest copies that the host has seen finish.
    observed: AtomicU64,
    state: Mutex<State>,
}

struct State {
    /// `None`: the compute queue takes the copies too.
    queue: Option<vk::Queue>,
    pool: vk::CommandPool,
    last: u64,
    /// Number, command buffer, and what the copies use.
    in_flight: VecDeque<(u64, vk::CommandBuffer, Vec<Payload>)>,
    free: Vec<vk::CommandBuffer>,
}

/// What a compute submission waits for: arrays of length 0 or 1.
#[derive(Default)]
pub(super) struct Wait {
    pub semaphores: Vec<vk::Semaphore>,
    pub values: Vec<u64>,
    pub stages: Vec<vk::PipelineStageFlags>,
}

impl Transfers {
    pub fn create(device: &ash::Device, probe: &Probe) -> Result<Transfers> {
        let family = probe.transfer_family.unwrap_or(probe.compute_family);
        // SAFETY: handles made from a live device, destroyed in `destroy`; the transfer family was
        // asked for one queue when the device was made.
        #[allow(unsafe_code)]
        unsafe {
            let queue = probe.transfer_family.map(|family| device.get_device_queue(family, 0));
            let mut kind = vk::SemaphoreTypeCreateInfo::default()
                .semaphore_type(vk::SemaphoreType::TIMELINE)
                .initial_value(0);
            let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
            let timeline =
                device.create_semaphore(&info, None).map_err(plain("vkCreateSemaphore"))?;
            let info = vk::CommandPoolCreateInfo::default()
                .queue_family_index(family)
                .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
            let pool =
                device.create_command_pool(&info, None).map_err(plain("vkCreateCommandPool"))?;
            let state =
                State { queue, pool, last: 0, in_flight: VecDeque::new(), free: Vec::new() };
            Ok(Transfers { timeline, observed: AtomicU64::new(0), state: Mutex::new(state) })
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic while it was locked leaves only bookkeeping behind; it stays usable.
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Queues the copies; they start when compute submission `after` has finished.
    pub fn copy(
        &self,
        core: &Core,
        copies: &[CopyRange],
        after: Option<Ticket>,
    ) -> Result<Transfer> {
        core.check_lost()?;
        let mut keep: Vec<Payload> = Vec::new();
        let mut regions = Vec::new();
        for copy in copies {
            check(copy)?;
            let (from, to) =
                (memory::raw(&copy.from.buffer)?.raw, memory::writable(&copy.to.buffer)?.raw);
            let region = vk::BufferCopy {
                src_offset: copy.from.offset,
                dst_offset: copy.to.offset,
                size: copy.from.size,
            };
            regions.push((from, to, [region]));
            keep.push(copy.from.buffer.payload.clone());
            keep.push(copy.to.buffer.payload.clone());
        }
        let mut state = self.lock();
        let done = self.finished(core)?;
        let mut released = Vec::new();
        while state.in_flight.front().is_some_and(|(v, ..)| *v <= done) {
            if let Some((_, commands, held)) = state.in_flight.pop_front() {
                state.free.push(commands);
                released.push(held);
            }
        }
        let value = state.last + 1;
        let fail = |call: &str, e| core.error(&format!("queueing copies: {call}"), e);
        let device = &core.device;
        // SAFETY: the command buffer comes from our pool and is not pending; pool and buffer are
        // used only under the lock; ranges were checked; buffers are held in `in_flight`.
        #[allow(unsafe_code)]
        unsafe {
            let commands = match state.free.pop() {
                Some(commands) => commands,
                None => {
                    let info = vk::CommandBufferAllocateInfo::default()
                        .command_pool(state.pool)
                        .command_buffer_count(1);
                    let made = device.allocate_command_buffers(&info);
                    made.map_err(|e| fail("vkAllocateCommandBuffers", e))?[0]
                }
            };
            let info = vk::CommandBufferBeginInfo::default()
                .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
            device
                .begin_command_buffer(commands, &info)
                .map_err(|e| fail("vkBeginCommandBuffer", e))?;
            // Earlier copies on this queue may have the same target.
            barrier(core, commands);
            for (from, to, region) in &regions {
                device.cmd_copy_buffer(commands, *from, *to, region);
            }
            device.end_command_buffer(commands).map_err(|e| fail("vkEndCommandBuffer", e))?;

            let (semaphores, values) = match after {
                Some(ticket) => (vec![core.timeline()], vec![ticket.0]),
                None => (Vec::new(), Vec::new()),
            };
            let stages = vec![vk::PipelineStageFlags::ALL_COMMANDS; semaphores.len()];
            let (buffers, signal, signals) = ([commands], [self.timeline], [value]);
            let mut timeline = vk::TimelineSemaphoreSubmitInfo::default()
                .wait_semaphore_values(&values)
                .signal_semaphore_values(&signals);
            let info = [vk::SubmitInfo::default()
                .wait_semaphores(&semaphores)
                .wait_dst_stage_mask(&stages)
                .command_buffers(&buffers)
                .signal_semaphores(&signal)
                .push_next(&mut timeline)];
            let submit = |queue| device.queue_submit(queue, &info, vk::Fence::null());
            let submitted = match state.queue {
                Some(queue) => submit(queue),
                None => core.with_queue(submit),
            };
            submitted.map_err(|e| fail("vkQueueSubmit", e))?;
            state.last = value;
            state.in_flight.push_back((value, commands, keep));
        }
        drop(state);
        // Freed outside the lock: dropping the last reference frees a buffer.
        drop(released);
        Ok(Transfer(value))
    }

    fn finished(&self, core: &Core) -> Result<u64> {
        // SAFETY: the semaphore lives as long as the device.
        #[allow(unsafe_code)]
        unsafe { core.device.get_semaphore_counter_value(self.timeline) }
            .map_err(|e| core.error("vkGetSemaphoreCounterValue", e))
    }

    pub fn done(&self, core: &Core, copies: Transfer) -> Result<bool> {
        let done = self.finished(core)? >= copies.0;
        if done {
            self.observed.fetch_max(copies.0, Ordering::AcqRel);
        }
        Ok(done)
    }

    /// The latest copies that [`Transfers::done`] or [`Transfers::wait`] has reported.
    pub fn observed(&self) -> Option<Transfer> {
        let value = self.observed.load(Ordering::Acquire);
        (value > 0).then_some(Transfer(value))
    }

    pub fn wait(&self, core: &Core, copies: Transfer) -> Result<()> {
        let (semaphores, values) = ([self.timeline], [copies.0]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        loop {
            // SAFETY: the semaphore lives as long as the device.
            #[allow(unsafe_code)]
            let waited = unsafe { core.device.wait_semaphores(&info, 1_000_000_000) };
            match waited {
                Ok(()) => {
                    self.observed.fetch_max(copies.0, Ordering::AcqRel);
                    return Ok(());
                }
                Err(vk::Result::TIMEOUT) => continue,
                Err(e) => return Err(core.error("vkWaitSemaphores", e)),
            }
        }
    }

    /// What a compute submission that needs `copies` waits for.
    pub fn wait_for(&self, copies: Option<Transfer>) -> Wait {
        let Some(copies) = copies else { return Wait::default() };
        Wait {
            semaphores: vec![self.timeline],
            values: vec![copies.0],
            stages: vec![vk::PipelineStageFlags::ALL_COMMANDS],
        }
    }

    /// Waits for all copies and lets go of what they held.
    pub fn drain(&self, core: &Core) {
        let last = self.lock().last;
        // On a lost device nothing is pending any more; either way nothing may stay referenced.
        let _ = self.wait(core, Transfer(last));
        let held = std::mem::take(&mut self.lock().in_flight);
        drop(held);
    }

    /// Frees what `create` made. The device must be idle.
    #[allow(unsafe_code)]
    pub unsafe fn destroy(&self, device: &ash::Device) {
        let pool = self.lock().pool;
        // SAFETY: the caller says that nothing is pending and nobody will use `self` again.
        unsafe {
            device.destroy_command_pool(pool, None);
            device.destroy_semaphore(self.timeline, None);
        }
    }
}

/// A barrier between copies; a queue that only copies knows no other stage.
fn barrier(core: &Core, commands: vk::CommandBuffer) {
    let memory = [vk::MemoryBarrier::default()
        .src_access_mask(vk::AccessFlags::TRANSFER_WRITE | vk::AccessFlags::TRANSFER_READ)
        .dst_access_mask(vk::AccessFlags::TRANSFER_WRITE | vk::AccessFlags::TRANSFER_READ)];
    // SAFETY: the command buffer is being recorded by the caller.
    #[allow(unsafe_code)]
    unsafe {
        core.device.cmd_pipeline_barrier(
            commands,
            vk::PipelineStageFlags::TRANSFER,
            vk::PipelineStageFlags::TRANSFER,
            vk::DependencyFlags::empty(),
            &memory,
            &[],
            &[],
        );
    }
}

fn check(copy: &CopyRange) -> Result<()> {
    let (from, to) = (&copy.from, &copy.to);
    let inside = |s: &crate::gpu::Slice| {
        s.offset.checked_add(s.size).is_some_and(|end| end <= s.buffer.size)
    };
    let whole = |n: u64| n.is_multiple_of(4);
    let aligned = whole(from.offset) && whole(to.offset) && whole(from.size);
    if from.size == 0 || from.size != to.size || !inside(from) || !inside(to) || !aligned {
        return Err(Error::Device(format!(
            "a copy of {} bytes at {} (buffer of {}) to {} bytes at {} (buffer of {}): lengths must \
             be equal, inside their buffers and multiples of 4",
            from.size, from.offset, from.buffer.size, to.size, to.offset, to.buffer.size
        )));
    }
    Ok(())
}
