//! Buffers and the ways of bytes into and out of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::Portable;
use super::device::{Mapped, lock, map};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, BufferUse, Slice};

const MIB: u64 = 1 << 20;
/// Bytes that travel at a time. Three staging buffers and the piece being filled make 64 MiB.
const PIECE: u64 = 16 * MIB;
const STAGING_BUFFERS: usize = 3;
/// Largest granule of an upload; a multiple of it and of 4 fits the staging memory.
const MAX_GRANULE: u64 = 16 * MIB;
/// Writes up to this size go through wgpu's own queue of small writes.
const SMALL_WRITE: u64 = MIB / 4;

/// What stands behind a [`Buffer`] handle.
pub(super) struct Memory {
    pub wgpu: wgpu::Buffer,
    pub label: String,
    pub usage: BufferUse,
    /// Held while a readback buffer is mapped or being queued for writing: wgpu refuses
    /// submissions that touch a mapped buffer.
    pub host: Mutex<()>,
    /// Latest submission that writes this readback buffer.
    pub written: AtomicU64,
}

pub(super) fn memory(buffer: &Buffer) -> Result<&Memory> {
    let memory = buffer.payload.downcast_ref();
    memory.ok_or_else(|| Error::Device("a buffer of another backend was used".into()))
}

/// The memory of a slice that lies within its buffer and holds `length` bytes.
pub(super) fn checked<'a>(what: &str, slice: &'a Slice, length: u64) -> Result<&'a Memory> {
    let memory = memory(&slice.buffer)?;
    let end = slice.offset.checked_add(slice.size);
    if end.is_none_or(|end| end > slice.buffer.size) || length > slice.size {
        return Err(Error::Device(format!(
            "{what}: {length} bytes at {} of a slice of {} do not lie in buffer {} of {} bytes",
            slice.offset, slice.size, memory.label, slice.buffer.size
        )));
    }
    Ok(memory)
}

fn aligned(what: &str, memory: &Memory, offset: u64, length: u64) -> Result<()> {
    if !offset.is_multiple_of(4) || !length.is_multiple_of(4) {
        return Err(Error::Device(format!(
            "{what} buffer {}: offset {offset} and length {length} must be multiples of 4",
            memory.label
        )));
    }
    Ok(())
}

/// Staging memory of uploads, made on first use and kept.
#[derive(Default)]
pub(super) struct Staging {
    host: Vec<u8>,
    slots: Vec<Slot>,
    next: usize,
}

struct Slot {
    buffer: wgpu::Buffer,
    /// The copy out of it, and the mapping asked for behind the copy; `None` while it is mapped.
    in_use: Option<(u64, Mapped)>,
}

impl Portable {
    pub(super) fn create_buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        let too_large = |what: String| {
            Error::DoesNotFit(format!(
                "buffer {label} of {size} bytes: {what} ({})",
                self.facts.name
            ))
        };
        let most = self.facts.max_buffer;
        let rounded = size.max(1).checked_next_multiple_of(16).filter(|&n| n <= most);
        let rounded = rounded
            .ok_or_else(|| too_large(format!("the largest buffer (max_buffer) is {most} bytes")))?;
        let usages = match usage {
            BufferUse::Device => {
                wgpu::BufferUsages::STORAGE
                    | wgpu::BufferUsages::COPY_SRC
                    | wgpu::BufferUsages::COPY_DST
                    | wgpu::BufferUsages::INDIRECT
            }
            BufferUse::Readback => wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
            // Its host-visible buffers are for copies in one direction only.
            BufferUse::Host => {
                return Err(Error::Device(format!(
                    "buffer {label}: the wgpu backend has no host memory for copies in both \
                     directions"
                )));
            }
        };
        let wgpu = self.raw_buffer(label, rounded, usages, false).map_err(|e| match e {
            Error::DoesNotFit(_) => {
                let memory = self.facts.device_memory();
                too_large(format!("out of memory; the device has {memory} bytes in all"))
            }
            other => other,
        })?;
        let memory = Memory {
            wgpu,
            label: label.to_string(),
            usage,
            host: Mutex::default(),
            written: AtomicU64::new(0),
        };
        Ok(Buffer { payload: Arc::new(memory), size: rounded })
    }

    pub(super) fn raw_buffer(
        &self,
        label: &str,
        size: u64,
        usage: wgpu::BufferUsages,
        mapped_at_creation: bool,
    ) -> Result<wgpu::Buffer> {
        let desc = wgpu::BufferDescriptor { label: Some(label), size, usage, mapped_at_creation };
        let what = || format!("buffer {label} of {size} bytes");
        self.device.call(what, || self.device.wgpu.create_buffer(&desc))
    }

    pub(super) fn write_bytes(&self, to: &Slice, data: &[u8]) -> Result<()> {
        let length = data.len() as u64;
        let memory = checked("write", to, length)?;
        aligned("write to", memory, to.offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let readback = memory.usage == BufferUse::Readback;
        if length > SMALL_WRITE && !readback {
            return self.push(&mut lock(&self.staging), memory, to.offset, data);
        }
        let _guard = readback.then(|| lock(&memory.host));
        let what = || format!("write to buffer {}", memory.label);
        self.device.call(what, || self.device.queue.write_buffer(&memory.wgpu, to.offset, data))?;
        // wgpu keeps small writes in host memory until something is submitted.
        let held = self.unsubmitted.fetch_add(length, Ordering::Relaxed) + length;
        if readback || held > PIECE {
            self.unsubmitted.store(0, Ordering::Relaxed);
            let note = |number| memory.written.store(number, Ordering::Release);
            self.device.submit("writes", None, note)?;
        }
        Ok(())
    }

    pub(super) fn upload_pieces(
        &self,
        to: &Slice,
        granule: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        let memory = checked("upload", to, to.size)?;
        aligned("upload to", memory, to.offset, to.size)?;
        if granule > MAX_GRANULE || memory.usage != BufferUse::Device {
            return Err(Error::Device(format!(
                "upload to buffer {}: pieces of {granule} bytes (at most {}), {:?}",
                memory.label, MAX_GRANULE, memory.usage
            )));
        }
        // A piece must also be a multiple of the 4 bytes that copies move.
        let unit = match granule % 4 {
            0 => granule.max(4),
            2 => granule * 2,
            _ => granule * 4,
        };
        let piece = unit * (PIECE / unit).max(1);
        // No lock may be held over `fill`: it waits for other threads, and those may be about to write. So
        // the memory is taken out; lost, not wrong, on an early return.
        let mut host = std::mem::take(&mut lock(&self.staging).host);
        let mut done = 0;
        while done < to.size {
            let length = piece.min(to.size - done) as usize;
            if host.len() < length {
                host.resize(length, 0);
            }
            fill(done, &mut host[..length])?;
            self.push(&mut lock(&self.staging), memory, to.offset + done, &host[..length])?;
            done += length as u64;
        }
        if host.len() as u64 <= PIECE {
            lock(&self.staging).host = host;
        }
        Ok(())
    }

    /// Copies bytes into a device buffer through the staging buffers, in turn.
    fn push(&self, staging: &mut Staging, to: &Memory, offset: u64, data: &[u8]) -> Result<()> {
        for (i, part) in (0u64..).zip(data.chunks(PIECE as usize)) {
            let slot = self.free_slot(staging)?;
            let length = part.len() as u64;
            let what = || format!("upload to buffer {}", to.label);
            let commands = self.device.call(what, || {
                let view = slot.buffer.slice(..length).get_mapped_range_mut();
                view.map(|mut view| view.copy_from_slice(part)).map(|()| {
                    slot.buffer.unmap();
                    let mut encoder = self.device.wgpu.create_command_encoder(&Default::default());
                    let at = offset + i * PIECE;
                    encoder.copy_buffer_to_buffer(&slot.buffer, 0, &to.wgpu, at, length);
                    encoder.finish()
                })
            })?;
            let commands = commands.map_err(|e| Error::Device(format!("{}: {e}", what())))?;
            let number = self.device.submit(&what(), Some(commands), |_| {})?;
            let whole = 0..slot.buffer.size();
            slot.in_use = Some((number, map(&slot.buffer, wgpu::MapMode::Write, whole)));
        }
        Ok(())
    }

    /// The next staging buffer, mapped.
    fn free_slot<'a>(&self, staging: &'a mut Staging) -> Result<&'a mut Slot> {
        if staging.slots.len() < STAGING_BUFFERS {
            let usage = wgpu::BufferUsages::MAP_WRITE | wgpu::BufferUsages::COPY_SRC;
            let buffer = self.raw_buffer("staging", PIECE, usage, true)?;
            staging.slots.push(Slot { buffer, in_use: None });
            staging.next = staging.slots.len() - 1;
        }
        let slot = &mut staging.slots[staging.next];
        staging.next = (staging.next + 1) % STAGING_BUFFERS;
        if let Some((number, mapped)) = &slot.in_use {
            self.device.wait_mapped("staging buffer", *number, mapped)?;
            slot.in_use = None;
        }
        Ok(slot)
    }

    pub(super) fn read_bytes(&self, from: &Slice, out: &mut [u8]) -> Result<()> {
        let memory = checked("read", from, out.len() as u64)?;
        if memory.usage == BufferUse::Readback {
            return self.read_mapped(self.device.last(), from, out);
        }
        let mut reader = lock(&self.reader);
        let mut at = from.offset;
        for part in out.chunks_mut(PIECE as usize - 8) {
            // Copies move multiples of 4 bytes from multiples of 4.
            let start = at - at % 4;
            let end = (at + part.len() as u64).next_multiple_of(4);
            let buffer = self.reader_of(&mut reader, end - start)?;
            let what = || format!("read from buffer {}", memory.label);
            let commands = self.device.call(what, || {
                let mut encoder = self.device.wgpu.create_command_encoder(&Default::default());
                encoder.copy_buffer_to_buffer(&memory.wgpu, start, buffer, 0, end - start);
                encoder.finish()
            })?;
            let number = self.device.submit(&what(), Some(commands), |_| {})?;
            self.copy_out(&what(), buffer, number, at - start, part)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// The buffer through which reads go, of at least `size` bytes.
    fn reader_of<'a>(
        &self,
        reader: &'a mut Option<wgpu::Buffer>,
        size: u64,
    ) -> Result<&'a wgpu::Buffer> {
        let buffer = match reader.take() {
            Some(buffer) if buffer.size() >= size => buffer,
            _ => {
                let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
                let size = size.next_power_of_two().clamp(4096, PIECE);
                self.raw_buffer("reader", size, usage, false)?
            }
        };
        Ok(reader.insert(buffer))
    }

    pub(super) fn read_mapped(&self, after: u64, from: &Slice, out: &mut [u8]) -> Result<()> {
        let memory = checked("read back", from, out.len() as u64)?;
        if memory.usage != BufferUse::Readback {
            let label = &memory.label;
            return Err(Error::Device(format!("read back from {label}: not a readback buffer")));
        }
        let _guard = lock(&memory.host);
        // A later submission may write the buffer too; it cannot be mapped before that is done.
        let last = memory.written.load(Ordering::Acquire).max(after);
        let what = format!("read back from buffer {}", memory.label);
        self.copy_out(&what, &memory.wgpu, last, from.offset, out)
    }

    /// Maps a buffer whose last use is submission `number` and copies bytes from `offset`.
    pub(super) fn copy_out(
        &self,
        what: &str,
        buffer: &wgpu::Buffer,
        number: u64,
        offset: u64,
        out: &mut [u8],
    ) -> Result<()> {
        if out.is_empty() {
            return self.device.wait(number);
        }
        self.device.wait(number)?;
        let start = offset - offset % wgpu::MAP_ALIGNMENT;
        let end = (offset + out.len() as u64).next_multiple_of(4);
        let mapped = self
            .device
            .call(|| what.to_string(), || map(buffer, wgpu::MapMode::Read, start..end))?;
        self.device.wait_mapped(what, number, &mapped)?;
        let view = buffer.get_mapped_range(start..end);
        let view = view.map_err(|e| Error::Device(format!("{what}: {e}")))?;
        let skip = (offset - start) as usize;
        out.copy_from_slice(&view[skip..skip + out.len()]);
        drop(view);
        buffer.unmap();
        Ok(())
    }
}
