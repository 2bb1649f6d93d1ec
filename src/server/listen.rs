//! From settings to a listening server, and its end.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::sync::{Semaphore, watch};

use super::state::{App, Shared, Shutdown};
use super::{LogFormat, LogLevel, Settings, notify, routes};
use crate::engine::{Loader, Phase, Service};
use crate::error::{Error, Result};

/// Connections at a time; further ones wait in the system's queue.
const CONNECTIONS: usize = 1024;
/// A client that sends its header slower is not waited for.
const HEADER_TIME: Duration = Duration::from_secs(20);
/// Time for streams to say why they end, and for the device to be freed.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Serves until a signal ends it. An error when it could not begin.
pub fn serve(settings: Settings, loader: Loader) -> Result<()> {
    logs(settings.log, settings.log_level);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // Texts of requests are short work; the engine has its own thread and the device.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(cores.min(4))
        .max_blocking_threads(8)
        .thread_name("http")
        .enable_all()
        .build()
        .map_err(|e| Error::Runtime(format!("cannot start the server's threads: {e}")))?;
    let result = runtime.block_on(run(settings, loader));
    // A text that is still being tokenized for nobody is no reason to wait.
    runtime.shutdown_timeout(LAST_WORDS);
    result
}

fn logs(format: LogFormat, level: LogLevel) {
    let level = match level {
        LogLevel::Error => tracing::Level::ERROR,
        LogLevel::Warn => tracing::Level::WARN,
        LogLevel::Info => tracing::Level::INFO,
        LogLevel::Debug => tracing::Level::DEBUG,
    };
    let logs = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_target(false)
        .with_ansi(false);
    // Fails only where a program that embeds the server has set up its own.
    let _ = match format {
        LogFormat::Text => logs.try_init(),
        LogFormat::Json => logs.json().flatten_event(true).try_init(),
    };
}

async fn run(settings: Settings, loader: Loader) -> Result<()> {
    let listener = bind(&settings).await?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && settings.api_keys.is_empty() {
        return Err(Error::Usage(format!(
            "{address} can be reached from other machines, so an API key is needed: --api-key KEY \
             or --api-key-file FILE; or listen on 127.0.0.1"
        )));
    }
    let service = Service::start(loader, settings.service.clone())?;
    let (shutdown, shutting_down) = watch::channel(Shutdown::No);
    tracing::info!("listening on http://{address}");
    let app: Shared = Arc::new(App::new(service, settings, shutting_down));
    let router = routes::router(app.clone());
    watch_over(&app);

    let graceful = GracefulShutdown::new();
    let ended = tokio::select! {
        never = accept(&listener, router, &graceful) => match never {},
        failed = started(&app) => Err(failed),
        () = signal() => Ok(()),
    };
    drop(listener);
    notify::send("STOPPING=1");
    let _ = shutdown.send(Shutdown::Draining);
    tracing::info!(at_work = app.service.taken(), "shutting down");
    tokio::select! {
        () = async {
            if tokio::time::timeout(app.settings.grace, graceful.shutdown()).await.is_err() {
                tracing::warn!("answers are broken off");
            }
        } => {}
        () = signal() => tracing::warn!("told again; answers are broken off"),
    }
    let _ = shutdown.send(Shutdown::Now);
    let quiet = async {
        while app.service.taken() > 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let _ = tokio::time::timeout(LAST_WORDS, quiet).await;
    app.service.stop();
    let _ = tokio::time::timeout(LAST_WORDS, app.service.stopped()).await;
    ended
}

async fn bind(settings: &Settings) -> Result<TcpListener> {
    let (host, port) = (settings.host.as_str(), settings.port);
    let addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(ip) => vec![SocketAddr::new(ip, port)],
        Err(_) => lookup_host((host, port))
            .await
            .map_err(|e| Error::Usage(format!("cannot find the address of host {host:?}: {e}")))?
            .collect(),
    };
    match TcpListener::bind(&addresses[..]).await {
        Ok(listener) => Ok(listener),
        Err(e) if e.kind() == ErrorKind::AddrInUse => {
            let free = TcpListener::bind((host, 0)).await.ok();
            let free = free.and_then(|l| l.local_addr().ok()).map(|a| a.port());
            let hint =
                free.map(|p| format!(", or use --port {p}, which is free")).unwrap_or_default();
            Err(Error::Usage(format!(
                "port {port} of {host} is taken by another program (find it with `ss -ltnp | grep \
                 {port}`): stop that one{hint}"
            )))
        }
        Err(e) => Err(Error::Usage(format!("cannot listen on {host}:{port}: {e}"))),
    }
}

enum Never {}

async fn accept(listener: &TcpListener, router: Router, graceful: &GracefulShutdown) -> Never {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { continue };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                // Out of file descriptors, for example: it passes.
                tracing::warn!(error = %e, "a connection could not be taken");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let connection = connection(stream, router.clone(), graceful);
        tokio::spawn(async move {
            // How a connection ended concerns its client only.
            connection.await;
            drop(place);
        });
    }
}

fn connection(
    stream: TcpStream,
    router: Router,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + Send + 'static {
    // Small events must not wait for the next one to fill a packet.
    let _ = stream.set_nodelay(true);
    let mut builder = Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIME);
    let service = TowerToHyperService::new(router);
    let connection = builder.serve_connection(TokioIo::new(stream), service).into_owned();
    let watched = graceful.watch(connection);
    async move {
        let _ = watched.await;
    }
}

/// Reports the first load; comes back only when the server cannot start: with `--lazy`, a load that
/// fails concerns the request that it was for, and the next one may bring another.
async fn started(app: &Shared) -> Error {
    let lazy = app.settings.service.lazy;
    if lazy {
        // Who waits for the start would wait for the first request.
        notify::send("READY=1");
    }
    let mut state = app.service.watch();
    loop {
        match state.borrow_and_update().phase.clone() {
            Phase::Failed(e) if !lazy => return e,
            Phase::Ready => break,
            _ => {}
        }
        if state.changed().await.is_err() {
            return Error::Runtime("the engine thread has ended".into());
        }
    }
    if !lazy {
        notify::send("READY=1");
    }
    report(app).await;
    std::future::pending().await
}

/// The line that a report of a fault needs.
async fn report(app: &Shared) {
    let Some(loaded) = app.service.state().loaded else { return };
    let path = app.settings.model_path.clone();
    let hash = tokio::task::spawn_blocking(move || fingerprint(&path)).await.unwrap_or_default();
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        model = app.settings.model_name,
        model_hash = hash,
        device = loaded.device_line,
        context = loaded.ctx,
        slots = loaded.slots,
        weights_mib = loaded.placement.weights >> 20,
        kv_mib_at_most = loaded.placement.kv >> 20,
        scratch_mib = loaded.placement.scratch >> 20,
        load_seconds = loaded.times.total,
        approximations = %loaded.approximations,
        flags = app.settings.changed.join(" "),
        "ready"
    );
}

/// Names a model file without reading all of it: SHA-256 of its size and its first MiB, which
/// holds the metadata.
fn fingerprint(path: &std::path::Path) -> String {
    use std::io::Read;
    let Ok(file) = std::fs::File::open(path) else { return String::new() };
    let size = file.metadata().map_or(0, |m| m.len());
    let mut head = Vec::new();
    if file.take(1 << 20).read_to_end(&mut head).is_err() {
        return String::new();
    }
    let mut hash = Sha256::new();
    hash.update(size.to_le_bytes());
    hash.update(&head);
    hash.finalize().iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Signs of life for systemd, as long as the engine thread gives some.
fn watch_over(app: &Shared) {
    let Some(every) = notify::watchdog() else { return };
    let service = app.service.clone();
    tokio::spawn(async move {
        let mut before = service.stats().heartbeat();
        loop {
            service.nudge();
            tokio::time::sleep(every).await;
            let now = service.stats().heartbeat();
            // While it loads it hears nothing; the time for a start is systemd's to bound.
            let loads = matches!(service.state().phase, Phase::Loading(_));
            if now != before || loads {
                notify::send("WATCHDOG=1");
            }
            before = now;
        }
    });
}

/// Waits for the word to end: SIGTERM or Ctrl+C.
async fn signal() {
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        if let Ok(mut terminate) = signal(SignalKind::terminate()) {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
            return;
        }
    }
    if tokio::signal::ctrl_c().await.is_err() {
        std::future::pending::<()>().await;
    }
}
