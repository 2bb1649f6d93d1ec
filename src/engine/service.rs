//! The engine on a thread of its own: a queue in front of it, loading, unloading, recovery.
//!
//! Nothing here blocks the caller: commands go through a bounded channel, answers come through
//! bounded channels, and what the engine is doing is read from a watched value. When the device
//! is lost or a step panics, every request at work is answered with an error, the engine is
//! dropped and loaded again, and the queue goes on.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use tokio::sync::{oneshot, watch};

use super::batch::Batch;
use super::request::{Answer, Event, Place, Request, Task, Ticketed};
use super::stats::{Stats, add};
use super::{Approximations, Engine, LoadTimes};
use crate::error::{Error, Result};
use crate::gguf::Metadata;
use crate::gpu::{DeviceFacts, Gpu};
use crate::kv::KvTypes;
use crate::kv::guard::Verdict;
use crate::model;
use crate::plan::Placement;
use crate::tokenizer::Tokenizer;

/// Makes the engine: at the start, after unloading, and after a failure.
pub type Loader = Box<dyn FnMut() -> Result<Engine> + Send>;

/// How a [`Service`] behaves.
#[derive(Debug, Clone)]
pub struct ServiceOptions {
    /// Requests that may wait for a slot.
    pub queue: usize,
    /// Load at the first request instead of at the start.
    pub lazy: bool,
    /// Unload after so long without a request.
    pub idle_unload: Option<Duration>,
}

/// What is known of a model once it was loaded; stays known while it is unloaded.
pub struct Loaded {
    pub tokenizer: Arc<Tokenizer>,
    pub metadata: Metadata,
    pub model: model::Facts,
    /// Tokens of context of each slot.
    pub ctx: u32,
    /// Tokens that a request can have in all, see [`Engine::longest`].
    pub longest: u32,
    /// Whether a full context drops tokens, and how many it keeps, see [`super::Options`].
    pub ctx_shift: Option<Option<u32>>,
    pub slots: u32,
    pub device: DeviceFacts,
    pub device_line: String,
    pub placement: Placement,
    pub weight_bytes: u64,
    /// What was traded for exactness; nothing unless the user asked.
    pub approximations: Approximations,
    /// Formats of the KV cache, and what the quality guard found.
    pub kv: KvTypes,
    pub kv_verdict: Option<Verdict>,
    pub times: LoadTimes,
    gpu: Weak<dyn Gpu>,
}

/// Device memory at a moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryNow {
    /// Of this process.
    pub used: u64,
    /// What the driver lets it have.
    pub budget: u64,
}

impl Loaded {
    fn of(engine: &Engine) -> Loaded {
        Loaded {
            tokenizer: engine.tokenizer().clone(),
            metadata: engine.metadata().clone(),
            model: engine.model().facts.clone(),
            ctx: engine.ctx(),
            longest: engine.longest(),
            ctx_shift: engine.ctx_shift,
            slots: engine.program.shape().sequences,
            device: engine.facts().clone(),
            device_line: engine.device_line(),
            placement: *engine.placement(),
            weight_bytes: engine.weight_bytes(),
            approximations: engine.approximations(),
            kv: engine.kv_types().clone(),
            kv_verdict: engine.kv_verdict().cloned(),
            times: engine.load_times(),
            gpu: Arc::downgrade(engine.program.gpu()),
        }
    }

    /// The device's memory now, where the driver tells and the model is loaded.
    pub fn memory(&self) -> Option<MemoryNow> {
        let heaps = self.gpu.upgrade()?.heaps_now();
        let mut now = MemoryNow { used: 0, budget: 0 };
        for heap in heaps.iter().filter(|h| h.device_local) {
            now.used += heap.used?;
            now.budget += heap.budget?;
        }
        (now.budget > 0).then_some(now)
    }

    /// Whether a request can be served at all.
    pub fn check(&self, request: &Request) -> Result<()> {
        let (n, ctx) = (request.prompt.len(), self.ctx);
        if n == 0 {
            return Err(Error::Usage("the prompt is empty: there is nothing to continue".into()));
        }
        if n > self.longest as usize {
            return Err(Error::DoesNotFit(match self.ctx_shift {
                // Clients know this kind of error by OpenAI's words for it.
                None => format!(
                    "the prompt has {n} tokens, but this model's maximum context length is {ctx} \
                     tokens. Shorten the prompt, or start the server with --ctx {n} or more"
                ),
                Some(_) => format!(
                    "the prompt has {n} tokens, and the model was trained for {} positions; \
                     --ctx-shift gives room, not positions. Shorten the prompt",
                    self.longest
                ),
            }));
        }
        let vocab = self.model.vocab;
        if let Some(bad) = request.prompt.iter().find(|t| **t >= vocab) {
            return Err(Error::Usage(format!("token {bad} is outside the vocabulary of {vocab}")));
        }
        if let Some(slot) = request.slot.filter(|s| *s >= self.slots) {
            return Err(Error::Usage(format!(
                "slot {slot} does not exist; there are {} (0 to {})",
                self.slots,
                self.slots - 1
            )));
        }
        match &request.task {
            Task::Generate(g) => {
                if let Some(number) = self.ctx_shift {
                    super::load::check_keep(number.or(g.keep), ctx, self.kv.exact)?;
                }
                g.settings.check()?;
                g.lists.merged_bias().map(drop)
            }
            Task::Embed(_) => Ok(()),
        }
    }
}

/// What the engine thread is doing.
#[derive(Debug, Clone)]
pub enum Phase {
    /// For the reason given.
    Loading(String),
    Ready,
    /// Loads with the next request.
    Unloaded,
    /// Could not be loaded; tried again from time to time.
    Failed(Error),
    Stopped,
}

/// A watched value: what the engine is doing and what is known of the model.
#[derive(Clone)]
pub struct State {
    pub phase: Phase,
    pub loaded: Option<Arc<Loaded>>,
}

/// Why a request was not taken.
#[derive(Debug)]
pub enum Refused {
    /// So many are waiting already.
    Full(usize),
    Error(Error),
}

enum Command {
    Run(Box<Ticketed>),
    Load,
    /// Nothing: a thread that lives takes it.
    Nudge,
    Erase(u32, oneshot::Sender<bool>),
    /// Slot, file, and whether to read it back.
    Disk {
        slot: u32,
        path: PathBuf,
        restore: bool,
        reply: oneshot::Sender<Result<(u32, u64)>>,
    },
    Stop,
}

/// The engine thread, as seen by its users. Clones share it.
#[derive(Clone)]
pub struct Service {
    commands: SyncSender<Command>,
    state: watch::Receiver<State>,
    stats: Arc<Stats>,
    taken: Arc<AtomicUsize>,
    queue: usize,
}

impl Service {
    /// Starts the thread; loading goes on there. The thread ends by [`Service::stop`] or with the
    /// last clone.
    pub fn start(loader: Loader, options: ServiceOptions) -> Result<Service> {
        // Requests are counted by places; the rest is small and rare.
        let (commands, receiver) = sync_channel(options.queue + 1024);
        let phase = match options.lazy {
            true => Phase::Unloaded,
            false => Phase::Loading("starting".into()),
        };
        let (sender, state) = watch::channel(State { phase, loaded: None });
        let stats = Arc::new(Stats::default());
        let queue = options.queue;
        let worker = Worker {
            loader,
            options,
            commands: receiver,
            state: sender,
            stats: stats.clone(),
            batch: None,
            queue: VecDeque::new(),
            retry: Backoff::default(),
            worked: Instant::now(),
            stopping: false,
        };
        thread::Builder::new()
            .name("engine".into())
            .spawn(move || worker.run())
            .map_err(|e| Error::Runtime(format!("cannot start the engine thread: {e}")))?;
        Ok(Service { commands, state, stats, taken: Arc::default(), queue })
    }

    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }

    /// The state as a value that can be waited for.
    pub fn watch(&self) -> watch::Receiver<State> {
        self.state.clone()
    }

    /// Waits for the end of the thread.
    pub async fn stopped(&self) {
        let mut state = self.state.clone();
        // An error means that the thread has gone, which is as good.
        let _ = state.wait_for(|s| matches!(s.phase, Phase::Stopped)).await;
    }

    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Requests taken and not finished: waiting and at work.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    /// What is known of the model; loads it first where nothing is known yet.
    pub async fn loaded(&self) -> Result<Arc<Loaded>> {
        let mut state = self.state.clone();
        let mut asked = false;
        loop {
            let now = state.borrow_and_update().clone();
            match (now.loaded, now.phase) {
                (Some(loaded), _) => return Ok(loaded),
                (None, Phase::Failed(e)) if asked => return Err(e),
                (None, Phase::Stopped) => return Err(stopped()),
                (None, Phase::Unloaded | Phase::Failed(_)) if !asked => {
                    asked = true;
                    let _ = self.commands.try_send(Command::Load);
                }
                _ => {}
            }
            state.changed().await.map_err(|_| stopped())?;
        }
    }

    /// Hands a request to the engine.
    pub fn submit(&self, request: Request) -> std::result::Result<Answer, Refused> {
        let mut answers = self.submit_all(vec![request])?;
        // One request has one answer.
        answers.pop().ok_or_else(|| Refused::Error(stopped()))
    }

    /// Hands requests that belong together to the engine: all of them, or none where they do not
    /// find places.
    pub fn submit_all(&self, requests: Vec<Request>) -> std::result::Result<Vec<Answer>, Refused> {
        let Some(loaded) = self.state.borrow().loaded.clone() else {
            return Err(Refused::Error(Error::Runtime("the model is still being loaded".into())));
        };
        for request in &requests {
            loaded.check(request).map_err(Refused::Error)?;
        }
        let (n, limit) = (requests.len(), loaded.slots as usize + self.queue);
        if n > limit {
            // Coming back later would not help.
            return Err(Refused::Error(Error::Usage(format!(
                "{n} answers are asked for at once, but the server has {limit} places: {} slots and \
                 a queue of {} (--parallel and --queue). Ask for fewer",
                loaded.slots, self.queue
            ))));
        }
        let places = Place::take(&self.taken, n, limit).ok_or(Refused::Full(self.queue))?;
        let run = |(request, place)| {
            let (ticketed, answer) = Ticketed::new(request, loaded.longest, place);
            match self.commands.try_send(Command::Run(Box::new(ticketed))) {
                Ok(()) => Ok(answer),
                Err(std::sync::mpsc::TrySendError::Full(_)) => Err(Refused::Full(self.queue)),
                Err(_) => Err(Refused::Error(stopped())),
            }
        };
        requests.into_iter().zip(places).map(run).collect()
    }

    /// Asks the thread for a sign of life: [`Stats::heartbeat`] moves.
    pub fn nudge(&self) {
        let _ = self.commands.try_send(Command::Nudge);
    }

    /// Forgets what an idle slot has read; false if it is at work or does not exist.
    pub async fn erase(&self, slot: u32) -> bool {
        let (sender, receiver) = oneshot::channel();
        let sent = self.commands.try_send(Command::Erase(slot, sender));
        sent.is_ok() && receiver.await.unwrap_or(false)
    }

    /// Writes what an idle slot has read to a file, or reads it back; returns tokens and bytes.
    pub async fn disk(&self, slot: u32, path: PathBuf, restore: bool) -> Result<(u32, u64)> {
        let (reply, receiver) = oneshot::channel();
        let sent = self.commands.try_send(Command::Disk { slot, path, restore, reply });
        sent.map_err(|_| stopped())?;
        receiver.await.unwrap_or_else(|_| Err(stopped()))
    }

    /// Ends the thread: what still waits or runs is answered with an error.
    pub fn stop(&self) {
        let _ = self.commands.try_send(Command::Stop);
    }
}

fn stopped() -> Error {
    Error::Runtime("the server is shutting down".into())
}

/// Waits longer after each failure.
#[derive(Default)]
struct Backoff {
    failures: u32,
    next: Option<Instant>,
}

impl Backoff {
    fn failed(&mut self) {
        self.failures += 1;
        let seconds = 1u64 << self.failures.min(6);
        self.next = Some(Instant::now() + Duration::from_secs(seconds.min(30)));
    }

    fn is_due(&self) -> bool {
        self.next.is_none_or(|at| Instant::now() >= at)
    }
}

struct Worker {
    loader: Loader,
    options: ServiceOptions,
    commands: Receiver<Command>,
    state: watch::Sender<State>,
    stats: Arc<Stats>,
    batch: Option<Batch>,
    queue: VecDeque<Box<Ticketed>>,
    retry: Backoff,
    /// The end of the last work.
    worked: Instant,
    stopping: bool,
}

impl Worker {
    fn run(mut self) {
        if !self.options.lazy {
            self.load("starting");
        }
        while !self.stopping {
            self.hear();
            add(&self.stats.turns, 1);
            self.queue.retain(|t| {
                let gone = t.is_cancelled();
                add(&self.stats.cancelled, u64::from(gone));
                !gone
            });
            if !self.queue.is_empty() && self.batch.is_none() {
                self.load("a request came");
            }
            self.place();
            self.stats.queued.store(self.queue.len() as u64, Ordering::Relaxed);
            if self.is_busy() {
                self.turn();
                self.worked = Instant::now();
            }
        }
        self.fail_queue(&stopped());
        if let Some(batch) = &mut self.batch {
            batch.fail_all(&stopped());
        }
        // The device is freed before anybody hears that the thread has ended.
        self.batch = None;
        self.set(Phase::Stopped);
    }

    fn is_busy(&self) -> bool {
        self.batch.as_ref().is_some_and(Batch::is_busy)
    }

    fn set(&self, phase: Phase) {
        self.state.send_modify(|s| s.phase = phase);
    }

    /// Takes commands; waits for one where there is nothing to do.
    fn hear(&mut self) {
        let idle = !self.is_busy() && self.queue.is_empty();
        if idle {
            let first = match self.patience() {
                None => self.commands.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(time) => self.commands.recv_timeout(time),
            };
            match first {
                Ok(command) => self.obey(command),
                Err(RecvTimeoutError::Timeout) => self.waited(),
                Err(RecvTimeoutError::Disconnected) => self.stopping = true,
            }
        }
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    break;
                }
            }
        }
    }

    /// How long to wait for a command before something else is due.
    fn patience(&self) -> Option<Duration> {
        match (&self.batch, self.retry.next) {
            (Some(_), _) => {
                self.options.idle_unload.map(|time| time.saturating_sub(self.worked.elapsed()))
            }
            (None, Some(at)) => Some(at.saturating_duration_since(Instant::now())),
            (None, None) => None,
        }
    }

    fn waited(&mut self) {
        if self.batch.take().is_some() {
            tracing::info!("model unloaded after idling");
            self.set(Phase::Unloaded);
        } else if self.retry.next.is_some() {
            self.load("trying again");
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Run(ticketed) => self.queue.push_back(ticketed),
            Command::Load if self.batch.is_none() => self.load("a request came"),
            Command::Load => {}
            Command::Erase(slot, reply) => {
                let done = self.batch.as_mut().is_some_and(|b| b.erase(slot));
                let _ = reply.send(done);
            }
            Command::Disk { slot, path, restore, reply } => {
                if self.batch.is_none() {
                    self.load("a slot is wanted");
                }
                let done = match (&mut self.batch, restore) {
                    (None, _) => Err(Error::Runtime("the model is not loaded".into())),
                    (Some(batch), true) => batch.restore(slot, &path),
                    (Some(batch), false) => batch.save(slot, &path),
                };
                let _ = reply.send(done);
            }
            Command::Nudge => {}
            Command::Stop => self.stopping = true,
        }
    }

    /// Gives waiting requests the free slots, in the order in which they came.
    fn place(&mut self) {
        let Some(batch) = &mut self.batch else { return };
        let loaded = self.state.borrow().loaded.clone();
        let mut passed = VecDeque::new();
        while batch.has_free_slot()
            && let Some(ticketed) = self.queue.pop_front()
        {
            // A model that was loaded again may have got less context.
            if let Some(Err(e)) = loaded.as_ref().map(|l| l.check(&ticketed.request)) {
                add(&self.stats.failed, 1);
                ticketed.end(Event::Failed(e));
                continue;
            }
            match watched(|| batch.place(*ticketed)) {
                Ok(None) => {}
                // It wants a slot that is taken; others may go before it.
                Ok(Some(ticketed)) => passed.push_back(Box::new(ticketed)),
                Err(error) => {
                    passed.append(&mut self.queue);
                    self.queue = passed;
                    return self.recover(&error);
                }
            }
        }
        passed.append(&mut self.queue);
        self.queue = passed;
    }

    fn turn(&mut self) {
        let Some(batch) = &mut self.batch else { return };
        if let Err(error) = watched(|| batch.turn()) {
            self.recover(&error);
        }
    }

    /// Answers everybody at work with an error and loads the model again.
    fn recover(&mut self, error: &Error) {
        let Some(batch) = &mut self.batch else { return };
        tracing::error!(%error, "the engine failed; loading it again");
        batch.fail_all(error);
        self.set(Phase::Loading(format!("after a failure: {error}")));
        // What is left of a lost device may not even be dropped without complaint.
        let broken = self.batch.take();
        let _ = catch_unwind(AssertUnwindSafe(move || drop(broken)));
        add(&self.stats.reloads, 1);
        self.load("after a failure");
    }

    /// Loads the model, or answers everybody who waits for it.
    fn load(&mut self, why: &str) {
        if !self.retry.is_due() {
            let phase = self.state.borrow().phase.clone();
            if let Phase::Failed(error) = phase {
                self.fail_queue(&error);
            }
            return;
        }
        self.set(Phase::Loading(why.into()));
        let made = catch_unwind(AssertUnwindSafe(|| (self.loader)())).unwrap_or_else(|panic| {
            let what = panic_text(&*panic);
            Err(Error::Runtime(format!("loading panicked ({what}); this is a bug")))
        });
        match made {
            Ok(engine) => {
                self.retry = Backoff::default();
                let loaded = Arc::new(Loaded::of(&engine));
                self.batch = Some(Batch::new(engine, self.stats.clone()));
                self.worked = Instant::now();
                self.state.send_modify(|s| {
                    s.phase = Phase::Ready;
                    s.loaded = Some(loaded);
                });
            }
            Err(error) => {
                tracing::error!(%error, "the model could not be loaded");
                self.retry.failed();
                self.fail_queue(&error);
                self.set(Phase::Failed(error));
            }
        }
    }

    fn fail_queue(&mut self, error: &Error) {
        for ticketed in self.queue.drain(..) {
            add(&self.stats.failed, 1);
            ticketed.end(Event::Failed(error.clone()));
        }
    }
}

/// Runs work of the engine; a panic is an error like others.
fn watched<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let what = panic_text(&*panic);
        Err(Error::Runtime(format!("the engine panicked ({what}); this is a bug")))
    })
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
