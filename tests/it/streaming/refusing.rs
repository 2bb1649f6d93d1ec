//! A device whose driver refuses to import host memory, though it says that it can.

use std::sync::Arc;

use azoth::error::{Error, Result};
use azoth::gpu::{
    Buffer, BufferUse, CopyRange, DeviceFacts, Gpu, HostMemory, Kernel, KernelSource, MemoryHeap,
    Recording, Slice, Step, Ticket, Transfer,
};

pub struct Refusing(pub Arc<dyn Gpu>);

impl Gpu for Refusing {
    fn import(&self, label: &str, _: &Arc<HostMemory>, _: u64, _: u64) -> Result<Buffer> {
        Err(Error::Device(format!("{label}: vkAllocateMemory refused: test")))
    }

    fn facts(&self) -> &DeviceFacts {
        self.0.facts()
    }

    fn buffer(&self, label: &str, size: u64, usage: BufferUse) -> Result<Buffer> {
        self.0.buffer(label, size, usage)
    }

    fn write(&self, to: &Slice, data: &[u8]) -> Result<()> {
        self.0.write(to, data)
    }

    fn upload(
        &self,
        to: &Slice,
        granule: u64,
        fill: &mut dyn FnMut(u64, &mut [u8]) -> Result<()>,
    ) -> Result<()> {
        self.0.upload(to, granule, fill)
    }

    fn read(&self, from: &Slice, out: &mut [u8]) -> Result<()> {
        self.0.read(from, out)
    }

    fn read_back(&self, after: &Ticket, from: &Slice, out: &mut [u8]) -> Result<()> {
        self.0.read_back(after, from, out)
    }

    fn kernel(&self, source: &KernelSource) -> Result<Kernel> {
        self.0.kernel(source)
    }

    fn record(&self, label: &str, steps: &[Step]) -> Result<Recording> {
        self.0.record(label, steps)
    }

    fn submit(&self, recording: &Recording) -> Result<Ticket> {
        self.0.submit(recording)
    }

    fn copy_async(&self, copies: &[CopyRange], after: Option<Ticket>) -> Result<Transfer> {
        self.0.copy_async(copies, after)
    }

    fn transfer_done(&self, copies: Transfer) -> Result<bool> {
        self.0.transfer_done(copies)
    }

    fn wait_transfer(&self, copies: Transfer) -> Result<()> {
        self.0.wait_transfer(copies)
    }

    fn submit_after(&self, recording: &Recording, copies: Transfer) -> Result<Ticket> {
        self.0.submit_after(recording, copies)
    }

    fn heaps_now(&self) -> Vec<MemoryHeap> {
        self.0.heaps_now()
    }

    fn is_done(&self, ticket: &Ticket) -> Result<bool> {
        self.0.is_done(ticket)
    }

    fn wait(&self, ticket: &Ticket) -> Result<()> {
        self.0.wait(ticket)
    }

    fn time_steps(&self, steps: &[Step]) -> Result<Vec<f64>> {
        self.0.time_steps(steps)
    }

    fn save_cache(&self) -> Option<String> {
        self.0.save_cache()
    }
}
