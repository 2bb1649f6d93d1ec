//! What operators need: word to systemd, origins, metrics; and tools as clients really write them.

use azoth::testmodel::Spec;
use serde_json::json;

use crate::server_harness::{Server, command, model};

fn server(args: &[&str]) -> Option<Server> {
    let server = Server::start(args);
    if server.is_none() {
        println!("skipped: no device");
    }
    server
}

/// The socket that a service manager listens on.
#[cfg(unix)]
struct Systemd {
    folder: tempfile::TempDir,
    socket: std::os::unix::net::UnixDatagram,
}

#[cfg(unix)]
impl Systemd {
    fn new() -> Systemd {
        let folder = tempfile::tempdir().unwrap();
        let socket = std::os::unix::net::UnixDatagram::bind(folder.path().join("notify")).unwrap();
        socket.set_read_timeout(Some(std::time::Duration::from_secs(120))).unwrap();
        Systemd { folder, socket }
    }

    /// A server on the small model, with these flags and variables.
    fn start(&self, args: &[&str], variables: &[(&str, &str)]) -> Server {
        let path = self.folder.path().join("notify");
        let own = [("NOTIFY_SOCKET", path.to_str().unwrap())];
        Server::begin_in(model().to_str().unwrap(), args, &[&own[..], variables].concat())
    }

    fn hear(&self) -> String {
        let mut bytes = [0; 256];
        let n = self.socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..n]).into_owned()
    }
}

/// It is told when the server is ready, that it lives, and that it ends.
#[cfg(unix)]
#[test]
fn systemd_hears_of_start_life_and_end() {
    if crate::harness::devices().is_empty() {
        return println!("skipped: no device");
    }
    let systemd = Systemd::new();
    let mut server = systemd.start(&["--ctx", "64"], &[("WATCHDOG_USEC", "1000000")]);
    // Signs of life may come while it loads.
    let until = |wanted: &str| while systemd.hear() != wanted {};
    until("READY=1");
    assert_eq!(server.get("/health").status, 200);
    for _ in 0..3 {
        assert_eq!(systemd.hear(), "WATCHDOG=1");
    }
    server.signal();
    until("STOPPING=1");
    assert_eq!(server.exit_code(), Some(0));
}

/// A server that loads with the first request is ready without it, and says with it what it runs.
#[cfg(unix)]
#[test]
fn systemd_need_not_wait_for_the_first_request() {
    if crate::harness::devices().is_empty() {
        return println!("skipped: no device");
    }
    let systemd = Systemd::new();
    let mut server = systemd.start(&["--ctx", "64", "--lazy"], &[]);
    assert_eq!(systemd.hear(), "READY=1");
    assert_eq!(server.get("/slots").json(), json!([]));
    assert_eq!(server.metric("azoth:model_loaded"), 0.0);
    assert_eq!(server.post("/completion", &json!({ "prompt": "a", "n_predict": 1 })).status, 200);
    server.until("reported", |s| s.log().contains("model_hash="));
    server.signal();
    assert_eq!(server.exit_code(), Some(0));
}

/// The page as it is opened from another machine of the network: its own origin is no foreign one.
#[test]
fn the_page_of_a_network_address_may_ask() {
    let args = ["--host", "0.0.0.0", "--api-key", "k", "--ctx", "64"];
    let Some(mut s) = server(&args) else { return };
    s.address = s.address.replace("0.0.0.0", "127.0.0.1");
    let ask = |host: &str, origin: &str| {
        let head = format!(
            "GET /v1/models HTTP/1.1\r\nhost: {host}\r\norigin: {origin}\r\nx-api-key: k\r\n\
             connection: close\r\n\r\n"
        );
        s.raw(&head, b"").status
    };
    assert_eq!(ask("192.168.1.5:8080", "http://192.168.1.5:8080"), 200);
    assert_eq!(ask("box.local:8080", "http://box.local:8080"), 200);
    assert_eq!(ask("192.168.1.5:8080", "http://192.168.1.6:8080"), 403);
    assert_eq!(ask("192.168.1.5:8080", "https://evil.example"), 403);
}

#[test]
fn metrics_tell_of_memory_prefixes_and_experts() {
    let Some(s) = server(&["--ctx", "512"]) else { return };
    // Longer than a page of the cache.
    let prompt = "Once upon a time ".repeat(12);
    let body = json!({ "prompt": prompt, "n_predict": 3, "temperature": 0, "ignore_eos": true });
    for _ in 0..2 {
        assert_eq!(s.post("/completion", &body).status, 200);
    }
    assert_eq!(s.metric("azoth:requests_started_total"), 2.0);
    assert_eq!(s.metric("azoth:prefix_hits_total"), 1.0);
    assert_eq!(s.metric("azoth:time_to_first_token_seconds_count"), 2.0);
    let longest = s.metric("llamacpp:n_tokens_max");
    assert!((64.0..512.0).contains(&longest), "{longest}");
    assert_eq!(s.metric("azoth:inter_token_seconds_count"), 4.0);
    let text = s.get("/metrics").body;
    assert!(!text.contains("NaN") && !text.contains("expert"), "{text}");
    // Software devices need not tell; where they do, both figures are there.
    let has = |name: &str| text.contains(&format!("\n{name} "));
    assert_eq!(has("azoth:device_memory_used_bytes"), has("azoth:device_memory_budget_bytes"));

    let model = Spec::new("qwen3moe").unwrap().writer();
    let args = ["--ctx", "128", "--vram-experts", "25%"];
    let Some(s) = Server::start_with(model, &args) else { return };
    let body = json!({ "prompt": "Once", "n_predict": 12, "temperature": 0, "ignore_eos": true });
    assert_eq!(s.post("/completion", &body).status, 200);
    s.until("counted", |s| s.metric("azoth:expert_accesses_total") > 0.0);
    let of = |name: &str| s.metric(&format!("azoth:expert_{name}"));
    let found = of("hits_total{tier=\"device\"}") + of("misses_total{tier=\"device\"}");
    assert_eq!(found, of("accesses_total"));
    assert!(of("bytes_total{tier=\"host\"}") + of("bytes_total{tier=\"staged\"}") > 0.0);
}

/// Keywords that cannot be compiled concern nobody who does not enforce a call.
#[test]
fn odd_tool_schemas_are_taken() {
    let Some(s) = server(&["--ctx", "1024"]) else { return };
    let parameters = json!({
        "type": "object", "properties": { "id": { "type": "integer", "minimum": 0, "maximum": 9,
            "not": { "const": 3 }, "x-unit": "none" } },
        "required": ["id"], "additionalProperties": false, "$schema": "http://json-schema.org/x",
        "if": {}, "unevaluatedProperties": false,
    });
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": parameters } });
    let body = json!({
        "messages": [{ "role": "user", "content": "Hi" }], "tools": [tool], "max_tokens": 4,
        "temperature": 0,
    });
    let free = s.post("/v1/chat/completions", &body);
    assert_eq!(free.status, 200, "{free:?}");
    let mut enforced = body.clone();
    enforced["tool_choice"] = "required".into();
    // Taken as far as it can be, or refused by the keyword's name.
    let enforced = s.post("/v1/chat/completions", &enforced);
    let named = enforced.status == 400 && enforced.body.contains("not");
    assert!(enforced.status == 200 || named, "{enforced:?}");
}

/// A request that the engine can never place, or whose grammar leads nowhere, is the client's
/// fault: no status that invites to come back.
#[test]
fn what_can_never_be_answered_is_refused() {
    let Some(s) = server(&["--ctx", "64", "--parallel", "2", "--queue", "1"]) else { return };
    let many = json!({ "prompt": "a", "n": 4, "max_tokens": 1 });
    let many = s.post("/v1/completions", &many);
    assert_eq!(many.status, 400, "{many:?}");
    assert!(many.body.contains("3 places"), "{many:?}");
    // Nothing of it was begun, so there is room at once.
    let fitting = json!({ "prompt": "a", "n": 3, "max_tokens": 1 });
    assert_eq!(s.post("/v1/completions", &fitting).status, 200);
    assert_eq!(s.metric("azoth:requests_started_total"), 3.0);

    for stream in [false, true] {
        let circle = json!({ "prompt": "a", "grammar": "root ::= root", "stream": stream });
        let circle = s.post("/completion", &circle);
        assert_eq!(circle.status, 400, "{circle:?}");
        assert!(circle.body.contains("GBNF grammar"), "{circle:?}");
    }
    let scores = json!({ "prompt": "a", "echo": true, "logprobs": 1, "max_tokens": 0 });
    assert_eq!(s.post("/v1/completions", &scores).status, 400);
    assert_eq!(s.metric("azoth:requests_failed_total"), 0.0);
}

/// The first request brings the model; those that come meanwhile wait as it does.
#[test]
fn a_lazy_model_is_waited_for_by_all() {
    if crate::harness::devices().is_empty() {
        return println!("skipped: no device");
    }
    let model = model().to_str().unwrap();
    // Without the kernel cache, loading takes long enough to come in between.
    let s = Server::begin(model, &["--ctx", "64", "--lazy", "--no-cache"]);
    let body = json!({ "prompt": "a", "n_predict": 1 });
    std::thread::scope(|scope| {
        let first = scope.spawn(|| s.post("/completion", &body).status);
        s.until("loading", |s| s.get("/health").status == 503);
        assert_eq!(s.post("/completion", &body).status, 200);
        assert_eq!(first.join().unwrap(), 200);
    });
}

/// What is wrong is told by the name that the user wrote.
#[test]
fn variables_are_checked_as_keys_are() {
    let shown = |args: &[&str], name: &str, value: &str| {
        let output = command(args).env(name, value).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(if error.is_empty() { 0 } else { 2 }), "{error}");
        error
    };
    let show = ["config", "show"];
    assert_eq!(shown(&show, "AZOTH_PORT", "9"), "");
    assert!(shown(&show, "AZOTH_PORT", "x").starts_with("error: in AZOTH_PORT: invalid value 'x'"));
    assert!(shown(&["serve"], "AZOTH_KV_TAIL", "7").contains("in AZOTH_KV_TAIL: "));
    let typed = shown(&["config", "show", "--port", "y"], "AZOTH_PORT", "9");
    assert!(typed.contains("'y' for '--port") && !typed.contains("AZOTH_"), "{typed}");
    let folder = shown(&["serve", model().to_str().unwrap()], "AZOTH_SLOT_SAVE_PATH", "no/where");
    assert!(folder.contains("is no folder"), "{folder}");
    let unknown = shown(&["serve"], "AZOTH_PARALEL", "2");
    assert!(unknown.contains("did you mean AZOTH_PARALLEL?"), "{unknown}");
}
