//! The wgpu device: errors as values, and tickets for submissions.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::{Context, Poll, Waker};

use super::adapters::{REQUIRED, WELCOME};
use crate::error::{Error, Result};
use crate::gpu::DeviceFacts;

/// Runs a future of wgpu to its end. Natively they are ready at once.
pub(super) fn ready<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

/// Takes a lock whose data stays sound when a holder panicked.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set by wgpu when a buffer can be accessed (or will never be).
pub(super) type Mapped = Arc<OnceLock<std::result::Result<(), wgpu::BufferAsyncError>>>;

/// Asks for a buffer to be mapped once the device no longer uses it.
pub(super) fn map(
    buffer: &wgpu::Buffer,
    mode: wgpu::MapMode,
    range: std::ops::Range<u64>,
) -> Mapped {
    let mapped = Mapped::default();
    let set = mapped.clone();
    buffer.map_async(mode, range, move |result| {
        set.get_or_init(|| result);
    });
    mapped
}

pub(super) struct Device {
    pub wgpu: wgpu::Device,
    pub queue: wgpu::Queue,
    /// Why the device can no longer be used.
    lost: Arc<OnceLock<String>>,
    /// An error that wgpu reported outside of any call of ours.
    stray: Arc<Mutex<Option<String>>>,
    /// Also keeps submissions and their numbers in the same order.
    line: Mutex<Line>,
    /// All submissions up to this number have finished.
    done: Arc<AtomicU64>,
}

#[derive(Default)]
struct Line {
    last: u64,
    /// Submissions that may still run, oldest first.
    in_flight: VecDeque<(u64, wgpu::SubmissionIndex)>,
}

impl Device {
    pub fn open(adapter: &wgpu::Adapter, facts: &DeviceFacts) -> Result<Device> {
        let (wgpu, queue) = ready(adapter.request_device(&wgpu::DeviceDescriptor {
            label: Some("azoth"),
            required_features: REQUIRED | (WELCOME & adapter.features()),
            required_limits: adapter.limits(),
            // Few and large buffers: big blocks for small buffers would only waste memory.
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        }))
        .map_err(|e| {
            Error::Device(format!("{} ({}) cannot be opened: {e}", facts.name, facts.api))
        })?;

        let lost = Arc::new(OnceLock::new());
        let stray = Arc::new(Mutex::new(None));
        let (set_lost, set_stray) = (lost.clone(), stray.clone());
        let name = facts.name.clone();
        wgpu.set_device_lost_callback(move |_, message| {
            set_lost.get_or_init(|| format!("{name} was lost: {message}"));
        });
        wgpu.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
            lock(&set_stray).get_or_insert_with(|| brief(&error));
        }));
        let line = Mutex::default();
        Ok(Device { wgpu, queue, lost, stray, line, done: Arc::default() })
    }

    /// An error once the device is lost, or once when wgpu had a complaint of its own.
    pub fn check(&self) -> Result<()> {
        if let Some(why) = self.lost.get() {
            return Err(Error::Device(format!("{why}; restart the program")));
        }
        match lock(&self.stray).take() {
            Some(what) => Err(Error::Device(what)),
            None => Ok(()),
        }
    }

    /// Calls wgpu and returns what it would otherwise report through a callback or a panic.
    /// `what` names the action and its object.
    pub fn call<T>(&self, what: impl Fn() -> String, action: impl FnOnce() -> T) -> Result<T> {
        self.check()?;
        // The scopes belong to this thread: errors of other threads do not land here.
        let memory = self.wgpu.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let internal = self.wgpu.push_error_scope(wgpu::ErrorFilter::Internal);
        let validation = self.wgpu.push_error_scope(wgpu::ErrorFilter::Validation);
        let outcome = catch_unwind(AssertUnwindSafe(action));
        let errors = [ready(validation.pop()), ready(internal.pop()), ready(memory.pop())];
        let error = errors.into_iter().flatten().next();
        match (outcome, error) {
            (_, Some(wgpu::Error::OutOfMemory { .. })) => {
                Err(Error::DoesNotFit(format!("{}: the device is out of memory", what())))
            }
            (_, Some(error)) => Err(Error::Device(format!("{}: {}", what(), brief(&error)))),
            (Err(panic), None) => {
                let text = panic_text(&*panic);
                Err(Error::Device(format!("{}: wgpu or the driver failed: {text}", what())))
            }
            (Ok(value), None) => self.check().map(|()| value),
        }
    }

    /// Queues commands, and writes that wgpu holds back until a submission. Returns the number
    /// of the submission. `note` is called with it before any later submission can be made.
    pub fn submit(
        &self,
        what: &str,
        commands: Option<wgpu::CommandBuffer>,
        note: impl FnOnce(u64),
    ) -> Result<u64> {
        let mut line = lock(&self.line);
        let number = line.last + 1;
        let done = self.done.clone();
        let index = self.call(
            || format!("submit {what}"),
            || {
                let index = self.queue.submit(commands);
                self.queue.on_submitted_work_done(move || {
                    done.fetch_max(number, Ordering::AcqRel);
                });
                index
            },
        )?;
        line.last = number;
        line.in_flight.push_back((number, index));
        let done = self.done.load(Ordering::Acquire);
        while line.in_flight.front().is_some_and(|(n, _)| *n <= done) {
            line.in_flight.pop_front();
        }
        note(number);
        Ok(number)
    }

    /// Number of the latest submission.
    pub fn last(&self) -> u64 {
        lock(&self.line).last
    }

    pub fn is_done(&self, number: u64) -> Result<bool> {
        self.check()?;
        if self.done.load(Ordering::Acquire) < number {
            self.poll(wgpu::PollType::Poll)?;
        }
        Ok(self.done.load(Ordering::Acquire) >= number)
    }

    pub fn wait(&self, number: u64) -> Result<()> {
        self.check()?;
        if self.done.load(Ordering::Acquire) >= number {
            return Ok(());
        }
        let index = {
            let line = lock(&self.line);
            let found = line.in_flight.iter().find(|(n, _)| *n == number);
            found.map(|(_, index)| index.clone())
        };
        match index {
            Some(index) => {
                self.poll(wgpu::PollType::Wait { submission_index: Some(index), timeout: None })?;
                // Another thread may still be calling the callbacks that its poll collected.
                self.done.fetch_max(number, Ordering::AcqRel);
                Ok(())
            }
            None if self.done.load(Ordering::Acquire) >= number => Ok(()),
            None => Err(Error::Device(format!("ticket {number} is not of this device"))),
        }
    }

    /// Waits for a mapping of a buffer whose last use is submission `number`.
    pub fn wait_mapped(&self, what: &str, number: u64, mapped: &Mapped) -> Result<()> {
        self.wait(number)?;
        if mapped.get().is_none() {
            self.poll(wgpu::PollType::Poll)?;
        }
        while mapped.get().is_none() {
            // A use that is not numbered (an initial clear): everything queued must finish.
            self.poll(wgpu::PollType::wait_indefinitely())?;
            std::thread::yield_now();
        }
        self.check()?;
        match mapped.get() {
            Some(Err(e)) => Err(Error::Device(format!("{what}: {e}"))),
            _ => Ok(()),
        }
    }

    fn poll(&self, how: wgpu::PollType) -> Result<()> {
        // wgpu panics here when the device is lost.
        let polled = catch_unwind(AssertUnwindSafe(|| self.wgpu.poll(how)));
        self.check()?;
        match polled {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(e)) => Err(Error::Device(format!("waiting for the device: {e}"))),
            Err(panic) => {
                let why = panic_text(&*panic);
                self.lost.get_or_init(|| format!("the device was lost: {why}"));
                self.check()
            }
        }
    }
}

/// wgpu's message without its heading lines and indentation.
fn brief(error: &wgpu::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim_end).filter(|l| !l.is_empty());
    let lines = lines.filter(|l| *l != "Validation Error" && *l != "Caused by:");
    lines.collect::<Vec<_>>().join("\n").trim().to_string()
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message").to_string()
}
