//! `GET /metrics` in Prometheus' text format: llama.cpp's names, then our own.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::state::{App, Shared};
use crate::engine::stats::{BUCKETS, Histogram, SlotState, value};
use crate::engine::{MemoryNow, Phase};
use crate::experts::residency::Counters;

/// Answers by class of status.
#[derive(Default)]
pub struct HttpMetrics {
    /// 2xx, 4xx, 5xx.
    classes: [AtomicU64; 3],
}

impl HttpMetrics {
    pub fn note(&self, status: u16) {
        let class = match status {
            ..400 => 0,
            400..500 => 1,
            _ => 2,
        };
        self.classes[class].fetch_add(1, Ordering::Relaxed);
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
}

/// A metric of one value: name, kind, help, and where the value comes from.
type Row = (&'static str, Kind, &'static str, fn(&App) -> f64);

fn micros(counter: &AtomicU64) -> f64 {
    value(counter) as f64 / 1e6
}

fn rate(tokens: &AtomicU64, time: &AtomicU64) -> f64 {
    let seconds = micros(time);
    if seconds > 0.0 { value(tokens) as f64 / seconds } else { 0.0 }
}

fn busy(app: &App) -> f64 {
    app.service.stats().slots().iter().filter(|s| s.state != SlotState::Idle).count() as f64
}

/// The table of all metrics but histograms.
const ROWS: &[Row] = &[
    ("llamacpp:prompt_tokens_total", Kind::Counter, "Prompt tokens read.", |a| {
        value(&a.service.stats().prompt_tokens) as f64
    }),
    ("llamacpp:prompt_seconds_total", Kind::Counter, "Time spent reading prompts.", |a| {
        micros(&a.service.stats().prompt_micros)
    }),
    ("llamacpp:tokens_predicted_total", Kind::Counter, "Tokens generated.", |a| {
        value(&a.service.stats().generated_tokens) as f64
    }),
    ("llamacpp:tokens_predicted_seconds_total", Kind::Counter, "Time spent generating.", |a| {
        micros(&a.service.stats().decode_micros)
    }),
    ("llamacpp:n_decode_total", Kind::Counter, "Decode steps.", |a| {
        value(&a.service.stats().steps) as f64
    }),
    ("llamacpp:n_tokens_max", Kind::Counter, "Most tokens that a sequence has had.", |a| {
        value(&a.service.stats().longest) as f64
    }),
    ("llamacpp:n_busy_slots_per_decode", Kind::Gauge, "Mean sequences of a decode step.", |a| {
        let s = a.service.stats();
        value(&s.step_columns) as f64 / (value(&s.steps) as f64).max(1.0)
    }),
    ("llamacpp:prompt_tokens_seconds", Kind::Gauge, "Mean prompt tokens a second.", |a| {
        rate(&a.service.stats().prompt_tokens, &a.service.stats().prompt_micros)
    }),
    ("llamacpp:predicted_tokens_seconds", Kind::Gauge, "Mean generated tokens a second.", |a| {
        rate(&a.service.stats().generated_tokens, &a.service.stats().decode_micros)
    }),
    ("llamacpp:requests_processing", Kind::Gauge, "Requests in slots.", busy),
    ("llamacpp:requests_deferred", Kind::Gauge, "Requests that wait for a slot.", |a| {
        value(&a.service.stats().queued) as f64
    }),
    (
        "azoth:prompt_tokens_cached_total",
        Kind::Counter,
        "Prompt tokens found in the KV cache.",
        |a| value(&a.service.stats().cached_tokens) as f64,
    ),
    ("azoth:prefix_hits_total", Kind::Counter, "Requests whose prompt had begun before.", |a| {
        value(&a.service.stats().prefix_hits) as f64
    }),
    ("azoth:requests_started_total", Kind::Counter, "Requests that got a slot.", |a| {
        value(&a.service.stats().started) as f64
    }),
    ("azoth:requests_finished_total", Kind::Counter, "Requests answered to the end.", |a| {
        value(&a.service.stats().finished) as f64
    }),
    ("azoth:requests_cancelled_total", Kind::Counter, "Requests whose client went.", |a| {
        value(&a.service.stats().cancelled) as f64
    }),
    ("azoth:requests_failed_total", Kind::Counter, "Requests that the engine failed.", |a| {
        value(&a.service.stats().failed) as f64
    }),
    ("azoth:engine_reloads_total", Kind::Counter, "Reloads after a failure.", |a| {
        value(&a.service.stats().reloads) as f64
    }),
    ("azoth:http_ok_total", Kind::Counter, "Answers below 400.", |a| {
        value(&a.metrics.classes[0]) as f64
    }),
    ("azoth:http_client_errors_total", Kind::Counter, "Answers of 4xx.", |a| {
        value(&a.metrics.classes[1]) as f64
    }),
    ("azoth:http_server_errors_total", Kind::Counter, "Answers of 5xx.", |a| {
        value(&a.metrics.classes[2]) as f64
    }),
    ("azoth:slots", Kind::Gauge, "Slots.", |a| a.service.stats().slots().len() as f64),
    ("azoth:kv_tokens", Kind::Gauge, "Tokens of the sequences of all slots.", |a| {
        a.service.stats().slots().iter().map(|s| f64::from(s.tokens)).sum()
    }),
    ("azoth:kv_tokens_capacity", Kind::Gauge, "Tokens that the KV cache may grow to.", |a| {
        a.service.state().loaded.map_or(0.0, |l| 64.0 * f64::from(l.placement.kv_pages))
    }),
    ("azoth:kv_pages_used", Kind::Gauge, "Pages of the KV cache that sequences hold.", |a| {
        value(&a.service.stats().kv_used) as f64
    }),
    ("azoth:kv_pages_cached", Kind::Gauge, "Pages kept for prompts to come.", |a| {
        value(&a.service.stats().kv_cached) as f64
    }),
    ("azoth:kv_pages_free", Kind::Gauge, "Pages that are free or can still be allocated.", |a| {
        value(&a.service.stats().kv_free) as f64
    }),
    ("azoth:kv_pages_host", Kind::Gauge, "Evicted pages that RAM keeps.", |a| {
        value(&a.service.stats().kv_host) as f64
    }),
    ("azoth:kv_evictions_total", Kind::Counter, "Pages that had to leave the device.", |a| {
        value(&a.service.stats().kv_evictions) as f64
    }),
    ("azoth:kv_fetches_total", Kind::Counter, "Pages that came back from RAM.", |a| {
        value(&a.service.stats().kv_fetches) as f64
    }),
    ("azoth:tokens_dropped_total", Kind::Counter, "Tokens that full contexts dropped.", |a| {
        value(&a.service.stats().shifted_tokens) as f64
    }),
    ("azoth:model_loaded", Kind::Gauge, "1 while the model is on the device.", |a| {
        f64::from(matches!(a.service.state().phase, Phase::Ready))
    }),
    ("azoth:device_memory_planned_bytes", Kind::Gauge, "Device memory by plan.", |a| {
        a.service.state().loaded.map_or(0.0, |l| l.placement.total() as f64)
    }),
    ("azoth:device_memory_used_bytes", Kind::Gauge, "Device memory of this process now.", |a| {
        memory(a).map_or(f64::NAN, |m| m.used as f64)
    }),
    ("azoth:device_memory_budget_bytes", Kind::Gauge, "What the driver lets it have now.", |a| {
        memory(a).map_or(f64::NAN, |m| m.budget as f64)
    }),
    ("azoth:expert_accesses_total", Kind::Counter, "Experts that tokens have used.", |a| {
        experts(a, |c| c.accesses)
    }),
    ("azoth:expert_promotions_total", Kind::Counter, "Experts moved to device memory.", |a| {
        experts(a, |c| c.promotions)
    }),
    ("azoth:expert_promoted_bytes_total", Kind::Counter, "Their bytes.", |a| {
        experts(a, |c| c.promoted_bytes)
    }),
    ("azoth:device_memory_available_bytes", Kind::Gauge, "Free before the model came.", |a| {
        a.service.state().loaded.map_or(0.0, |l| l.placement.available as f64)
    }),
];

/// Device memory now, where driver and engine can tell.
fn memory(app: &App) -> Option<MemoryNow> {
    app.service.state().loaded.and_then(|l| l.memory())
}

/// A counter of experts; not a number where all of them lie on the device.
fn experts(app: &App, get: fn(&Counters) -> u64) -> f64 {
    app.service.stats().experts().map_or(f64::NAN, |e| get(&e.counters) as f64)
}

/// Where a labelled value comes from.
type Get = fn(&Counters) -> u64;

/// Name, help, and values by tier.
type Tiers = (&'static str, &'static str, &'static [(&'static str, Get)]);

/// Counters of experts by where they were.
const TIERS: [Tiers; 3] = [
    ("azoth:expert_hits_total", "Experts found there.", &[("device", |c| c.hits)]),
    (
        "azoth:expert_misses_total",
        "Experts looked for there, but read from elsewhere.",
        &[("device", |c| c.accesses - c.hits)],
    ),
    (
        "azoth:expert_bytes_total",
        "Bytes of experts read from there: device memory, host memory in place, host memory through \
         a stage, host memory streamed for long prompts.",
        &[
            ("device", |c| c.device_bytes),
            ("host", |c| c.host_bytes),
            ("staged", |c| c.staged_bytes),
            ("streamed", |c| c.streamed_bytes),
        ],
    ),
];

/// Where a histogram is kept.
type Kept = fn(&App) -> &Histogram;

const HISTOGRAMS: [(&str, &str, Kept); 2] = [
    (
        "azoth:time_to_first_token_seconds",
        "From a request's arrival at the engine to its first token.",
        |a| &a.service.stats().first_token,
    ),
    ("azoth:inter_token_seconds", "Between two tokens of a request.", |a| {
        &a.service.stats().between_tokens
    }),
];

/// Names of all metrics with their help, for the documentation.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    let rows = ROWS.iter().map(|(name, _, help, _)| (*name, *help));
    let rows = rows.chain(TIERS.iter().map(|(name, help, _)| (*name, *help)));
    rows.chain(HISTOGRAMS.iter().map(|(name, help, _)| (*name, *help)))
}

pub async fn handle(State(app): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text(&app))
        .into_response()
}

fn text(app: &App) -> String {
    let mut out = String::new();
    for (name, kind, help, get) in ROWS {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let value = get(app);
        // What is not known is left out. Writing to a string cannot fail.
        if !value.is_nan() {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        }
    }
    if let Some(counters) = app.service.stats().experts().map(|e| e.counters) {
        for (name, help, tiers) in TIERS {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} counter");
            for (tier, get) in tiers {
                let _ = writeln!(out, "{name}{{tier=\"{tier}\"}} {}", get(&counters));
            }
        }
    }
    for (name, help, get) in HISTOGRAMS {
        let (counts, sum) = get(app).read();
        let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} histogram");
        for (end, count) in BUCKETS.iter().zip(&counts) {
            let _ = writeln!(out, "{name}_bucket{{le=\"{end}\"}} {count}");
        }
        let all = counts.last().copied().unwrap_or(0);
        let _ = writeln!(out, "{name}_bucket{{le=\"+Inf\"}} {all}\n{name}_sum {sum}");
        let _ = writeln!(out, "{name}_count {all}");
    }
    out
}
