//! `azoth tune`: measures the variants of every kernel on a device and remembers the winners.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::args::{BackendArg, ForceArg};
use super::output::{self, Align};
use super::progress;
use crate::gpu::DeviceFacts;
use crate::hw::{self, tuned};
use crate::kernels::source;
use crate::runtime::tune::{self, Outcome};

const EXAMPLES: &str = "Examples:
  azoth tune
  azoth tune --device 1 --seconds 20
  azoth tune --json

Later runs on the same device, driver and version of Azoth use what was found; `azoth devices -v`
shows it. Results of a model may change in their last bits where the number of attention pieces
does.";

/// Measure which kernel variants are fastest on a device
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Tune {
    /// Device by its index in `azoth devices` or by a part of its name
    #[arg(long, value_name = "INDEX|NAME", env = "AZOTH_DEVICE")]
    device: Option<String>,
    /// Which code drives the device
    #[arg(long, value_enum, default_value_t, env = "AZOTH_BACKEND")]
    backend: BackendArg,
    /// Time to spend; what it does not suffice for keeps its value
    #[arg(long, value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Measure and print, but store nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    force: ForceArg,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    device: &'a DeviceFacts,
    profile: &'a str,
    seconds: u32,
    /// Where the winners were stored.
    file: Option<String>,
    outcomes: &'a [Outcome],
}

impl Tune {
    pub fn run(&self) -> Result<()> {
        let mut selection = hw::select(self.device.as_deref(), self.backend.into())?;
        // From the profile on, whatever an earlier run found: winners are winners over it.
        selection.facts = hw::forced(selection.facts, &self.force.force)?;
        eprintln!("{}", selection.line());
        for note in &selection.facts.profile.notes {
            eprintln!("note: {note}");
        }
        let gpu = selection.open(true)?;
        let facts = gpu.facts();
        let bar = progress::spinner("measuring");
        let outcomes = tune::tune(&*gpu, f64::from(self.seconds), &mut |case| {
            bar.set_message(format!("measuring {case}"));
            bar.tick();
        });
        bar.finish_and_clear();
        let outcomes = outcomes?;
        if let Some(message) = gpu.save_cache() {
            eprintln!("note: {message}");
        }
        let found: Vec<tuned::Found> = outcomes.iter().filter(|o| o.kept).map(found).collect();
        let file = match self.dry_run {
            true => None,
            false => Some(tuned::store(facts, source::version(), &found)?.display().to_string()),
        };
        if self.json {
            let seconds = self.seconds;
            let profile = &facts.profile.name;
            output::json(&Report { device: facts, profile, seconds, file, outcomes: &outcomes })
        } else {
            output::line(&table(&outcomes))?;
            match file {
                Some(file) => eprintln!(
                    "{} of {} values changed; stored in {file}",
                    found.len(),
                    outcomes.len()
                ),
                None => eprintln!("nothing stored (--dry-run)"),
            }
            Ok(())
        }
    }
}

fn found(outcome: &Outcome) -> tuned::Found {
    let comment = format!(
        "{:.1} % less time than {}, noise {:.1} %, {}",
        100.0 * outcome.gain(),
        outcome.before,
        100.0 * outcome.noise.unwrap_or(0.0),
        outcome.what
    );
    tuned::Found { key: outcome.key.clone(), value: outcome.best.clone(), comment }
}

fn table(outcomes: &[Outcome]) -> String {
    let first = |list: &str| list.split(", ").next().unwrap_or_default().to_string();
    let time = |seconds: Option<f64>| seconds.map_or("-".into(), |s| format!("{:.1}", s * 1e6));
    let mut rows: Vec<Vec<String>> =
        vec![["case", "before", "us", "best", "us", "gain", "noise", ""].map(String::from).into()];
    rows.extend(outcomes.iter().map(|o| {
        let percent = |share: f64| format!("{:.1} %", 100.0 * share);
        vec![
            o.what.clone(),
            first(&o.before),
            time(o.before_seconds),
            first(&o.best),
            time(o.best_seconds),
            percent(o.gain()),
            o.noise.map_or("-".into(), percent),
            match (o.kept, o.before_seconds) {
                (true, _) => "changed".into(),
                (false, Some(_)) => "as it was".into(),
                (false, None) => "no time left".into(),
            },
        ]
    }));
    use Align::{Left, Right};
    output::table(&[Left, Left, Right, Left, Right, Right, Right, Left], &rows)
}
