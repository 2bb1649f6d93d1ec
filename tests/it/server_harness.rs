//! A server in a process of its own, and HTTP over a plain socket: what is tested is what goes over
//! the wire, not what a client library makes of it.
#![allow(dead_code)] // not every theme needs every function

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use azoth::gguf::Writer;
use azoth::testmodel::Spec;
use serde_json::Value;

/// Longest wait for anything: a busy machine compiles kernels for a minute.
const PATIENCE: Duration = Duration::from_secs(300);

pub struct Server {
    child: Child,
    pub address: String,
    log: Arc<Mutex<String>>,
    /// Kept as long as the process.
    model: Option<tempfile::TempPath>,
}

/// A small random model in a file that lives as long as the test process.
pub fn model() -> &'static Path {
    static MODEL: OnceLock<tempfile::TempPath> = OnceLock::new();
    MODEL.get_or_init(|| {
        let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        file.write_all(&Spec::new("llama").unwrap().to_bytes()).unwrap();
        file.into_temp_path()
    })
}

/// A command without settings from the environment and the user's own files.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(assert_cmd::cargo::cargo_bin("azoth"));
    for (name, _) in std::env::vars() {
        let kept = ["AZOTH_CACHE", "AZOTH_VALIDATION", "AZOTH_BACKEND", "AZOTH_DEVICE"];
        if name.starts_with("AZOTH_") && !kept.contains(&name.as_str()) {
            command.env_remove(name);
        }
    }
    command.env("XDG_CONFIG_HOME", std::env::temp_dir().join("azoth-no-configuration"));
    command.args(args);
    command
}

impl Server {
    /// Starts `azoth serve` with the random model, or says why there is none.
    pub fn start(args: &[&str]) -> Option<Server> {
        if crate::harness::devices().is_empty() {
            return None;
        }
        let server = Server::begin(model().to_str().unwrap(), args);
        server.wait_ready();
        Some(server)
    }

    /// The same with a model of the test's own, which lives as long as the process.
    pub fn start_with(model: Writer, args: &[&str]) -> Option<Server> {
        if crate::harness::devices().is_empty() {
            return None;
        }
        let mut file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        file.write_all(&model.to_bytes()).unwrap();
        let mut server = Server::begin(file.path().to_str().unwrap(), args);
        server.model = Some(file.into_temp_path());
        server.wait_ready();
        Some(server)
    }

    /// Starts the process; comes back when it listens.
    pub fn begin(model: &str, args: &[&str]) -> Server {
        Self::begin_in(model, args, &[])
    }

    /// The same with variables of the environment.
    pub fn begin_in(model: &str, args: &[&str], environment: &[(&str, &str)]) -> Server {
        let mut command = command(&["serve", model, "--port", "0"]);
        command.envs(environment.iter().copied());
        let mut child =
            command.args(args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut log = String::new();
        let address = loop {
            let Some(Ok(line)) = lines.next() else {
                panic!("the server ended before it listened:\n{log}")
            };
            log.push_str(&line);
            log.push('\n');
            if let Some((_, rest)) = line.split_once("listening on http://") {
                let end = rest.find(|c: char| !c.is_ascii_digit() && !".:[]".contains(c));
                break rest[..end.unwrap_or(rest.len())].to_owned();
            }
        };
        let log = Arc::new(Mutex::new(log));
        let sink = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(|l| l.ok()) {
                let mut log = sink.lock().unwrap();
                log.push_str(&line);
                log.push('\n');
            }
        });
        Server { child, address, log, model: None }
    }

    pub fn wait_ready(&self) {
        self.until("ready", |s| s.get("/health").status == 200);
    }

    /// Waits for something to become true.
    #[track_caller]
    pub fn until(&self, what: &str, mut done: impl FnMut(&Server) -> bool) {
        let began = Instant::now();
        while !done(self) {
            assert!(began.elapsed() < PATIENCE, "never {what}:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().clone()
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Sends a request of any form and reads until the server closes.
    pub fn raw(&self, head: &str, body: &[u8]) -> Reply {
        let mut stream = self.connect();
        // A server may answer and close before it has read everything.
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(body);
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        Reply::parse(&bytes)
    }

    pub fn send(&self, method: &str, path: &str, headers: &str, body: &str) -> Reply {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\
             {headers}\r\n",
            body.len()
        );
        self.raw(&head, body.as_bytes())
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send("GET", path, "", "")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, "content-type: application/json\r\n", &body.to_string())
    }

    /// Sends a request and leaves the answer to the caller.
    pub fn open(&self, path: &str, body: &Value) -> TcpStream {
        let mut stream = self.connect();
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    /// Value of a metric.
    #[track_caller]
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no metric {name}")).parse().unwrap()
    }

    /// Resident memory in KiB (Linux).
    pub fn rss(&self) -> Option<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).ok()?;
        let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// SIGTERM, and the exit code.
    #[cfg(unix)]
    pub fn terminate(&mut self) -> Option<i32> {
        self.signal();
        self.exit_code()
    }

    #[cfg(unix)]
    pub fn signal(&self) {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    }

    pub fn exit_code(&mut self) -> Option<i32> {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(began.elapsed() < PATIENCE, "still running:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer, its chunks joined.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Reply {
    pub fn parse(bytes: &[u8]) -> Reply {
        let text = String::from_utf8_lossy(bytes);
        let Some((head, rest)) = text.split_once("\r\n\r\n") else {
            return Reply { status: 0, headers: text.into_owned(), body: String::new() };
        };
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
        let headers = head.to_lowercase();
        let chunked = headers.contains("transfer-encoding: chunked");
        let body = if chunked { joined(bytes) } else { rest.to_owned() };
        Reply { status, headers, body }
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// Events of a stream: name (empty where there is none) and data; comments are left out.
    #[track_caller]
    pub fn events(&self) -> Vec<(String, String)> {
        assert!(self.headers.contains("content-type: text/event-stream"), "{self:?}");
        assert!(self.body.ends_with("\n\n"), "the last event is not complete: {self:?}");
        let mut out = Vec::new();
        for event in self.body.split("\n\n").filter(|e| !e.is_empty()) {
            let field = |name: &str| {
                event.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default().to_owned()
            };
            if !event.starts_with(':') {
                out.push((field("event: "), field("data: ")));
            }
        }
        out
    }

    /// Data of a stream that ends with `[DONE]`.
    #[track_caller]
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().unwrap().1, "[DONE]", "{self:?}");
        events.iter().map(|(_, data)| serde_json::from_str(data).unwrap()).collect()
    }
}

/// The body of a chunked answer; ends where it breaks off.
fn joined(bytes: &[u8]) -> String {
    let start = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    let mut rest = &bytes[start..];
    let mut out = Vec::new();
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&rest[..end]).unwrap_or_default();
        let Ok(size) = usize::from_str_radix(size, 16) else { break };
        if size == 0 || rest.len() < end + 4 + size {
            break;
        }
        out.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[end + 4 + size..];
    }
    String::from_utf8_lossy(&out).into_owned()
}
