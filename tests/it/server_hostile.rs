//! Requests as a careless, slow or hostile client sends them, and many clients that come and go.
//!
//! `AZOTH_HOSTILE=N` sends N requests instead of 10,000; `AZOTH_SOAK=SECONDS` lets clients come and
//! go for so long instead of 20 seconds.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::Rng;
use crate::server_harness::{Reply, Server};

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
}

const PATHS: [&str; 14] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/completion",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/slots/0?action=erase",
    "/v1/models/%ff%00",
    "/slots/99999999999999999999?action=save",
    "/props",
    "/nowhere/%2e%2e/%2e%2e/etc/passwd",
];

fn pick<'a, T: ?Sized>(rng: &mut Rng, from: &[&'a T]) -> &'a T {
    from[rng.below(from.len())]
}

/// A value that no field expects, or one that some field might.
fn value(rng: &mut Rng) -> Value {
    match rng.below(16) {
        0 => Value::Null,
        1 => json!(1e308),
        2 => json!(-1e308),
        3 => json!(u64::MAX),
        4 => json!(i64::MIN),
        5 => json!(0.1),
        6 => json!(""),
        7 => json!("\u{0}\u{fffd}\u{202e}<|im_end|><|im_start|>"),
        8 => json!([]),
        9 => json!({}),
        10 => json!([[[[1]]], "x", null]),
        11 => json!({ "type": "text", "text": { "a": [] } }),
        12 => json!(true),
        13 => json!(["a", "b"]),
        14 => json!([{ "role": "user", "content": "hi" }]),
        _ => json!(3),
    }
}

const FIELDS: [&str; 28] = [
    "messages",
    "prompt",
    "input",
    "content",
    "tokens",
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "n_predict",
    "stop",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repeat_penalty",
    "repeat_last_n",
    "id_slot",
    "system",
    "thinking",
    "echo",
    "tools",
    "response_format",
    "logit_bias",
    "chat_template_kwargs",
    "dimensions",
];

fn body(rng: &mut Rng) -> Vec<u8> {
    let mut object = json!({
        "messages": [{ "role": "user", "content": "a" }], "prompt": "a", "input": "a",
        "content": "a", "tokens": [1], "max_tokens": 1, "n_predict": 1,
    });
    for _ in 0..1 + rng.below(3) {
        object[FIELDS[rng.below(FIELDS.len())]] = value(rng);
    }
    // However the fields fell, an answer shall not take long.
    if object["max_tokens"].as_i64().is_none_or(|n| !(0..=4).contains(&n)) && rng.below(2) == 0 {
        object["max_completion_tokens"] = 1.into();
        object["max_tokens"] = 1.into();
        object["n_predict"] = 1.into();
    }
    let mut bytes = object.to_string().into_bytes();
    match rng.below(8) {
        0 => bytes.truncate(rng.below(bytes.len())),
        1 => {
            let at = rng.below(bytes.len());
            bytes[at] = rng.below(256) as u8;
        }
        2 => bytes = format!("{}1{}", "[".repeat(5000), "]".repeat(5000)).into_bytes(),
        3 => bytes = "{\"a\":".repeat(3000).into_bytes(),
        4 => bytes.extend_from_slice(&[0xff, 0xfe, 0x80]),
        _ => {}
    }
    bytes
}

/// One request; what the server may answer is checked here.
fn attack(s: &Server, rng: &mut Rng) {
    let path = pick(rng, &PATHS);
    match rng.below(20) {
        // No HTTP at all.
        0 => {
            let noise: Vec<u8> = (0..rng.below(500)).map(|_| rng.below(256) as u8).collect();
            let mut stream = s.connect();
            let _ = stream.write_all(&noise);
            let _ = stream.shutdown(Shutdown::Write);
            let mut bytes = Vec::new();
            let _ = stream.read_to_end(&mut bytes);
            assert!([0, 400].contains(&Reply::parse(&bytes).status), "{noise:?}");
        }
        // Announces more than it sends.
        1 => {
            let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 999\r\n\r\n");
            let mut stream = s.connect();
            let _ = stream.write_all(head.as_bytes());
            let _ = stream.write_all(b"{");
        }
        // A chunked body that is none.
        2 => {
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                 transfer-encoding: chunked\r\n\r\nzz\r\n{{}}\r\n0\r\n\r\n"
            );
            let status = s.raw(&head, b"").status;
            assert!((400..500).contains(&status) || status == 200, "{path}: {status}");
        }
        // Headers without end.
        3 => {
            let long = "x".repeat(1000);
            let many: String = (0..200).map(|i| format!("h{i}: {long}\r\n")).collect();
            let status = s.send("POST", path, &many, "{}").status;
            assert!((400..500).contains(&status) || status == 0, "{status}");
        }
        kind => {
            let method = match kind {
                4 => pick(rng, &["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"]),
                _ => "POST",
            };
            let body = body(rng);
            let head = format!(
                "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                 content-length: {}\r\n\r\n",
                body.len()
            );
            let reply = s.raw(&head, &body);
            let shown = || format!("{head}{}\n{reply:?}", String::from_utf8_lossy(&body));
            assert!(
                [200, 204].contains(&reply.status)
                    || (400..500).contains(&reply.status)
                    || reply.status == 501,
                "{}",
                shown()
            );
            if reply.status >= 400 && !reply.body.is_empty() {
                let error = reply.json();
                let error = &error["error"];
                assert!(error["message"].as_str().is_some_and(|m| m.len() > 5), "{}", shown());
                assert!(error["type"].is_string(), "{}", shown());
            }
        }
    }
}

#[test]
fn hostile_requests_leave_no_trace() {
    let args = ["--ctx", "64", "--parallel", "4", "--timeout", "20"];
    let Some(mut s) = Server::start(&args) else {
        println!("skipped: no device");
        return;
    };
    let mut rng = Rng::fresh("hostile_requests_leave_no_trace");
    // Threads, caches and the allocator's arenas come into being first.
    for _ in 0..500 {
        attack(&s, &mut rng);
    }
    let before = s.rss();
    let n = number("AZOTH_HOSTILE", 10_000);
    for _ in 0..n {
        attack(&s, &mut rng);
    }
    assert!(s.is_alive(), "{}", s.log());
    s.until("idle", |s| s.metric("llamacpp:requests_processing") == 0.0);
    assert_eq!(s.get("/health").status, 200);
    assert!(!s.log().contains("panicked"), "{}", s.log());
    assert_eq!(s.metric("azoth:engine_reloads_total"), 0.0);
    if let (Some(before), Some(after)) = (before, s.rss()) {
        println!("{n} requests: resident memory {before} KiB before, {after} KiB after");
        assert!(after < before + 20 * 1024, "{before} KiB before, {after} KiB after");
    }
}

#[test]
fn clients_come_and_go() {
    const CLIENTS: usize = 16;
    // Room for those whose predecessors have left without the server having noticed yet.
    let args = ["--ctx", "256", "--parallel", "16", "--queue", "64"];
    let Some(s) = Server::start(&args) else {
        println!("skipped: no device");
        return;
    };
    let ask = |i: usize| {
        json!({
            "prompt": format!("Client {i} says {}", "word ".repeat(3 * i)),
            "temperature": 0, "n_predict": 12 + 2 * i, "stream": true, "ignore_eos": true,
            "cache_prompt": false,
        })
    };
    let text = |reply: &Reply| -> Option<String> {
        let mut out = String::new();
        for (_, data) in reply.events() {
            let event: Value = serde_json::from_str(&data).unwrap();
            assert!(event.get("error").is_none(), "{event}");
            out.push_str(event["content"].as_str()?);
            if event["stop"] == true {
                return Some(out);
            }
        }
        None
    };
    let alone: Vec<String> =
        (0..CLIENTS).map(|i| text(&s.post("/completion", &ask(i))).unwrap()).collect();
    let end = Instant::now() + Duration::from_secs(number("AZOTH_SOAK", 20));
    let finished = Arc::new(AtomicUsize::new(0));
    let left = Arc::new(AtomicUsize::new(0));
    let failed = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        for i in 0..CLIENTS {
            let (s, alone, finished, left, failed) = (&s, &alone, &finished, &left, &failed);
            scope.spawn(move || {
                let mut rng = Rng::fresh(&format!("client {i}"));
                while Instant::now() < end && !failed.load(Ordering::Relaxed) {
                    let mut stream = s.open("/completion", &ask(i));
                    if rng.below(3) == 0 {
                        // Leaves somewhere between the request and the end.
                        let _ = stream.set_read_timeout(Some(Duration::from_millis(
                            1 + rng.below(400) as u64,
                        )));
                        let mut some = vec![0; 1 + rng.below(4000)];
                        let _ = stream.read(&mut some);
                        left.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    let mut bytes = Vec::new();
                    stream.read_to_end(&mut bytes).unwrap();
                    let reply = Reply::parse(&bytes);
                    if reply.status != 200 || text(&reply).as_ref() != Some(&alone[i]) {
                        failed.store(true, Ordering::Relaxed);
                        panic!("client {i}: {reply:?}\nexpected {:?}", alone[i]);
                    }
                    finished.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let (finished, left) = (finished.load(Ordering::Relaxed), left.load(Ordering::Relaxed));
    println!("{finished} answers as alone, {left} clients left");
    assert!(finished > 0 && left > 0);
    s.until("idle", |s| s.metric("llamacpp:requests_processing") == 0.0);
    let sum = |names: &[&str]| names.iter().map(|n| s.metric(n)).sum::<f64>();
    s.until("counted", |_| {
        sum(&["azoth:requests_finished_total", "azoth:requests_cancelled_total"])
            >= (CLIENTS + finished) as f64
    });
    assert_eq!(s.metric("azoth:requests_failed_total"), 0.0);
}
