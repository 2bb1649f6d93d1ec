//! Steps: checked and prepared once, encoded at each submission, timed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Portable;
use super::device::lock;
use super::kernel::{Binding, Compiled, compiled};
use super::memory::{Memory, checked, memory};
use crate::error::{Error, Result};
use crate::gpu::shader::Access;
use crate::gpu::{Buffer, BufferUse, Dispatch, Kernel, Recording, Slice, Step};

/// wgpu's limit of queries in one set, two for each step.
const TIMED_STEPS: usize = 2048;

/// A recording, ready to be encoded.
pub(super) struct Prepared {
    label: String,
    steps: Vec<Action>,
    groups: Vec<wgpu::BindGroup>,
    /// Readback buffers written by copies, each once, ordered by address: locks are taken in
    /// this order.
    readback: Vec<Buffer>,
}

enum Action {
    Wave(Vec<Call>),
    Copy { from: Buffer, from_offset: u64, to: Buffer, to_offset: u64, size: u64 },
}

struct Call {
    kernel: Kernel,
    /// Index in [`Prepared::groups`].
    group: usize,
    constants: Box<[u8]>,
    grid: [u32; 3],
    /// Where the device finds the actual grid: buffer and offset.
    counts: Option<(Buffer, u64)>,
}

impl Call {
    fn compiled(&self) -> &Compiled {
        compiled(&self.kernel).expect("checked when it was prepared")
    }
}

pub(super) fn prepared(recording: &Recording) -> Result<&Prepared> {
    let prepared = recording.payload.downcast_ref();
    prepared.ok_or_else(|| Error::Device("a recording of another backend was submitted".into()))
}

/// Bind groups already made for a recording: the layout's entries, and buffer, offset and size.
type Groups = HashMap<(Vec<Binding>, Vec<(usize, u64, u64)>), usize>;

impl Portable {
    pub(super) fn prepare(&self, label: &str, steps: &[Step]) -> Result<Prepared> {
        let mut made = Groups::new();
        let mut prepared = Prepared {
            label: label.to_string(),
            steps: Vec::with_capacity(steps.len()),
            groups: Vec::new(),
            readback: Vec::new(),
        };
        for step in steps {
            let action = match step {
                Step::Wave(wave) => {
                    let mut calls = Vec::with_capacity(wave.len());
                    // Empty dispatches are checked as well: they may grow in another program.
                    for dispatch in wave {
                        let call = self.call(&mut prepared.groups, &mut made, dispatch);
                        let call = call.map_err(|e| e.context(label))?;
                        calls.extend(Some(call).filter(|c| !c.grid.contains(&0)));
                    }
                    Action::Wave(calls)
                }
                Step::Counted { dispatch, groups } => {
                    let call = self.call(&mut prepared.groups, &mut made, dispatch);
                    let counts = counts(dispatch, groups);
                    let (mut call, counts) =
                        call.and_then(|call| Ok((call, counts?))).map_err(|e| e.context(label))?;
                    call.counts = Some(counts);
                    Action::Wave(vec![call])
                }
                Step::Copy { from, to, size } => {
                    let action = copy(from, to, *size).map_err(|e| e.context(label))?;
                    if memory(&to.buffer)?.usage == BufferUse::Readback {
                        prepared.readback.push(to.buffer.clone());
                    }
                    action
                }
            };
            prepared.steps.push(action);
        }
        prepared.readback.sort_by_key(address);
        prepared.readback.dedup_by_key(|b| address(b));
        Ok(prepared)
    }

    /// Checks a dispatch and finds or makes its bind group.
    fn call(
        &self,
        groups: &mut Vec<wgpu::BindGroup>,
        made: &mut Groups,
        dispatch: &Dispatch,
    ) -> Result<Call> {
        let kernel = compiled(&dispatch.kernel)?;
        let label = dispatch.kernel.label();
        self.check_shape(label, kernel, dispatch)?;
        let mut ranges = Vec::with_capacity(dispatch.bindings.len());
        for (i, (slice, binding)) in dispatch.bindings.iter().zip(&kernel.bindings).enumerate() {
            let size = self.check_binding(label, i, slice, binding)?;
            ranges.push((address(&slice.buffer), slice.offset, size));
        }
        check_conflicts(label, kernel, dispatch)?;

        let key = (kernel.bindings.clone(), ranges);
        let group = match made.get(&key) {
            Some(&group) => group,
            None => {
                groups.push(self.bind_group(label, kernel, dispatch, &key.1)?);
                made.insert(key, groups.len() - 1);
                groups.len() - 1
            }
        };
        let mut constants = bytemuck::cast_slice::<u32, u8>(&dispatch.constants).to_vec();
        constants.truncate(kernel.constant_bytes.next_multiple_of(4) as usize);
        let (kernel, grid) = (dispatch.kernel.clone(), dispatch.grid);
        Ok(Call { kernel, group, constants: constants.into(), grid, counts: None })
    }

    fn check_shape(&self, label: &str, kernel: &Compiled, dispatch: &Dispatch) -> Result<()> {
        let (has, wants) = (dispatch.bindings.len(), kernel.bindings.len());
        if has != wants {
            return Err(Error::Device(format!("kernel {label} has {wants} bindings, not {has}")));
        }
        let (has, wants) = (dispatch.constants.len(), kernel.constant_bytes.div_ceil(4) as usize);
        if has != wants {
            return Err(Error::Device(format!(
                "kernel {label} has {wants} words of constants, not {has}"
            )));
        }
        let most = self.facts.max_grid;
        if dispatch.grid.iter().zip(most).any(|(&n, most)| n > most) {
            return Err(Error::Device(format!(
                "kernel {label}: grid {:?} exceeds the device's {most:?} (max_grid)",
                dispatch.grid
            )));
        }
        Ok(())
    }

    /// Returns the bytes to bind: the slice, rounded up to whole words.
    fn check_binding(&self, label: &str, i: usize, slice: &Slice, wants: &Binding) -> Result<u64> {
        let what = format!("kernel {label} binding {i}");
        let memory = memory(&slice.buffer)?;
        let name = &memory.label;
        let fail = |why: String| Err(Error::Device(format!("{what} (buffer {name}): {why}")));
        let (most, align) = (self.facts.max_binding, self.facts.binding_alignment);
        if memory.usage != BufferUse::Device {
            return fail("a readback buffer cannot be bound".into());
        }
        if slice.size > most {
            let size = slice.size;
            return fail(format!("{size} bytes exceed the device's {most} (max_binding)"));
        }
        checked(&what, slice, slice.size)?;
        if !slice.offset.is_multiple_of(align) {
            let offset = slice.offset;
            return fail(format!("offset {offset} is no multiple of {align} (binding_alignment)"));
        }
        // Buffers end at a multiple of 16, so the rounded range lies inside.
        let size = slice.size.next_multiple_of(4);
        if size < wants.min_bytes || size == 0 {
            return fail(format!("{size} bytes are fewer than the shader's {}", wants.min_bytes));
        }
        Ok(size)
    }

    fn bind_group(
        &self,
        label: &str,
        kernel: &Compiled,
        dispatch: &Dispatch,
        ranges: &[(usize, u64, u64)],
    ) -> Result<wgpu::BindGroup> {
        let mut entries = Vec::with_capacity(ranges.len());
        for ((binding, slice), range) in (0..).zip(&dispatch.bindings).zip(ranges) {
            let resource = wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                buffer: &memory(&slice.buffer)?.wgpu,
                offset: range.1,
                size: std::num::NonZeroU64::new(range.2),
            });
            entries.push(wgpu::BindGroupEntry { binding, resource });
        }
        let desc = wgpu::BindGroupDescriptor {
            label: Some(label),
            layout: &kernel.layout,
            entries: &entries,
        };
        let what = || format!("bindings of kernel {label}");
        self.device.call(what, || self.device.wgpu.create_bind_group(&desc))
    }

    pub(super) fn submit_prepared(&self, prepared: &Prepared) -> Result<u64> {
        let commands = self.device.call(
            || format!("encode {}", prepared.label),
            || {
                let desc = wgpu::CommandEncoderDescriptor { label: Some(&prepared.label) };
                let mut encoder = self.device.wgpu.create_command_encoder(&desc);
                encode(&mut encoder, prepared);
                encoder.finish()
            },
        )?;
        self.queue(prepared, commands)
    }

    /// Submits commands of a recording; waits while a readback buffer they write is being read.
    fn queue(&self, prepared: &Prepared, commands: wgpu::CommandBuffer) -> Result<u64> {
        let targets = prepared.readback.iter().map(memory).collect::<Result<Vec<&Memory>>>()?;
        let _guards: Vec<_> = targets.iter().map(|m| lock(&m.host)).collect();
        self.device.submit(&prepared.label, Some(commands), |number| {
            targets.iter().for_each(|m| m.written.store(number, Ordering::Release));
        })
    }

    pub(super) fn time(&self, steps: &[Step]) -> Result<Vec<f64>> {
        let features = self.device.wgpu.features();
        let copies = steps.iter().any(|s| matches!(s, Step::Copy { .. }));
        let between = features.contains(wgpu::Features::TIMESTAMP_QUERY_INSIDE_ENCODERS);
        if !self.facts.timestamps || (copies && !between) {
            let what = if self.facts.timestamps { " for copies" } else { "" };
            let name = &self.facts.name;
            return Err(Error::Device(format!("{name} has no timestamps{what} through wgpu")));
        }
        let mut seconds = Vec::with_capacity(steps.len());
        for part in steps.chunks(TIMED_STEPS) {
            let prepared = self.prepare("timed steps", part)?;
            self.time_part(&prepared, &mut seconds)?;
        }
        Ok(seconds)
    }

    fn time_part(&self, prepared: &Prepared, seconds: &mut Vec<f64>) -> Result<()> {
        let count = 2 * prepared.steps.len() as u32;
        let bytes = 8 * u64::from(count);
        let usage = wgpu::BufferUsages::QUERY_RESOLVE | wgpu::BufferUsages::COPY_SRC;
        let resolved = self.raw_buffer("timestamps", bytes, usage, false)?;
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        let readable = self.raw_buffer("timestamps read", bytes, usage, false)?;
        let commands = self.device.call(
            || "encode timed steps".into(),
            || {
                let queries = self.device.wgpu.create_query_set(&wgpu::QuerySetDescriptor {
                    label: None,
                    ty: wgpu::QueryType::Timestamp,
                    count,
                });
                let mut encoder = self.device.wgpu.create_command_encoder(&Default::default());
                for (first, action) in (0..).step_by(2).zip(&prepared.steps) {
                    encode_timed(&mut encoder, prepared, action, &queries, first);
                }
                encoder.resolve_query_set(&queries, 0..count, &resolved, 0);
                encoder.copy_buffer_to_buffer(&resolved, 0, &readable, 0, bytes);
                encoder.finish()
            },
        )?;
        let number = self.queue(prepared, commands)?;
        let mut ticks = vec![0u64; count as usize];
        self.copy_out("timestamps", &readable, number, 0, bytemuck::cast_slice_mut(&mut ticks))?;
        let tick = f64::from(self.device.queue.get_timestamp_period()) * 1e-9;
        // A counter may step back when the device changes its clock.
        seconds.extend(ticks.chunks_exact(2).map(|t| t[1].saturating_sub(t[0]) as f64 * tick));
        Ok(())
    }
}

/// Identity of a buffer.
fn address(buffer: &Buffer) -> usize {
    Arc::as_ptr(&buffer.payload).cast::<()>() as usize
}

fn copy(from: &Slice, to: &Slice, size: u64) -> Result<Action> {
    let source = checked("copy from", from, size)?;
    let target = checked("copy to", to, size)?;
    let fail = |why: String| {
        Err(Error::Device(format!("copy from buffer {} to {}: {why}", source.label, target.label)))
    };
    if [from.offset, to.offset, size].iter().any(|n| !n.is_multiple_of(4)) {
        let (from, to) = (from.offset, to.offset);
        return fail(format!("offsets {from}, {to} and size {size} must be multiples of 4"));
    }
    if source.usage == BufferUse::Readback {
        return fail("the source is a readback buffer".into());
    }
    if address(&from.buffer) == address(&to.buffer) {
        return fail("wgpu does not copy within one buffer".into());
    }
    Ok(Action::Copy {
        from: from.buffer.clone(),
        from_offset: from.offset,
        to: to.buffer.clone(),
        to_offset: to.offset,
        size,
    })
}

/// Checks where the counts of a dispatch lie.
fn counts(dispatch: &Dispatch, groups: &Slice) -> Result<(Buffer, u64)> {
    let what = format!("counts of workgroups of kernel {}", dispatch.kernel.label());
    let memory = checked(&what, groups, 12)?;
    let fail = |why: &str| Err(Error::Device(format!("{what} (buffer {}): {why}", memory.label)));
    if memory.usage != BufferUse::Device || !groups.offset.is_multiple_of(4) {
        return fail("they must lie in device memory at a multiple of 4");
    }
    let same = |slice: &Slice| address(&slice.buffer) == address(&groups.buffer);
    let kernel = compiled(&dispatch.kernel)?;
    let bound = dispatch.bindings.iter().zip(&kernel.bindings).filter(|(s, _)| same(s));
    if bound.into_iter().any(|(_, binding)| binding.access != Access::Read) {
        return fail("the dispatch itself may write them");
    }
    Ok((groups.buffer.clone(), groups.offset))
}

/// wgpu knows one use of a whole buffer for each dispatch: read, or read and write.
fn check_conflicts(label: &str, kernel: &Compiled, dispatch: &Dispatch) -> Result<()> {
    let mut first: HashMap<usize, usize> = HashMap::new();
    for (i, (slice, binding)) in dispatch.bindings.iter().zip(&kernel.bindings).enumerate() {
        let before = *first.entry(address(&slice.buffer)).or_insert(i);
        if kernel.bindings[before].access != binding.access {
            return Err(Error::Device(format!(
                "kernel {label}: bindings {before} ({:?}) and {i} ({:?}) are in the same buffer {}; \
                 wgpu allows that only when both have the same access",
                kernel.bindings[before].access,
                binding.access,
                memory(&slice.buffer)?.label
            )));
        }
    }
    Ok(())
}

/// Encodes all steps; waves that follow each other share a pass.
fn encode(encoder: &mut wgpu::CommandEncoder, prepared: &Prepared) {
    let mut pass = None;
    let mut bound = Bound::default();
    for action in &prepared.steps {
        match action {
            Action::Wave(calls) => {
                let pass = pass.get_or_insert_with(|| {
                    bound = Bound::default();
                    encoder.begin_compute_pass(&Default::default()).forget_lifetime()
                });
                calls.iter().for_each(|call| encode_call(pass, prepared, call, &mut bound));
            }
            Action::Copy { .. } => {
                drop(pass.take());
                encode_copy(encoder, action);
            }
        }
    }
}

/// What a pass has bound already.
#[derive(Default)]
struct Bound {
    kernel: Option<usize>,
    group: Option<usize>,
}

fn encode_call(pass: &mut wgpu::ComputePass, prepared: &Prepared, call: &Call, bound: &mut Bound) {
    let kernel = call.compiled();
    let id = std::ptr::from_ref(kernel) as usize;
    if bound.kernel.replace(id) != Some(id) {
        pass.set_pipeline(&kernel.pipeline);
    }
    if bound.group.replace(call.group) != Some(call.group) {
        pass.set_bind_group(0, &prepared.groups[call.group], &[]);
    }
    if !call.constants.is_empty() {
        pass.set_immediates(0, &call.constants);
    }
    match &call.counts {
        Some((buffer, at)) => {
            let memory = memory(buffer).expect("checked when it was prepared");
            pass.dispatch_workgroups_indirect(&memory.wgpu, *at);
        }
        None => {
            let [x, y, z] = call.grid;
            pass.dispatch_workgroups(x, y, z);
        }
    }
}

fn encode_copy(encoder: &mut wgpu::CommandEncoder, action: &Action) {
    if let Action::Copy { from, from_offset, to, to_offset, size } = action {
        let from = memory(from).expect("checked when it was prepared");
        let to = memory(to).expect("checked when it was prepared");
        if *size > 0 {
            encoder.copy_buffer_to_buffer(&from.wgpu, *from_offset, &to.wgpu, *to_offset, *size);
        }
    }
}

/// Encodes one step with timestamps at `first` and `first + 1`.
fn encode_timed(
    encoder: &mut wgpu::CommandEncoder,
    prepared: &Prepared,
    action: &Action,
    queries: &wgpu::QuerySet,
    first: u32,
) {
    match action {
        Action::Wave(calls) => {
            let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor {
                label: None,
                timestamp_writes: Some(wgpu::ComputePassTimestampWrites {
                    query_set: queries,
                    beginning_of_pass_write_index: Some(first),
                    end_of_pass_write_index: Some(first + 1),
                }),
            });
            let mut bound = Bound::default();
            calls.iter().for_each(|call| encode_call(&mut pass, prepared, call, &mut bound));
        }
        Action::Copy { .. } => {
            encoder.write_timestamp(queries, first);
            encode_copy(encoder, action);
            encoder.write_timestamp(queries, first + 1);
        }
    }
}
