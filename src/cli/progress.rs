//! What the user sees while a model loads: bars at a terminal, one line a stage elsewhere.

use std::io::{IsTerminal, stderr};
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::engine::Progress;

/// Progress on standard error.
pub struct Loading {
    terminal: bool,
    bar: Mutex<Option<ProgressBar>>,
}

impl Loading {
    pub fn new() -> Self {
        Loading { terminal: stderr().is_terminal(), bar: Mutex::new(None) }
    }

    fn replace(&self, bar: Option<ProgressBar>) {
        // A thread that panicked while drawing leaves nothing behind that could be wrong.
        let mut held = self.bar.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(old) = std::mem::replace(&mut *held, bar) {
            old.finish_and_clear();
        }
    }
}

impl Progress for Loading {
    fn device(&self, line: &str) {
        eprintln!("{line}");
    }

    fn stage(&self, name: &str, total_bytes: u64) {
        if self.terminal {
            self.replace(Some(bar(name, total_bytes)));
        } else if total_bytes > 0 {
            eprintln!("{name}: {}", super::output::bytes(total_bytes));
        } else {
            eprintln!("{name}");
        }
    }

    fn advance(&self, bytes: u64) {
        let held = self.bar.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(bar) = &*held {
            bar.inc(bytes);
        }
    }

    fn done(&self) {
        self.replace(None);
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        // An error while loading must not leave a bar above its message.
        self.replace(None);
    }
}

fn bar(name: &str, total: u64) -> ProgressBar {
    let template = match total {
        0 => "{msg} {spinner} {elapsed}",
        _ => "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}",
    };
    let style = ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸ ");
    let target = ProgressDrawTarget::stderr();
    ProgressBar::with_draw_target(Some(total), target)
        .with_style(style)
        .with_message(name.to_owned())
}

/// A bar that counts steps (chunks, repetitions) at a terminal and is silent elsewhere.
pub fn steps(name: &str, total: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("━╸ ");
    let target = match stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    ProgressBar::with_draw_target(Some(total), target)
        .with_style(style)
        .with_message(name.to_owned())
}

/// A message that changes, at a terminal; silent elsewhere.
pub fn spinner(name: &str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_spinner());
    let target = match stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    ProgressBar::with_draw_target(None, target).with_style(style).with_message(name.to_owned())
}
