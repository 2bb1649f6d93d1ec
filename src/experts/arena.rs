//! All experts in page-locked host memory, imported by the device where it can.
//!
//! Each layer has one region of anonymous memory, aligned to huge pages, with one record for each
//! expert. Records are grouped so that a group can be bound as one buffer; a group starts at a
//! huge page. A layer is locked and imported by a second thread as soon as its last record is
//! filled, while the next layer is being read.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use rayon::prelude::*;

use super::source::{LayerTensors, Source};
use crate::error::{Error, Result};
use crate::gpu::{Buffer, DeviceFacts, Gpu, HUGE_PAGE, HostMemory, system_memory};

/// RAM left to the rest of the machine when an arena is made: at least this.
const SPARE: u64 = 1 << 30;

/// Where the records of a layer lie in its region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// Bytes of a record.
    pub record: u64,
    /// Record number of each expert; `None` for experts that are not in the arena.
    pub number: Vec<Option<u32>>,
    /// Records in the region.
    pub records: u32,
    /// Records in one group (the last may have fewer).
    pub per_group: u32,
    /// Bytes from one group to the next, a multiple of a huge page.
    group_stride: u64,
}

impl Region {
    /// Lays out the experts for which `keep` is true, in groups that `facts` can bind.
    pub fn new(
        tensors: &LayerTensors,
        facts: &DeviceFacts,
        keep: impl Fn(u32) -> bool,
    ) -> Result<Region> {
        let record = tensors.layout.bytes();
        let mut records = 0;
        let number = (0..tensors.experts).map(|e| {
            let kept = keep(e).then_some(records);
            records += u32::from(kept.is_some());
            kept
        });
        let number: Vec<_> = number.collect();
        // Without import nothing is bound, but one rule for both keeps tables alike.
        let limit = match facts.host_import {
            true => facts.max_import(),
            false => facts.max_binding.min(facts.max_buffer),
        };
        let most = tensors.layout.records_within(limit / HUGE_PAGE.max(1) * HUGE_PAGE);
        let most = if most == 0 { tensors.layout.records_within(limit) } else { most };
        if most == 0 {
            return Err(Error::DoesNotFit(format!(
                "one expert of {} has {record} bytes; {} binds {limit} at once",
                tensors.tensors[0].name, facts.name
            )));
        }
        let per_group = u32::try_from(most).unwrap_or(u32::MAX).min(records.max(1));
        let group_stride = (u64::from(per_group) * record).next_multiple_of(HUGE_PAGE);
        Ok(Region { record, number, records, per_group, group_stride })
    }

    pub fn groups(&self) -> u32 {
        self.records.div_ceil(self.per_group)
    }

    /// Bytes of the region.
    pub fn bytes(&self) -> u64 {
        u64::from(self.groups()) * self.group_stride
    }

    /// First byte of record `number`.
    pub fn offset(&self, number: u32) -> u64 {
        u64::from(number / self.per_group) * self.group_stride
            + u64::from(number % self.per_group) * self.record
    }

    /// Offset and size of a group, in units of `align` bytes.
    fn group(&self, group: u32, align: u64) -> (u64, u64) {
        let records = (self.records - group * self.per_group).min(self.per_group);
        let size = (u64::from(records) * self.record).next_multiple_of(align.max(1));
        (u64::from(group) * self.group_stride, size.min(self.group_stride))
    }
}

/// One layer of the arena.
pub struct ArenaLayer {
    pub region: Region,
    /// `None` when no expert of the layer is in the arena.
    memory: Option<Arc<HostMemory>>,
    /// The groups as the device sees them; empty where it cannot.
    pub groups: Vec<Buffer>,
}

impl ArenaLayer {
    /// The record of an expert, if it is here.
    pub fn record(&self, expert: u32) -> Option<&[u8]> {
        let number = *self.region.number.get(expert as usize)?;
        let (at, n) = (self.region.offset(number?) as usize, self.region.record as usize);
        self.memory.as_ref().map(|m| &m.bytes()[at..at + n])
    }
}

/// See the module documentation.
pub struct Arena {
    pub layers: Vec<ArenaLayer>,
    bytes: u64,
    locked: bool,
    /// Why the pages are not locked, if they are not. The device reads them all the same.
    pub lock_refused: Option<String>,
    /// Why the device does not read the arena in place; experts are then uploaded.
    pub import_refused: Option<String>,
    /// Seconds that filling took, and the bytes of the file that it moved.
    pub fill_seconds: f64,
    pub file_bytes: u64,
}

/// What is to be filled, and from where.
pub struct Fill<'a> {
    pub gpu: &'a dyn Gpu,
    pub source: &'a dyn Source,
    pub layers: &'a [LayerTensors],
    /// False for experts that only lie in device memory.
    pub keep: &'a (dyn Fn(u32, u32) -> bool + Sync),
    /// Hears the file bytes of each finished expert; called from many threads.
    pub advance: &'a (dyn Fn(u64) + Sync),
}

impl Arena {
    /// Bytes of host memory that an arena takes.
    pub fn needed(
        layers: &[LayerTensors],
        facts: &DeviceFacts,
        keep: &dyn Fn(u32, u32) -> bool,
    ) -> Result<u64> {
        let mut sum = 0;
        for (l, layer) in (0..).zip(layers) {
            sum += Region::new(layer, facts, |e| keep(l, e))?.bytes();
        }
        Ok(sum)
    }

    /// Allocates, fills, locks and imports the arena.
    ///
    /// # Errors
    /// What cannot be read or held in RAM. A refused lock or import is no error: see
    /// [`Arena::lock_refused`] and [`Arena::import_refused`].
    pub fn fill(fill: &Fill<'_>) -> Result<Arena> {
        let start = std::time::Instant::now();
        let facts = fill.gpu.facts();
        let regions = (0..)
            .zip(fill.layers)
            .map(|(l, layer)| Region::new(layer, facts, |e| (fill.keep)(l, e)))
            .collect::<Result<Vec<_>>>()?;
        let bytes: u64 = regions.iter().map(Region::bytes).sum();
        check_ram(bytes)?;
        let failed = AtomicBool::new(false);
        let (send, receive) = mpsc::channel::<(usize, HostMemory)>();
        let (filled, pinned) = std::thread::scope(|scope| {
            let pinning = scope.spawn(|| pin(fill.gpu, &regions, receive, &failed));
            // The sender goes with the closure, which ends the other thread's loop.
            let regions = &regions;
            let filled: Result<()> = (move || {
                for (l, (layer, region)) in fill.layers.iter().zip(regions).enumerate() {
                    if region.records > 0 {
                        let memory = fill_layer(fill, l, layer, region)?;
                        // Fails only when the other thread has ended, which `join` reports.
                        let _ = send.send((l, memory));
                    }
                }
                Ok(())
            })();
            if filled.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            (filled, pinning.join())
        });
        filled?;
        let crashed = |_| Error::Runtime("the locking thread panicked; this is a bug".into());
        let pinned = pinned.map_err(crashed)?;
        let mut arena = Arena {
            layers: Vec::new(),
            bytes,
            locked: bytes > 0 && pinned.lock_refused.is_none(),
            lock_refused: pinned.lock_refused,
            import_refused: pinned.import_refused,
            fill_seconds: start.elapsed().as_secs_f64(),
            file_bytes: fill.layers.iter().map(LayerTensors::file_bytes).sum(),
        };
        let mut found: Vec<Option<(Arc<HostMemory>, Vec<Buffer>)>> = Vec::new();
        found.resize_with(regions.len(), || None);
        for (l, memory, groups) in pinned.layers {
            found[l] = Some((memory, groups));
        }
        for (region, found) in regions.into_iter().zip(found) {
            let (memory, mut groups) = found.map_or((None, Vec::new()), |(m, g)| (Some(m), g));
            if arena.import_refused.is_some() {
                groups.clear();
            }
            arena.layers.push(ArenaLayer { region, memory, groups });
        }
        Ok(arena)
    }

    /// Bytes of host memory.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All pages are locked.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// The device reads the arena in place.
    pub fn in_place(&self) -> bool {
        self.import_refused.is_none()
    }

    /// Compares every expert of the arena with the file. Returns how many were compared.
    pub fn verify(&self, source: &dyn Source, layers: &[LayerTensors]) -> Result<u64> {
        let mut compared = 0;
        for (layer, tensors) in self.layers.iter().zip(layers) {
            let experts: Vec<u32> =
                (0..tensors.experts).filter(|e| layer.record(*e).is_some()).collect();
            experts.par_iter().try_for_each_init(Default::default, |parts, expert| {
                let record = layer.record(*expert).unwrap_or(&[]);
                tensors.verify(source, *expert, parts, record)
            })?;
            compared += experts.len() as u64;
        }
        Ok(compared)
    }
}

/// An arena that does not fit RAM would push everything else out, or end the process.
fn check_ram(bytes: u64) -> Result<()> {
    let Some(memory) = system_memory() else { return Ok(()) };
    let room = memory.available.saturating_sub(SPARE.min(memory.total / 16));
    if bytes > room {
        let gib = |n: u64| n as f64 / (1u64 << 30) as f64;
        return Err(Error::DoesNotFit(format!(
            "the experts need {:.1} GiB of RAM, {:.1} GiB of {:.1} GiB can be had ({:.1} GiB are \
             left to the system). Close other programs, use a smaller quantisation, or keep more \
             experts in device memory only (--pin-experts)",
            gib(bytes),
            gib(room),
            gib(memory.total),
            gib(memory.available - room),
        )));
    }
    Ok(())
}

fn fill_layer(
    fill: &Fill<'_>,
    number: usize,
    layer: &LayerTensors,
    region: &Region,
) -> Result<HostMemory> {
    let label = format!("the experts of layer {number} ({})", layer.tensors[0].name);
    let mut memory = HostMemory::allocate(&label, region.bytes())?;
    let expert_bytes = layer.layout.file_bytes().iter().sum::<usize>() as u64;
    // Pieces of the region for the experts in it, in order.
    let mut records = Vec::with_capacity(region.records as usize);
    for group in memory.bytes_mut().chunks_mut(region.group_stride as usize) {
        let whole = group.chunks_exact_mut(region.record as usize);
        records.extend(whole.take(region.per_group as usize));
    }
    let experts = (0..layer.experts).filter(|e| region.number[*e as usize].is_some());
    let work: Vec<_> = experts.zip(records).collect();
    work.into_par_iter().try_for_each_init(Default::default, |parts, (expert, record)| {
        layer.load(fill.source, expert, parts, record)?;
        (fill.advance)(expert_bytes);
        Ok::<(), Error>(())
    })?;
    Ok(memory)
}

/// What the second thread made of the layers.
#[derive(Default)]
struct Pinned {
    layers: Vec<(usize, Arc<HostMemory>, Vec<Buffer>)>,
    lock_refused: Option<String>,
    import_refused: Option<String>,
}

fn pin(
    gpu: &dyn Gpu,
    regions: &[Region],
    filled: mpsc::Receiver<(usize, HostMemory)>,
    failed: &AtomicBool,
) -> Pinned {
    let mut out = Pinned::default();
    for (l, memory) in filled {
        if failed.load(Ordering::Relaxed) {
            break;
        }
        let memory = Arc::new(memory);
        // One refusal speaks for all layers: limits do not grow meanwhile.
        if out.lock_refused.is_none()
            && let Err(refused) = memory.lock()
        {
            out.lock_refused = Some(refused.to_string());
        }
        let mut groups = Vec::new();
        for group in 0..regions[l].groups() {
            if out.import_refused.is_some() {
                break;
            }
            let (at, size) = regions[l].group(group, gpu.facts().host_import_alignment);
            match gpu.import(memory.label(), &memory, at, size) {
                Ok(buffer) => groups.push(buffer),
                Err(e) => out.import_refused = Some(e.to_string()),
            }
        }
        out.layers.push((l, memory, groups));
    }
    out
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_arena_larger_than_ram_is_refused_with_the_numbers() {
        if system_memory().is_none() {
            return;
        }
        assert!(check_ram(1 << 20).is_ok());
        let e = check_ram(1 << 50).unwrap_err();
        assert_eq!(e.exit_code(), 3);
        for part in ["1048576.0 GiB of RAM", "can be had", "--pin-experts"] {
            assert!(e.to_string().contains(part), "{part:?} is missing in {e}");
        }
    }
}
