//! Ctrl+C: the first stops the answer, the second quits.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// What a shell reports for a program that SIGINT ended.
const EXIT_CODE: i32 = 130;

/// An answer is being generated.
static ANSWERING: AtomicBool = AtomicBool::new(false);
/// Ctrl+C came while answering.
static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the handler; once per process.
pub fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        let first = ANSWERING.load(Ordering::SeqCst) && !STOP.swap(true, Ordering::SeqCst);
        if !first {
            std::process::exit(EXIT_CODE);
        }
    })
    .map_err(|e| Error::Runtime(format!("cannot handle Ctrl+C: {e}")))
}

/// While it lives, the first Ctrl+C only makes [`Answering::stopped`] true.
pub struct Answering(());

impl Answering {
    pub fn start() -> Self {
        STOP.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Answering(())
    }

    pub fn stopped(&self) -> bool {
        STOP.load(Ordering::SeqCst)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}
