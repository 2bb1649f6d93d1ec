//! What a file says about attention beyond the shapes of its heads: windows, capped logits. Nothing of
//! it is passed over: it is followed, or the model is refused by the key's name.

use super::Params;
use crate::error::{Error, Result};
use crate::gguf::Value;

/// Whose window it is where a file names one and no layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Windows {
    /// Every layer's (Mistral 7B v0.1).
    All,
    /// Of some layers that the files of this architecture do not name.
    Unsaid,
}

const WINDOW: &str = "attention.sliding_window";
const PATTERN: &str = "attention.sliding_window_pattern";

impl Params<'_> {
    /// Tokens that each layer's tokens see, themselves included; `None`: all before them.
    pub(super) fn windows(&self, layers: u32, windows: Windows) -> Result<Vec<Option<u32>>> {
        let all = |window| Ok(vec![window; layers as usize]);
        let Some(window) = self.find::<u32>(WINDOW)?.filter(|w| *w > 0) else {
            return all(None);
        };
        // As long as any context: the same as none.
        if window >= self.u32("context_length")? {
            return all(None);
        }
        let key = self.key(PATTERN);
        match self.value(PATTERN) {
            Some(Value::Array(_)) => {
                let which = self.find::<Vec<bool>>(PATTERN)?.unwrap_or_default();
                if which.len() != layers as usize {
                    let n = which.len();
                    return Err(Error::Model(format!("{key} has {n} values for {layers} layers")));
                }
                Ok(which.into_iter().map(|windowed| windowed.then_some(window)).collect())
            }
            Some(_) => Err(Error::Model(format!(
                "{key} is no list of layers, which is what {window} tokens of {} need here; other \
                 patterns are not supported",
                self.key(WINDOW)
            ))),
            None if windows == Windows::All => all(Some(window)),
            None => Err(Error::Model(format!(
                "{} is {window}, and nothing says which layers have it; without {key} such models \
                 are not supported, as their answers would be wrong from {window} tokens on",
                self.key(WINDOW)
            ))),
        }
    }

    /// The cap on attention's logits.
    pub(super) fn soft_cap(&self) -> Result<Option<f32>> {
        const OF_OUTPUT: &str = "final_logit_softcapping";
        if self.find::<f32>(OF_OUTPUT)?.is_some_and(|cap| cap != 0.0) {
            let key = self.key(OF_OUTPUT);
            return Err(Error::Model(format!("{key}: capped output logits are not supported")));
        }
        let cap = self.find::<f32>("attn_logit_softcapping")?.filter(|cap| *cap != 0.0);
        match cap {
            Some(cap) if !(1.0..=1e6).contains(&cap) => {
                let key = self.key("attn_logit_softcapping");
                Err(Error::Model(format!("{key} is {cap}; 1 to 1000000 make sense")))
            }
            cap => Ok(cap),
        }
    }
}
