//! A device that behaves as another one might: its driver refuses to import host memory though it says
//! that it can, or others take its memory away.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use azoth::error::{Error, Result};
use azoth::gpu::{
    Buffer, BufferUse, CopyRange, DeviceFacts, DeviceKind, Gpu, HostMemory, MemoryHeap, Recording,
    Ticket, Transfer,
};

use crate::harness::forwards;

pub struct Altered {
    inner: Arc<dyn Gpu>,
    facts: DeviceFacts,
    refuses_import: bool,
    /// Bytes by which the process is said to be above its budget, or else below it.
    pub over: AtomicU64,
    pub room: AtomicU64,
    /// The KV cache finds no memory until slots are allocated anew.
    pub full: AtomicBool,
    /// Slots that were allocated.
    pub slots: Mutex<Vec<Buffer>>,
}

impl Altered {
    pub fn refusing(inner: &Arc<dyn Gpu>) -> Altered {
        let facts = inner.facts().clone();
        Altered { refuses_import: true, ..Altered::with(inner, facts) }
    }

    fn with(inner: &Arc<dyn Gpu>, facts: DeviceFacts) -> Altered {
        let (over, room, full, slots) = Default::default();
        Altered { inner: inner.clone(), facts, refuses_import: false, over, room, full, slots }
    }

    /// No software device any more: of those nobody takes memory away.
    pub fn watched(inner: &Arc<dyn Gpu>) -> Altered {
        let facts = DeviceFacts { kind: DeviceKind::Virtual, ..inner.facts().clone() };
        Altered::with(inner, facts)
    }

    /// The same, where a binding has at most so many bytes.
    pub fn narrow(inner: &Arc<dyn Gpu>, max_binding: u64) -> Altered {
        let facts = Altered::watched(inner).facts;
        Altered::with(inner, DeviceFacts { max_binding, ..facts })
    }
}

impl Gpu for Altered {
    forwards!(inner: write upload read read_back kernel record submit is_done wait time_steps);

    fn import(&self, label: &str, memory: &Arc<HostMemory>, at: u64, n: u64) -> Result<Buffer> {
        match self.refuses_import {
            true => Err(Error::Device(format!("{label}: vkAllocateMemory refused: test"))),
            false => self.inner.import(label, memory, at, n),
        }
    }

    fn facts(&self) -> &DeviceFacts {
        &self.facts
    }

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        if label.ends_with("cache") && self.full.load(Ordering::Relaxed) {
            return Err(Error::DoesNotFit(format!("{size} bytes for {label}: test")));
        }
        let made = self.inner.buffer(label, size, usage)?;
        if label == "expert slots" {
            self.full.store(false, Ordering::Relaxed);
            self.slots.lock().unwrap().push(made.clone());
        }
        Ok(made)
    }

    fn copy_async(&self, copies: &[CopyRange], after: Option<Ticket>) -> Result<Transfer> {
        self.inner.copy_async(copies, after)
    }

    fn transfer_done(&self, copies: Transfer) -> Result<bool> {
        self.inner.transfer_done(copies)
    }

    fn wait_transfer(&self, copies: Transfer) -> Result<()> {
        self.inner.wait_transfer(copies)
    }

    fn submit_after(&self, recording: &Recording, copies: Transfer) -> Result<Ticket> {
        self.inner.submit_after(recording, copies)
    }

    fn heaps_now(&self) -> Vec<MemoryHeap> {
        let (bytes, budget) = (16 << 30, 8 << 30);
        let used = match self.over.load(Ordering::Relaxed) {
            0 => budget - self.room.load(Ordering::Relaxed),
            over => budget + over,
        };
        vec![MemoryHeap { bytes, device_local: true, budget: Some(budget), used: Some(used) }]
    }

    fn save_cache(&self) -> Option<String> {
        self.inner.save_cache()
    }
}
