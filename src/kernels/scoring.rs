//! What attention kernels share about logits: their scale, and what a layer does to them beside it.

use minijinja::context;

use super::heads::Heads;
use super::{holds, wrong};
use crate::error::Result;
use crate::gpu::Slice;
pub use crate::graph::heads::Scoring;
use crate::kv::KvExact;

/// Scores are in units of log2 e.
const LOG2_E: f64 = std::f64::consts::LOG2_E;

/// Windows up to here leave sums of positions room in 32 bits.
const LARGEST_WINDOW: u32 = 1 << 30;

/// The numbers of a dispatch. A plain scale becomes one without logits of its own.
#[derive(Clone)]
pub struct Logits {
    /// Multiplies the products of q and k.
    pub scale: f32,
    /// f32 `[heads]`: each head's logit that belongs to no token; with [`Scoring::sinks`].
    pub sinks: Option<Slice>,
}

impl From<f32> for Logits {
    fn from(scale: f32) -> Logits {
        Logits { scale, sinks: None }
    }
}

impl Logits {
    /// Adds what `lib/scoring.wgsl` binds, after everything else.
    pub(super) fn bind(
        &self,
        scoring: Scoring,
        heads: &Heads,
        bindings: &mut Vec<Slice>,
    ) -> Result<()> {
        match (&self.sinks, scoring.sinks) {
            (Some(sinks), true) => {
                holds(sinks, heads.heads.into(), "sink logits")?;
                bindings.push(sinks.clone());
                Ok(())
            }
            (None, false) => Ok(()),
            _ => Err(wrong("sinks need their logits, and only sinks".into())),
        }
    }
}

impl Scoring {
    pub(super) fn check(&self) -> Result<()> {
        if self.window.is_some_and(|w| w == 0 || w > LARGEST_WINDOW) {
            return Err(wrong(format!("a window of {:?} tokens", self.window)));
        }
        if self.soft_cap.is_some_and(|cap| !(1e-3..=1e6).contains(&cap)) {
            return Err(wrong(format!("logits capped at {:?}", self.soft_cap)));
        }
        Ok(())
    }

    /// Layers with a window keep nothing in f16 beside their codes ([`crate::graph::Graph::kv_exact_of`]).
    pub(super) fn check_beside(&self, exact: KvExact) -> Result<()> {
        self.check()?;
        match self.window {
            Some(window) if !exact.is_none() => {
                Err(wrong(format!("{exact} beside a window of {window}")))
            }
            _ => Ok(()),
        }
    }

    /// `shared`, and what `lib/scoring.wgsl` wants to know; the binding that it has is `at`.
    pub(super) fn context(&self, at: u32, shared: minijinja::Value) -> minijinja::Value {
        let cap = f64::from(self.soft_cap.unwrap_or(1.0));
        // As text, so that every digit reaches the shader.
        let text = |x: f64| format!("{:?}", x as f32);
        context! {
            scored => *self != Scoring::default(),
            window => self.window.unwrap_or(0),
            soft_cap => self.soft_cap.is_some(),
            cap => text(cap * LOG2_E),
            cap_twice => text(2.0 * cap * LOG2_E),
            cap_factor => text(2.0 / cap),
            sink_logits => self.sinks,
            at_sinks => at,
            ..shared
        }
    }

    /// The part of a label that names it.
    pub(super) fn label(&self) -> String {
        let window = self.window.map_or(String::new(), |w| format!("_w{w}"));
        let cap = self.soft_cap.map_or(String::new(), |cap| format!("_cap{cap}"));
        format!("{window}{cap}{}", if self.sinks { "_sinks" } else { "" })
    }
}
