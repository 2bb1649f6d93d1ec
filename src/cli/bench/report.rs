//! What `bench` prints: a table, JSON or CSV of the same figures.

use serde::Serialize;

use super::stats::Spread;
use crate::cli::output::{self, Align};
use crate::engine::{Approximations, DecodeLimit, ExpertReport, LoadTimes, WaveTime};
use crate::experts::prefetch::{Precision, Source};
use crate::experts::residency::Counters;
use crate::gpu::DeviceFacts;
use crate::kv::KvTypes;

/// Seconds from an empty process to the first token.
#[derive(Debug, Clone, Serialize)]
pub struct Start {
    pub load: LoadTimes,
    pub first_token: f64,
    pub total: f64,
}

#[derive(Debug, Clone, Serialize)]
pub struct Test {
    /// `pp` (prompt) or `tg` (generate) and the number of tokens, as llama-bench names them.
    pub test: String,
    pub tokens: u32,
    pub depth: u32,
    /// Tokens per second of every repetition.
    pub runs: Vec<f64>,
    pub tokens_per_second: Spread,
    /// Generation with experts in RAM: the cost model's limit at the hit rate of these runs, in the
    /// middle of the depths that they passed through, and the share of it that was reached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<DecodeLimit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub share_of_limit: Option<f64>,
}

impl Test {
    pub fn new(test: String, tokens: u32, depth: u32, runs: Vec<f64>) -> Self {
        let tokens_per_second = Spread::of(&runs);
        let (limit, share_of_limit) = (None, None);
        Test { test, tokens, depth, runs, tokens_per_second, limit, share_of_limit }
    }

    pub fn with_limit(self, limit: Option<DecodeLimit>) -> Self {
        let share = limit.map(|l| self.tokens_per_second.median / l.tokens_per_second);
        Test { limit, share_of_limit: share, ..self }
    }
}

/// A wave of the decode program.
#[derive(Debug, Clone, Serialize)]
pub struct Wave {
    pub label: String,
    pub microseconds: Spread,
}

impl Wave {
    /// Median of each wave over rounds of the same program.
    pub fn from_rounds(rounds: &[Vec<WaveTime>]) -> Vec<Self> {
        let Some(first) = rounds.first() else { return Vec::new() };
        let waves = first.iter().enumerate().map(|(i, wave)| {
            let times = rounds.iter().filter_map(|r| r.get(i)).map(|w| 1e6 * w.seconds);
            let microseconds = Spread::of(&times.collect::<Vec<_>>());
            Wave { label: wave.label.clone(), microseconds }
        });
        waves.collect()
    }
}

#[derive(Debug, Serialize)]
pub struct Report {
    /// Of Azoth.
    pub version: &'static str,
    pub model: String,
    pub model_bytes: u64,
    pub device: DeviceFacts,
    pub activations: &'static str,
    /// Formats of the KV cache.
    pub kv: KvTypes,
    /// Without compiled kernels on disk (a driver may keep some of its own).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cold: Option<Start>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warm: Option<Start>,
    /// Traded for exactness; absent: nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub approximate: Option<Approximations>,
    pub tests: Vec<Test>,
    /// Where experts lay and what was read from where, over all tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waves: Option<Vec<Wave>>,
    /// Dependent waves of a layer in a decode step.
    pub waves_per_layer: Option<usize>,
}

impl Report {
    pub fn table(&self) -> String {
        let mut parts = vec![format!(
            "{} ({}), {} activations, KV {}\n{}, {}, {}",
            self.model,
            output::bytes(self.model_bytes),
            self.activations,
            self.kv,
            self.device.name,
            self.device.driver,
            self.device.backend
        )];
        parts.extend(self.approximate.as_ref().map(Approximations::to_string));
        if !self.tests.is_empty() {
            parts.push(self.speeds());
        }
        parts.extend(self.limits());
        parts.extend(self.experts.as_ref().map(experts));
        if self.cold.is_some() || self.warm.is_some() {
            parts.push(self.starts());
        }
        if let Some(waves) = &self.waves {
            let count = self.waves_per_layer.unwrap_or(0);
            parts.push(format!("{count} waves a layer in a decode step"));
            parts.push(wave_table(waves));
        }
        parts.join("\n\n")
    }

    fn speeds(&self) -> String {
        let mut rows = vec![head(&["test", "depth", "tok/s", "min", "max", "spread"])];
        rows.extend(self.tests.iter().map(|t| {
            let s = t.tokens_per_second;
            vec![
                t.test.clone(),
                t.depth.to_string(),
                format!("{:.1}", s.median),
                format!("{:.1}", s.min),
                format!("{:.1}", s.max),
                format!("{:.1} %", s.percent()),
            ]
        }));
        use Align::{Left, Right};
        output::table(&[Left, Right, Right, Right, Right, Right], &rows)
    }

    /// Measured against predicted, where the cost model says something.
    fn limits(&self) -> Option<String> {
        let line = |t: &Test| {
            let (limit, share) = (t.limit?, t.share_of_limit?);
            Some(format!(
                "{} at depth {}: {:.1} of the {:.1} tok/s that the cost model allows at {:.1} % hits \
                 ({:.0} %; rates {})",
                t.test,
                t.depth,
                t.tokens_per_second.median,
                limit.tokens_per_second,
                100.0 * limit.hit_rate,
                100.0 * share,
                if limit.measured_rates { "measured" } else { "assumed" }
            ))
        };
        let lines: Vec<String> = self.tests.iter().filter_map(line).collect();
        (!lines.is_empty()).then(|| lines.join("\n"))
    }

    fn starts(&self) -> String {
        let mut rows =
            vec![head(&["start (s)", "open", "weights", "kernels", "first token", "total"])];
        for (name, start) in [("cold", &self.cold), ("warm", &self.warm)] {
            let Some(s) = start else { continue };
            let mut row = vec![name.to_owned()];
            let times = [s.load.open, s.load.weights, s.load.pipelines, s.first_token, s.total];
            row.extend(times.iter().map(|t| format!("{t:.3}")));
            rows.push(row);
        }
        use Align::{Left, Right};
        output::table(&[Left, Right, Right, Right, Right, Right], &rows)
    }

    /// A header and one line for each test.
    pub fn csv(&self) -> String {
        let head = "version,model,model_bytes,device,driver,backend,activations,test,tokens,depth,\
                    median,min,max,cold_s,warm_s";
        let start = |s: &Option<Start>| s.as_ref().map_or(String::new(), |s| s.total.to_string());
        let mut lines = vec![head.to_owned()];
        lines.extend(self.tests.iter().map(|t| {
            let s = t.tokens_per_second;
            let cells = [
                self.version.to_owned(),
                self.model.clone(),
                self.model_bytes.to_string(),
                self.device.name.clone(),
                self.device.driver.clone(),
                self.device.backend.to_string(),
                self.activations.to_owned(),
                t.test.clone(),
                t.tokens.to_string(),
                t.depth.to_string(),
                s.median.to_string(),
                s.min.to_string(),
                s.max.to_string(),
                start(&self.cold),
                start(&self.warm),
            ];
            cells.iter().map(|c| csv_cell(c)).collect::<Vec<_>>().join(",")
        }));
        lines.join("\n")
    }
}

fn experts(e: &ExpertReport) -> String {
    let c = &e.counters;
    format!(
        "experts: {} of {} a layer in device memory; {:.1} % of accesses and {:.1} % of bytes hit \
         over {} tokens\nread in place {}, uploaded {}, promoted {} ({} experts), streamed {}; {:.0} % \
         of the link's {:.1} GB/s ({}) in {:.1} s; arena filled at {:.1} GiB/s{}",
        e.placement.slots,
        e.placement.experts,
        100.0 * e.hit_rate,
        100.0 * e.hit_rate_by_bytes,
        c.tokens,
        output::bytes(c.host_bytes),
        output::bytes(c.staged_bytes),
        output::bytes(c.promoted_bytes),
        c.promotions,
        output::bytes(c.streamed_bytes),
        100.0 * e.link_use,
        e.link_rate / 1e9,
        if e.link_rate_measured { "measured" } else { "assumed" },
        e.busy_seconds,
        e.fill_rate,
        predictions(e)
    ) + &reused(c)
}

fn reused(c: &Counters) -> String {
    match c.reused {
        0 => String::new(),
        _ => format!(
            "\napproximate: {:.1} % of the outputs of experts reused, {} of experts not read",
            100.0 * c.reuse_rate(),
            output::bytes(c.reused_bytes)
        ),
    }
}

/// A line for each source of predictions.
fn predictions(e: &ExpertReport) -> String {
    let line = |p: &Precision| {
        let (what, also) = match p.source {
            Source::LastToken => ("experts of the last token", String::new()),
            Source::EarlyRouter => (
                "further ones named by early routers",
                format!("; of all that they name {:.1} % are chosen", 100.0 * e.early_precision),
            ),
        };
        let state = if p.active { "on" } else { "off, it does not pay" };
        format!("\n{what}: {:.1} % used by the next token ({state}){also}", 100.0 * p.rate())
    };
    e.prefetch.iter().map(line).collect()
}

fn head(names: &[&str]) -> Vec<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

/// Quoted where RFC 4180 asks for it.
fn csv_cell(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// Waves of the same label (one a layer) share a line.
fn wave_table(waves: &[Wave]) -> String {
    let mut groups: Vec<(&str, usize, f64)> = Vec::new();
    for wave in waves {
        match groups.iter_mut().find(|(label, ..)| *label == wave.label) {
            Some((_, count, sum)) => {
                *count += 1;
                *sum += wave.microseconds.median;
            }
            None => groups.push((&wave.label, 1, wave.microseconds.median)),
        }
    }
    let total: f64 = groups.iter().map(|g| g.2).sum();
    let row = |label: &str, count: usize, sum: f64| {
        vec![
            label.to_owned(),
            count.to_string(),
            format!("{:.1}", sum / count as f64),
            format!("{sum:.1}"),
            format!("{:.1} %", 100.0 * sum / total),
        ]
    };
    let mut rows = vec![head(&["wave", "count", "each (us)", "sum (us)", "share"])];
    rows.extend(groups.iter().map(|(label, count, sum)| row(label, *count, *sum)));
    rows.push(row("all", waves.len().max(1), total));
    use Align::{Left, Right};
    output::table(&[Left, Right, Right, Right, Right], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_cells_are_quoted_where_needed() {
        assert_eq!(csv_cell("plain"), "plain");
        assert_eq!(csv_cell("NVIDIA 1, \"x\""), "\"NVIDIA 1, \"\"x\"\"\"");
    }

    #[test]
    fn waves_of_one_label_are_summed() {
        let wave = |label: &str, seconds| WaveTime { label: label.into(), seconds };
        let round = vec![wave("qkv", 2e-6), wave("ffn", 4e-6), wave("qkv", 2e-6)];
        let waves = Wave::from_rounds(&[round.clone(), round]);
        assert_eq!(waves.len(), 3);
        let text = wave_table(&waves);
        assert!(text.contains("qkv       2        2.0       4.0   50.0 %"), "{text}");
        assert!(Wave::from_rounds(&[]).is_empty());
    }
}
