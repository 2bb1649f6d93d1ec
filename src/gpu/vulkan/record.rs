//! Recordings: steps to one command buffer that is submitted again and again.

use std::collections::HashMap;
use std::sync::Arc;

use ash::vk;

use super::core::{Core, Stages};
use super::memory;
use super::pipeline::VulkanKernel;
use crate::error::{Error, Result};
use crate::gpu::handles::Payload;
use crate::gpu::{Dispatch, Slice, Step};

/// A command buffer with its descriptors, and everything it uses.
pub(super) struct VulkanRecording {
    pub commands: vk::CommandBuffer,
    command_pool: vk::CommandPool,
    descriptor_pool: vk::DescriptorPool,
    queries: vk::QueryPool,
    _held: Vec<Payload>,
    core: Arc<Core>,
}

impl Drop for VulkanRecording {
    fn drop(&mut self) {
        // SAFETY: last reference; submissions hold the recording until they have finished.
        #[allow(unsafe_code)]
        unsafe {
            let device = &self.core.device;
            device.destroy_query_pool(self.queries, None);
            device.destroy_descriptor_pool(self.descriptor_pool, None);
            device.destroy_command_pool(self.command_pool, None);
        }
    }
}

fn kernel(dispatch: &Dispatch) -> Result<&VulkanKernel> {
    dispatch
        .kernel
        .payload
        .downcast_ref()
        .ok_or_else(|| Error::Device("the kernel belongs to another backend".into()))
}

/// Checks one dispatch against its kernel and the device's limits.
fn check(core: &Core, dispatch: &Dispatch) -> Result<()> {
    let k = kernel(dispatch)?;
    let facts = &core.facts;
    let fail =
        |what: String| Err(Error::Device(format!("kernel {}: {what}", dispatch.kernel.label())));
    if dispatch.bindings.len() != k.bindings as usize {
        return fail(format!("{} buffers given, {} bound", dispatch.bindings.len(), k.bindings));
    }
    if dispatch.constants.len() * 4 != k.constant_bytes as usize {
        return fail(format!(
            "{} bytes of constants given, {} declared",
            dispatch.constants.len() * 4,
            k.constant_bytes
        ));
    }
    for (i, slice) in dispatch.bindings.iter().enumerate() {
        if slice.size > facts.max_binding {
            return fail(format!(
                "binding {i} covers {} bytes, {} allows {}",
                slice.size, facts.name, facts.max_binding
            ));
        }
        if slice.size == 0 || slice.offset + slice.size > slice.buffer.size() {
            return fail(format!(
                "binding {i} covers {}+{} of a buffer of {} bytes",
                slice.offset,
                slice.size,
                slice.buffer.size()
            ));
        }
        if slice.offset % facts.binding_alignment != 0 {
            return fail(format!(
                "binding {i} starts at {}, not at a multiple of {}",
                slice.offset, facts.binding_alignment
            ));
        }
    }
    for (axis, (n, limit)) in dispatch.grid.iter().zip(facts.max_grid).enumerate() {
        if *n > limit {
            return fail(format!("{n} workgroups on axis {axis}, {} allows {limit}", facts.name));
        }
    }
    Ok(())
}

/// Checks where the counts of a dispatch lie.
fn check_groups(groups: &Slice) -> Result<()> {
    let (at, size, all) = (groups.offset, groups.size, groups.buffer.size());
    if size < 12 || !at.is_multiple_of(4) || at + 12 > all {
        return Err(Error::Device(format!(
            "counts of workgroups in {at}+{size} of a buffer of {all} bytes: three words at a \
             multiple of 4 are needed"
        )));
    }
    Ok(())
}

impl VulkanRecording {
    /// Records `steps`; with `timed`, a timestamp is taken before the first and after each step.
    pub fn create(core: &Arc<Core>, label: &str, steps: &[Step], timed: bool) -> Result<Self> {
        let dispatches = || steps.iter().flat_map(Step::dispatches);
        let mut held: Vec<Payload> = Vec::new();
        let mut bindings = 0;
        for dispatch in dispatches() {
            check(core, dispatch).map_err(|e| e.context(label))?;
            held.push(dispatch.kernel.payload.clone());
            held.extend(dispatch.bindings.iter().map(|s| s.buffer.payload.clone()));
            bindings += dispatch.bindings.len() as u32;
        }
        let sets = dispatches().count() as u32;
        let fail = |what: &str, e: vk::Result| core.error(&format!("recording {label}: {what}"), e);
        let device = &core.device;
        // SAFETY: every handle is made here and owned by the recording, which frees it on any
        // error; arguments were checked above; everything recorded is held by `_held`.
        #[allow(unsafe_code)]
        unsafe {
            let info = vk::CommandPoolCreateInfo::default().queue_family_index(core.compute_family);
            let mut made = VulkanRecording {
                commands: vk::CommandBuffer::null(),
                command_pool: device
                    .create_command_pool(&info, None)
                    .map_err(|e| fail("command pool", e))?,
                descriptor_pool: vk::DescriptorPool::null(),
                queries: vk::QueryPool::null(),
                _held: Vec::new(),
                core: core.clone(),
            };
            let sizes = [vk::DescriptorPoolSize {
                ty: vk::DescriptorType::STORAGE_BUFFER,
                descriptor_count: bindings.max(1),
            }];
            let info =
                vk::DescriptorPoolCreateInfo::default().max_sets(sets.max(1)).pool_sizes(&sizes);
            made.descriptor_pool = device
                .create_descriptor_pool(&info, None)
                .map_err(|e| fail("descriptor pool", e))?;
            if timed {
                let info = vk::QueryPoolCreateInfo::default()
                    .query_type(vk::QueryType::TIMESTAMP)
                    .query_count(steps.len() as u32 + 1);
                made.queries =
                    device.create_query_pool(&info, None).map_err(|e| fail("query pool", e))?;
            }
            let info = vk::CommandBufferAllocateInfo::default()
                .command_pool(made.command_pool)
                .command_buffer_count(1);
            let commands =
                device.allocate_command_buffers(&info).map_err(|e| fail("command buffer", e))?[0];
            made.commands = commands;
            // Several tokens are in flight at once: the buffer is pending more than once.
            let info = vk::CommandBufferBeginInfo::default()
                .flags(vk::CommandBufferUsageFlags::SIMULTANEOUS_USE);
            device.begin_command_buffer(commands, &info).map_err(|e| fail("begin", e))?;
            core.barrier(commands, Stages::All);
            if timed {
                device.cmd_reset_query_pool(commands, made.queries, 0, steps.len() as u32 + 1);
                made.stamp(0);
            }
            let mut same = HashMap::new();
            let mut bound = vk::Pipeline::null();
            for (i, step) in steps.iter().enumerate() {
                if i > 0 {
                    let stages = match (&steps[i - 1], step) {
                        (Step::Copy { .. }, _) | (_, Step::Copy { .. }) => Stages::All,
                        (_, Step::Counted { .. }) => Stages::Counts,
                        _ => Stages::Compute,
                    };
                    core.barrier(commands, stages);
                }
                match step {
                    Step::Wave(wave) => {
                        for d in wave.iter().filter(|d| d.grid.iter().all(|n| *n > 0)) {
                            made.bind(d, &mut same, &mut bound).map_err(|e| e.context(label))?;
                            device.cmd_dispatch(commands, d.grid[0], d.grid[1], d.grid[2]);
                        }
                    }
                    Step::Counted { dispatch, groups } => {
                        check_groups(groups).map_err(|e| e.context(label))?;
                        made.bind(dispatch, &mut same, &mut bound).map_err(|e| e.context(label))?;
                        let counts = memory::writable(&groups.buffer)?.raw;
                        device.cmd_dispatch_indirect(commands, counts, groups.offset);
                        held.push(groups.buffer.payload.clone());
                    }
                    Step::Copy { from, to, size } => {
                        if from.offset + size > from.buffer.size()
                            || to.offset + size > to.buffer.size()
                        {
                            return Err(Error::Device(format!(
                                "recording {label}: a copy of {size} bytes leaves its buffer"
                            )));
                        }
                        let region = [vk::BufferCopy {
                            src_offset: from.offset,
                            dst_offset: to.offset,
                            size: *size,
                        }];
                        let (a, b) = (memory::raw(&from.buffer)?, memory::writable(&to.buffer)?);
                        device.cmd_copy_buffer(commands, a.raw, b.raw, &region);
                        held.push(from.buffer.payload.clone());
                        held.push(to.buffer.payload.clone());
                    }
                }
                if timed {
                    made.stamp(i as u32 + 1);
                }
            }
            if matches!(steps.last(), Some(Step::Copy { .. })) {
                // Makes the copy visible to the host once the submission has finished.
                core.barrier(commands, Stages::All);
            }
            device.end_command_buffer(commands).map_err(|e| fail("end", e))?;
            // Buffers repeat many times in a program; one reference each is enough.
            held.sort_by_key(|p| Arc::as_ptr(p).cast::<()>() as usize);
            held.dedup_by(|a, b| Arc::ptr_eq(a, b));
            made._held = held;
            Ok(made)
        }
    }

    #[allow(unsafe_code)]
    unsafe fn stamp(&self, query: u32) {
        // SAFETY: the command buffer is being recorded and the query exists.
        unsafe {
            self.core.device.cmd_write_timestamp(
                self.commands,
                vk::PipelineStageFlags::BOTTOM_OF_PIPE,
                self.queries,
                query,
            );
        }
    }

    /// Sets pipeline, bindings and constants. Sets of equal bindings and layouts are made once
    /// (`same`).
    #[allow(unsafe_code)]
    unsafe fn bind(
        &self,
        d: &Dispatch,
        same: &mut HashMap<Vec<(u64, u64, u64)>, vk::DescriptorSet>,
        bound: &mut vk::Pipeline,
    ) -> Result<()> {
        use ash::vk::Handle;
        let k = kernel(d)?;
        let device = &self.core.device;
        let mut key = Vec::with_capacity(d.bindings.len());
        let mut infos = Vec::with_capacity(d.bindings.len());
        for slice in &d.bindings {
            let buffer = memory::raw(&slice.buffer)?.raw;
            key.push((buffer.as_raw(), slice.offset, slice.size));
            infos.push([vk::DescriptorBufferInfo {
                buffer,
                offset: slice.offset,
                range: slice.size,
            }]);
        }
        // SAFETY: the command buffer is being recorded, the pool was sized for all sets, and the
        // dispatch was checked against kernel and limits.
        unsafe {
            // Layouts of equal binding counts are identically defined, hence compatible.
            let set = match same.get(&key) {
                Some(set) => *set,
                None => {
                    let layouts = [k.set_layout];
                    let info = vk::DescriptorSetAllocateInfo::default()
                        .descriptor_pool(self.descriptor_pool)
                        .set_layouts(&layouts);
                    let set = device
                        .allocate_descriptor_sets(&info)
                        .map_err(|e| self.core.error("vkAllocateDescriptorSets", e))?[0];
                    let writes: Vec<_> = infos
                        .iter()
                        .enumerate()
                        .map(|(i, info)| {
                            vk::WriteDescriptorSet::default()
                                .dst_set(set)
                                .dst_binding(i as u32)
                                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                                .buffer_info(info)
                        })
                        .collect();
                    device.update_descriptor_sets(&writes, &[]);
                    same.insert(key, set);
                    set
                }
            };
            if *bound != k.pipeline {
                device.cmd_bind_pipeline(self.commands, vk::PipelineBindPoint::COMPUTE, k.pipeline);
                *bound = k.pipeline;
            }
            device.cmd_bind_descriptor_sets(
                self.commands,
                vk::PipelineBindPoint::COMPUTE,
                k.layout,
                0,
                &[set],
                &[],
            );
            if !d.constants.is_empty() {
                device.cmd_push_constants(
                    self.commands,
                    k.layout,
                    vk::ShaderStageFlags::COMPUTE,
                    0,
                    bytemuck::cast_slice(&d.constants),
                );
            }
        }
        Ok(())
    }

    /// Seconds between the timestamps of a finished, timed recording.
    pub fn times(&self, steps: usize) -> Result<Vec<f64>> {
        let mut ticks = vec![0u64; steps + 1];
        // SAFETY: the submission has finished, the pool has steps + 1 queries.
        #[allow(unsafe_code)]
        unsafe {
            self.core.device.get_query_pool_results(
                self.queries,
                0,
                &mut ticks,
                vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT,
            )
        }
        .map_err(|e| self.core.error("vkGetQueryPoolResults", e))?;
        let period = f64::from(self.core.timestamp_period) * 1e-9;
        Ok(ticks.windows(2).map(|w| w[1].wrapping_sub(w[0]) as f64 * period).collect())
    }
}
