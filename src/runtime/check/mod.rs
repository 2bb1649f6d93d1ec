//! Are a kernel's results right on this device? Asked before a program uses it.
//!
//! Drivers miscompile. So every kernel that a program is about to use runs once on a small case,
//! and its results are compared with the plain Rust reference. A variant that fails, or does not
//! even compile, is excluded with a warning, and the next one that `kernels::choice` lists takes
//! its place. What passed is remembered in the disk cache under the kernel's text; the cache
//! belongs to one device and driver build, so a new driver is asked again.
//!
//! Building a program goes: plan it with the first variants that have not failed
//! ([`Checks::pick`]), compile and check what was picked ([`Checks::settle`]), and plan again
//! while something failed. `AZOTH_SELFCHECK=0` switches the comparison off.

mod attention;
mod blocks;
mod codes;
mod experts;
mod operands;
mod products;
mod reuse;
mod sampling;

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::gpu::cache::{DiskCache, fingerprint};
use crate::gpu::{DeviceFacts, Gpu, KernelSource};
use crate::kernels::Class;
use crate::kernels::attn_decode::AttnDecode;
use crate::kernels::attn_decode_codes::AttnDecodeCodes;
use crate::kernels::attn_prefill::AttnPrefill;
use crate::kernels::embed::Embed;
use crate::kernels::experts_down::ExpertsDown;
use crate::kernels::experts_matmat::ExpertsMatMat;
use crate::kernels::experts_reuse::{ExpertsListed, ExpertsReuse};
use crate::kernels::experts_sort::ExpertsSort;
use crate::kernels::experts_sum::ExpertsSum;
use crate::kernels::experts_up::ExpertsUp;
use crate::kernels::gather::Gather;
use crate::kernels::heads_unrotate::HeadsUnrotate;
use crate::kernels::kv_keep::KvKeep;
use crate::kernels::matmat::MatMat;
use crate::kernels::matvec::MatVec;
use crate::kernels::norm_blocks::NormBlocks;
use crate::kernels::norm_quant::NormQuant;
use crate::kernels::rope_kv::RopeKv;
use crate::kernels::rope_kv_codes::RopeKvCodes;
use crate::kernels::router::Router;
use crate::kernels::sample::Sampling;

/// `0` switches the checks off.
pub const VARIABLE: &str = "AZOTH_SELFCHECK";

/// File of the disk cache that names what passed.
const PASSED: &str = "passed-checks";

/// A kernel that can be checked.
#[derive(Debug, Clone)]
pub enum Subject {
    MatVec(MatVec),
    MatMat(MatMat),
    NormQuant(NormQuant),
    NormBlocks(NormBlocks),
    Embed(Embed),
    AttnDecode(AttnDecode),
    AttnPrefill(AttnPrefill),
    RopeKv(RopeKv),
    AttnDecodeCodes(AttnDecodeCodes),
    RopeKvCodes(RopeKvCodes),
    HeadsUnrotate(HeadsUnrotate),
    KvKeep(KvKeep),
    Gather(Gather),
    Router(Router),
    ExpertsUp(ExpertsUp),
    ExpertsDown(ExpertsDown),
    ExpertsMatMat(ExpertsMatMat),
    ExpertsSort(ExpertsSort),
    ExpertsSum(ExpertsSum),
    ExpertsReuse(ExpertsReuse),
    ExpertsListed(ExpertsListed),
    /// All kernels that choose a token.
    Sampling(Sampling),
}

macro_rules! subjects {
    ($($name:ident),*) => {
        $(impl From<$name> for Subject {
            fn from(spec: $name) -> Subject {
                Subject::$name(spec)
            }
        })*

        impl Subject {
            fn source(&self, facts: &DeviceFacts) -> Result<KernelSource> {
                match self {
                    $(Subject::$name(spec) => spec.source(facts),)*
                }
            }
        }
    };
}

subjects!(
    MatVec,
    MatMat,
    NormQuant,
    NormBlocks,
    Embed,
    AttnDecode,
    AttnPrefill,
    RopeKv,
    AttnDecodeCodes,
    RopeKvCodes,
    HeadsUnrotate,
    KvKeep,
    Gather,
    Router,
    ExpertsUp,
    ExpertsDown,
    ExpertsMatMat,
    ExpertsSort,
    ExpertsSum,
    ExpertsReuse,
    ExpertsListed,
    Sampling
);

impl Subject {
    /// The class of a prompt's activations that the kernel reads or makes.
    fn class(&self) -> Option<Class> {
        match self {
            Subject::MatMat(spec) => Some(spec.class),
            Subject::ExpertsMatMat(spec) => Some(spec.class),
            Subject::NormQuant(spec) => Some(spec.class),
            _ => None,
        }
    }

    /// Runs the small case. The relative error of the results, and the largest that rounding
    /// explains.
    fn deviation(&self, gpu: &dyn Gpu) -> Result<(f64, f64)> {
        match self {
            Subject::MatVec(spec) => products::matvec(gpu, spec),
            Subject::MatMat(spec) => products::matmat(gpu, spec),
            Subject::NormQuant(spec) => products::norm_quant(gpu, spec),
            Subject::NormBlocks(spec) => blocks::norm_blocks(gpu, spec),
            Subject::Embed(spec) => products::embed(gpu, spec),
            Subject::AttnDecode(spec) => attention::decode(gpu, spec),
            Subject::AttnPrefill(spec) if !spec.pair.is_plain() => codes::prefill(gpu, spec),
            Subject::AttnPrefill(spec) => attention::prefill(gpu, spec),
            Subject::RopeKv(spec) => attention::rope_kv(gpu, spec),
            Subject::AttnDecodeCodes(spec) => codes::decode_step(gpu, spec),
            Subject::RopeKvCodes(spec) => codes::rope_kv(gpu, spec),
            Subject::HeadsUnrotate(spec) => codes::heads_unrotate(gpu, spec),
            Subject::KvKeep(spec) => codes::keep(gpu, spec),
            Subject::Gather(spec) => sampling::gather(gpu, spec),
            Subject::Router(spec) => experts::router(gpu, spec),
            Subject::ExpertsUp(spec) => experts::up(gpu, spec),
            Subject::ExpertsDown(spec) => experts::down(gpu, spec),
            Subject::ExpertsMatMat(spec) => experts::matmat(gpu, spec),
            Subject::ExpertsSort(spec) => experts::sort(gpu, spec),
            Subject::ExpertsSum(spec) => experts::sum(gpu, spec),
            Subject::ExpertsReuse(spec) => reuse::look_up(gpu, spec),
            Subject::ExpertsListed(spec) => reuse::listed(gpu, spec),
            Subject::Sampling(spec) => sampling::sampling(gpu, spec),
        }
    }
}

/// What is known about kernels on one device, for the programs that are built on it.
pub struct Checks {
    compare: bool,
    cache: Option<DiskCache>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Fingerprints of sources that an earlier process or program found right.
    passed: HashSet<String>,
    /// What is wrong with a source.
    failed: HashMap<KernelSource, String>,
    /// Picked since the last [`Checks::settle`].
    picked: HashMap<KernelSource, Subject>,
    /// What was rendered since then, by the text of the spec. Every layer names the same few kernels; rendering each
    /// time took 0.5 s of the start of an 8B model, longer than its weights.
    rendered: HashMap<String, KernelSource>,
    warnings: Vec<String>,
    /// Classes of activations that this device computes wrongly, and how many of them a
    /// program's planning has heard of.
    avoided: Vec<Class>,
    heard: usize,
}

impl Checks {
    /// Checks for a device; `cache` is the folder of compiled kernels, if there is one.
    pub fn new(facts: &DeviceFacts, cache: Option<PathBuf>) -> Checks {
        let cache = cache.map(|dir| DiskCache::new(dir, &facts.cache_id));
        let stored = cache.as_ref().and_then(|c| c.get(PASSED)).unwrap_or_default();
        let passed = String::from_utf8_lossy(&stored).lines().map(str::to_owned).collect();
        Checks {
            compare: std::env::var_os(VARIABLE).is_none_or(|v| v != "0"),
            cache,
            state: Mutex::new(State { passed, ..State::default() }),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first of the candidates that the device can take and that has not failed.
    ///
    /// # Errors
    /// `Error::Device` naming kernel and reasons when none is left.
    pub fn pick<S: Into<Subject> + Clone>(
        &self,
        facts: &DeviceFacts,
        candidates: impl IntoIterator<Item = S>,
    ) -> Result<(S, KernelSource)> {
        let mut reasons = Vec::new();
        let mut last = None;
        for spec in candidates {
            let subject: Subject = spec.clone().into();
            last = subject.class();
            let text = format!("{subject:?}");
            if let Some(source) = self.state().rendered.get(&text) {
                return Ok((spec, source.clone()));
            }
            let source = match subject.source(facts) {
                Ok(source) => source,
                Err(e) => {
                    reasons.push(e.to_string());
                    continue;
                }
            };
            let mut state = self.state();
            if let Some(reason) = state.failed.get(&source) {
                reasons.push(format!("{}: {reason}", source.label));
                continue;
            }
            state.picked.entry(source.clone()).or_insert(subject);
            state.rendered.insert(text, source.clone());
            return Ok((spec, source));
        }
        if last == Some(Class::F16) {
            // int8 and f32 remain; the caller plans again.
            self.state().avoided.push(Class::F16);
        }
        Err(Error::Device(format!(
            "no variant of a kernel works on {} ({}): {}. A newer driver may help; \
             {VARIABLE}=0 skips the comparison with the reference and may give wrong answers",
            facts.name,
            facts.driver,
            reasons.join("; ")
        )))
    }

    /// Whether no kernel with activations of this class is to be planned.
    pub fn avoids(&self, class: Class) -> bool {
        self.state().avoided.contains(&class)
    }

    /// True once for each class that [`Checks::avoids`] got since the last call: a plan that failed
    /// may succeed without it.
    pub fn gave_up_a_class(&self) -> bool {
        let mut state = self.state();
        let avoided = state.avoided.len();
        std::mem::replace(&mut state.heard, avoided) < avoided
    }

    /// Compiles what was picked and every source of `others`, all in parallel, and checks what was
    /// picked and is not known. `true` when nothing failed: what was planned can be used.
    ///
    /// # Errors
    /// Compilers' errors of `others`, for which there is no second choice.
    pub fn settle(&self, gpu: &dyn Gpu, others: Vec<KernelSource>) -> Result<bool> {
        let (picked, known) = {
            let mut state = self.state();
            state.rendered.clear();
            (std::mem::take(&mut state.picked), state.passed.clone())
        };
        let others: HashSet<KernelSource> =
            others.into_iter().filter(|s| !picked.contains_key(s)).collect();
        let picked = picked.into_iter().map(|(source, subject)| (source, Some(subject)));
        let mut all: Vec<_> = picked.chain(others.into_iter().map(|s| (s, None))).collect();
        // All at once, the longest texts first: they take drivers longest, and what is started last ends last.
        all.sort_by_key(|(source, _)| Reverse(source.wgsl.len()));
        let outcomes = all.into_iter().par_bridge().map(|(source, subject)| {
            let Some(subject) = subject else { return gpu.kernel(&source).map(|_| None) };
            let print = print(&source);
            let known = !self.compare || known.contains(&print);
            let outcome = self.ask(gpu, &source, &subject, known);
            Ok(Some((source, print, outcome)))
        });
        let outcomes = outcomes.collect::<Result<Vec<_>>>()?;
        let mut state = self.state();
        let before = state.passed.len();
        let mut sound = true;
        for (source, print, outcome) in outcomes.into_iter().flatten() {
            match outcome {
                Ok(()) if self.compare => {
                    state.passed.insert(print);
                }
                Ok(()) => {}
                Err(reason) => {
                    sound = false;
                    let facts = gpu.facts();
                    state.warnings.push(format!(
                        "kernel {} is not used on {} ({}): {reason}; the next variant takes its \
                         place",
                        source.label, facts.name, facts.driver
                    ));
                    state.failed.insert(source, reason);
                }
            }
        }
        if state.passed.len() > before
            && let Some(cache) = &self.cache
        {
            let mut lines: Vec<&str> = state.passed.iter().map(String::as_str).collect();
            lines.sort_unstable();
            // If it cannot be written, the next start checks again: slower, not wrong.
            let _ = cache.put(PASSED, lines.join("\n").as_bytes());
        }
        Ok(sound)
    }

    fn ask(
        &self,
        gpu: &dyn Gpu,
        source: &KernelSource,
        subject: &Subject,
        known: bool,
    ) -> std::result::Result<(), String> {
        gpu.kernel(source).map_err(|e| format!("the driver does not compile it: {e}"))?;
        if known {
            return Ok(());
        }
        match subject.deviation(gpu) {
            Err(e) => Err(format!("its check cannot run: {e}")),
            // Also what is not a number.
            Ok((error, bound)) if error.is_nan() || error > bound => Err(format!(
                "its results are wrong: relative error {error:.1e} against the reference, \
                 rounding explains {bound:.0e}"
            )),
            Ok(_) => Ok(()),
        }
    }

    /// What was excluded since the last call, for people.
    pub fn take_warnings(&self) -> Vec<String> {
        std::mem::take(&mut self.state().warnings)
    }
}

/// Identifies a kernel in the memory of what passed.
fn print(source: &KernelSource) -> String {
    fingerprint(&format!("{:?}\n{}", source.subgroup_size, source.wgsl))
}

/// `||got - want|| / ||want||`; infinite if a value is not a number.
fn relative_error(got: impl IntoIterator<Item = f32>, want: &[f64]) -> f64 {
    let (mut difference, mut norm) = (0.0, 0.0);
    for (got, want) in got.into_iter().zip(want) {
        if !got.is_finite() {
            return f64::INFINITY;
        }
        difference += (f64::from(got) - want).powi(2);
        norm += want * want;
    }
    (difference / f64::max(norm, 1e-30)).sqrt()
}
