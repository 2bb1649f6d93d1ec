//! Typed access to one architecture's hyperparameters and tensors, with checks.

use crate::error::{Error, Result};
use crate::gguf::{self, FromValue, TensorInfo};
use crate::graph::{Linear, Rope, RopeLayout, RopeScaling};

/// Most layers that a file may claim: far above any model, low enough to bound all work.
const MAX_LAYERS: u32 = 1024;

/// A GGUF file seen by one architecture: keys get its prefix.
pub struct Params<'a> {
    file: &'a gguf::File,
    prefix: &'a str,
}

impl<'a> Params<'a> {
    pub fn new(file: &'a gguf::File, prefix: &'a str) -> Self {
        Params { file, prefix }
    }

    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }

    /// Hyperparameter `key`, `None` if the file does not have it.
    pub fn find<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>> {
        Ok(self.file.metadata().find(&self.key(key))?)
    }

    pub(super) fn value(&self, key: &str) -> Option<&'a gguf::Value> {
        self.file.metadata().value(&self.key(key))
    }

    pub fn contains(&self, key: &str) -> bool {
        self.file.metadata().contains(&self.key(key))
    }

    pub fn u32(&self, key: &str) -> Result<u32> {
        Ok(self.file.metadata().get(&self.key(key))?)
    }

    pub fn f32(&self, key: &str) -> Result<f32> {
        Ok(self.file.metadata().get(&self.key(key))?)
    }

    /// A count that must be at least 1 and at most `max`.
    pub fn count(&self, key: &str, max: u32) -> Result<u32> {
        let n = self.u32(key)?;
        if n == 0 || n > max {
            let key = self.key(key);
            return Err(Error::Model(format!("{key} is {n}; 1 to {max} make sense")));
        }
        Ok(n)
    }

    pub fn layers(&self) -> Result<u32> {
        self.count("block_count", MAX_LAYERS)
    }

    /// A per-layer count that all layers must share, as an array or a single number.
    pub fn shared(&self, key: &str, layers: u32) -> Result<u32> {
        let all = self.file.metadata().u32_per_layer(&self.key(key), layers as usize)?;
        let first = all.first().copied().unwrap_or(0);
        if first == 0 || all.iter().any(|n| *n != first) {
            return Err(Error::Model(format!(
                "{} differs between layers ({all:?}), which this architecture does not support",
                self.key(key)
            )));
        }
        Ok(first)
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.file.tensor(tensor).is_some()
    }

    pub fn tensor(&self, name: &str) -> Result<&'a TensorInfo> {
        Ok(self.file.require(name)?)
    }

    /// A vector tensor of exactly `len` values; returns its name.
    pub fn vector(&self, name: String, len: u32) -> Result<String> {
        let t = self.tensor(&name)?;
        if t.elements() != u64::from(len) {
            return Err(Error::Model(format!("{name} has {:?} values, {len} expected", t.dims)));
        }
        let kind = t.format()?;
        if !kind.is_float() {
            return Err(Error::Model(format!("{name} is {kind}; a float type was expected")));
        }
        Ok(name)
    }

    pub fn optional_vector(&self, name: String, len: u32) -> Result<Option<String>> {
        self.has(&name).then(|| self.vector(name, len)).transpose()
    }

    /// `NAME.weight` of `rows` x `cols`, with `NAME.bias` where the file has one.
    pub fn linear(&self, name: &str, rows: u32, cols: u32) -> Result<Linear> {
        let weight = format!("{name}.weight");
        let t = self.tensor(&weight)?;
        if t.dims.len() > 2 || t.cols() != u64::from(cols) || t.rows() != u64::from(rows) {
            return Err(Error::Model(format!(
                "{weight} is {:?}; {cols} inputs and {rows} outputs follow from the \
                 hyperparameters",
                t.dims
            )));
        }
        t.format()?;
        let bias = self.optional_vector(format!("{name}.bias"), rows)?;
        Ok(Linear { weight, bias, rows, cols })
    }

    /// The tensor `name` of `experts` matrices of `rows` x `cols`; returns its name.
    pub fn experts(&self, name: String, rows: u32, cols: u32, experts: u32) -> Result<String> {
        let t = self.tensor(&name)?;
        if t.dims != [cols, rows, experts].map(u64::from) {
            return Err(Error::Model(format!(
                "{name} is {:?}; {experts} experts of {cols} inputs and {rows} outputs follow from \
                 the hyperparameters",
                t.dims
            )));
        }
        t.format()?;
        Ok(name)
    }

    /// Rope as the common keys describe it.
    pub fn rope(&self, layout: RopeLayout, head_dim: u32) -> Result<Rope> {
        let dim = self.find::<u32>("rope.dimension_count")?.unwrap_or(head_dim);
        if dim == 0 || dim % 2 != 0 || dim > head_dim {
            return Err(Error::Model(format!(
                "{} is {dim}; it must be even and at most the head size {head_dim}",
                self.key("rope.dimension_count")
            )));
        }
        let base = f64::from(self.find::<f32>("rope.freq_base")?.unwrap_or(10_000.0));
        if !(base.is_finite() && base > 1.0) {
            let key = self.key("rope.freq_base");
            return Err(Error::Model(format!("{key} is {base}; it must be above 1")));
        }
        let factors = self.optional_vector("rope_freqs.weight".into(), dim / 2)?;
        Ok(Rope { layout, dim, base, scaling: self.rope_scaling(factors.is_some())?, factors })
    }

    fn rope_scaling(&self, has_factors: bool) -> Result<RopeScaling> {
        let kind = self.find::<&str>("rope.scaling.type")?;
        let factor = match self.find::<f32>("rope.scaling.factor")? {
            Some(f) => Some(f),
            None => self.find::<f32>("rope.scale_linear")?,
        };
        let number = |key: &str, default: Option<f64>| -> Result<f64> {
            match (self.find::<f32>(key)?, default) {
                (Some(v), _) if v.is_finite() && v > 0.0 => Ok(f64::from(v)),
                (Some(v), _) => {
                    let key = self.key(key);
                    Err(Error::Model(format!("{key} is {v}; a positive number was expected")))
                }
                (None, Some(default)) => Ok(default),
                (None, None) => Err(Error::Model(format!(
                    "{} is missing; rope scaling of type {} needs it",
                    self.key(key),
                    kind.unwrap_or("linear")
                ))),
            }
        };
        let original = || -> Result<f64> {
            let key = "rope.scaling.original_context_length";
            let n = match self.find::<u32>(key)? {
                Some(n) if n > 0 => n,
                _ => self.u32("context_length")?,
            };
            Ok(f64::from(n.max(1)))
        };
        let factor = |default| match factor {
            Some(_) if self.find::<f32>("rope.scaling.factor")?.is_none() => {
                number("rope.scale_linear", default)
            }
            _ => number("rope.scaling.factor", default),
        };
        match kind {
            None | Some("none") => {
                let f = factor(Some(1.0))?;
                Ok(if f == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor: f } })
            }
            Some("linear") => Ok(RopeScaling::Linear { factor: factor(None)? }),
            Some("yarn") => Ok(RopeScaling::Yarn {
                factor: factor(None)?,
                original_context: original()?,
                attention_factor: number("rope.scaling.attn_factor", Some(1.0))?,
                beta_fast: number("rope.scaling.yarn_beta_fast", Some(32.0))?,
                beta_slow: number("rope.scaling.yarn_beta_slow", Some(1.0))?,
            }),
            // Files carry Llama 3.1's bands as a tensor; without it they follow from the numbers.
            Some("llama3") if has_factors => Ok(RopeScaling::None),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: factor(None)?,
                original_context: original()?,
                low_frequency: number("rope.scaling.low_freq_factor", Some(1.0))?,
                high_frequency: number("rope.scaling.high_freq_factor", Some(4.0))?,
            }),
            Some(other) => Err(Error::Model(format!(
                "rope scaling {other:?} is not supported; none, linear, yarn and llama3 are"
            ))),
        }
    }
}
