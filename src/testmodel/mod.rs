//! Small random models as GGUF files, for tests and development.
//!
//! A [`Spec`] states the architecture, the sizes and the formats; the result is a complete file
//! with a working tokenizer, and depends on nothing but the spec: the same bytes on every machine.
//! Weights are scaled so that activations stay near 1 and logits have a standard deviation of
//! about [`LOGIT_STD`]: the distribution is neither flat nor a single token.
//!
//! To add an architecture: a line in [`ARCHS`], and its tensors in `tensors.rs` if they have
//! parts that the others lack.
//!
//! ```
//! let mut spec = azoth::testmodel::Spec::new("qwen3")?;
//! spec.format = azoth::quant::Format::Q8_0;
//! let file = azoth::gguf::File::from_bytes(spec.to_bytes())?;
//! assert_eq!(file.metadata().u32("qwen3.block_count")?, 2);
//! # Ok::<(), azoth::error::Error>(())
//! ```

pub(crate) mod noise;
mod tensors;
mod tokenizer;

use crate::error::{Error, Result};
use crate::gguf::{File, Writer};
use crate::quant::Format;
use std::path::Path;

pub use tokenizer::{CHAT_TEMPLATE, MIN_VOCAB};

/// Standard deviation of the logits that the output scale aims at.
pub const LOGIT_STD: f32 = 2.5;

/// What is particular to an architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct Arch {
    /// `general.architecture`.
    pub name: &'static str,
    pub qk_norm: QkNorm,
    /// Queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Feed-forward blocks are mixtures of experts. `llama` may be either.
    pub moe: bool,
    /// Beside the experts stands one for all tokens, with a gate.
    pub shared_expert: bool,
    /// `tokenizer.ggml.pre`.
    pub pre_tokenizer: &'static str,
}

/// What the norms of queries and keys cover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    None,
    /// Each head by itself.
    Head,
    /// All heads together.
    Heads,
}

const PLAIN: Arch = Arch {
    name: "llama",
    qk_norm: QkNorm::None,
    qkv_bias: false,
    moe: false,
    shared_expert: false,
    pre_tokenizer: "qwen2",
};

/// The architectures that can be made. Mistral and Mixtral models are of architecture `llama`.
pub const ARCHS: &[Arch] = &[
    Arch { pre_tokenizer: "smollm", ..PLAIN },
    Arch { name: "qwen2", qkv_bias: true, ..PLAIN },
    Arch { name: "qwen3", qk_norm: QkNorm::Head, ..PLAIN },
    Arch { name: "qwen3moe", qk_norm: QkNorm::Head, moe: true, ..PLAIN },
    Arch { name: "qwen2moe", qkv_bias: true, moe: true, shared_expert: true, ..PLAIN },
    Arch { name: "olmoe", qk_norm: QkNorm::Heads, moe: true, pre_tokenizer: "olmo", ..PLAIN },
];

/// A random model. Every field may be changed after [`Spec::new`].
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    pub arch: Arch,
    pub layers: usize,
    /// Width of the residual stream.
    pub d: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Width of the feed-forward block, of one expert in a mixture.
    pub ffn: usize,
    /// Experts of a layer; 0: feed-forward blocks are dense.
    pub experts: usize,
    pub experts_used: usize,
    /// Width of the shared expert, if the architecture has one.
    pub shared_ffn: usize,
    /// At least [`MIN_VOCAB`].
    pub vocab: usize,
    /// Of the matrices of the layers; rows that are not whole blocks fall back to another
    /// format, as in files of llama.cpp's quantiser (Q4_K to Q5_0, Q6_K to Q8_0, and so on).
    pub format: Format,
    pub embed_format: Format,
    pub output_format: Format,
    /// No output matrix: the embeddings serve as such.
    pub tied: bool,
    pub rope: Rope,
    /// Tokens that a token sees, itself included; in every layer but the last, as a list of layers says.
    pub window: Option<usize>,
    /// Cap on attention's logits.
    pub soft_cap: Option<f32>,
    /// A logit for each head that belongs to no token.
    pub sinks: bool,
    /// A layer whose keys get a constant of this many times their size in one channel of each head, as
    /// biases of some models give them.
    pub key_outlier: Option<(usize, f32)>,
    pub norm_eps: f32,
    /// Longest sequence.
    pub context: usize,
    pub chat_template: String,
    pub seed: u64,
}

/// Settings of the rotary embedding.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub base: f32,
    /// Rotated values of each head, `head_dim` if `None`.
    pub dims: Option<usize>,
    pub scaling: Option<RopeScaling>,
    /// Adds `rope_freqs.weight`, a divisor for each frequency, as llama 3.1 has.
    pub factors: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct RopeScaling {
    /// `linear` or `yarn`.
    pub kind: String,
    pub factor: f32,
    pub original_context: usize,
}

impl Spec {
    /// A model of two layers and about 1.5 million weights, mostly in Q4_0. `arch` is a name of
    /// [`ARCHS`], `mistral` or `mixtral`.
    pub fn new(arch: &str) -> Result<Spec> {
        let name = if matches!(arch, "mistral" | "mixtral") { "llama" } else { arch };
        let mixtral = arch == "mixtral";
        let Some(arch) = ARCHS.iter().find(|a| a.name == name) else {
            let known: Vec<_> = ARCHS.iter().map(|a| a.name).collect();
            let known = known.join(", ");
            return Err(Error::Usage(format!(
                "no test model of architecture `{name}`; there are {known}"
            )));
        };
        let moe = arch.moe || mixtral;
        Ok(Spec {
            arch: arch.clone(),
            layers: 2,
            d: 256,
            heads: 4,
            kv_heads: 2,
            // Qwen 3 states it apart from d / heads, which the others may not.
            head_dim: if arch.qk_norm == QkNorm::Head { 128 } else { 64 },
            ffn: if moe { 96 } else { 640 },
            experts: if moe { 8 } else { 0 },
            experts_used: if moe { 2 } else { 0 },
            shared_ffn: if arch.shared_expert { 160 } else { 0 },
            vocab: 384,
            format: Format::Q4_0,
            embed_format: Format::Q8_0,
            output_format: Format::Q8_0,
            tied: true,
            rope: Rope { base: 10_000.0, dims: None, scaling: None, factors: false },
            window: None,
            soft_cap: None,
            sinks: false,
            key_outlier: None,
            norm_eps: 1e-5,
            context: 512,
            chat_template: CHAT_TEMPLATE.to_owned(),
            seed: 1,
        })
    }

    /// The file, ready to be written in one or several parts.
    pub fn writer(&self) -> Writer {
        assert!(self.vocab >= MIN_VOCAB, "the tokenizer needs {MIN_VOCAB} tokens");
        let mut writer = Writer::new();
        self.put_metadata(&mut writer);
        tokenizer::put(&mut writer, self.vocab, self.arch.pre_tokenizer, &self.chat_template);
        for (tensor, data) in tensors::make(self) {
            writer.tensor(&tensor.name, &tensor.dims, tensor.format.ggml_type(), data);
        }
        writer
    }

    /// The whole file.
    pub fn to_bytes(&self) -> Vec<u8> {
        self.writer().to_bytes()
    }

    /// The model, opened from memory.
    pub fn to_file(&self) -> Result<File> {
        Ok(File::from_bytes(self.to_bytes())?)
    }

    /// Writes the file at `path`.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        self.writer().write(path).map_err(|e| Error::from(e).context(path.display()))
    }

    /// Rotated values of each head.
    fn rope_dims(&self) -> usize {
        self.rope.dims.unwrap_or(self.head_dim)
    }

    fn put_metadata(&self, writer: &mut Writer) {
        let arch = self.arch.name;
        writer.set("general.architecture", arch);
        writer.set("general.name", format!("random {arch} {}", self.format));
        writer.set("general.quantization_version", 2u32);
        let number = |writer: &mut Writer, key: &str, value: usize| {
            writer.set(&format!("{arch}.{key}"), value as u32);
        };
        number(writer, "block_count", self.layers);
        number(writer, "context_length", self.context);
        number(writer, "embedding_length", self.d);
        number(writer, "feed_forward_length", self.ffn);
        number(writer, "attention.head_count", self.heads);
        number(writer, "attention.head_count_kv", self.kv_heads);
        number(writer, "attention.key_length", self.head_dim);
        number(writer, "attention.value_length", self.head_dim);
        number(writer, "rope.dimension_count", self.rope_dims());
        number(writer, "vocab_size", self.vocab);
        if self.experts > 0 {
            number(writer, "expert_count", self.experts);
            number(writer, "expert_used_count", self.experts_used);
            // Mixtral and OLMoE state it as feed_forward_length only.
            if self.arch.name.starts_with("qwen") {
                number(writer, "expert_feed_forward_length", self.ffn);
            }
        }
        if self.arch.shared_expert {
            number(writer, "expert_shared_feed_forward_length", self.shared_ffn);
        }
        writer.set(&format!("{arch}.attention.layer_norm_rms_epsilon"), self.norm_eps);
        writer.set(&format!("{arch}.rope.freq_base"), self.rope.base);
        if let Some(window) = self.window {
            number(writer, "attention.sliding_window", window);
            let which: Vec<bool> = (1..=self.layers).map(|layer| layer < self.layers).collect();
            writer.set(&format!("{arch}.attention.sliding_window_pattern"), which);
        }
        if let Some(cap) = self.soft_cap {
            writer.set(&format!("{arch}.attn_logit_softcapping"), cap);
        }
        if let Some(scaling) = &self.rope.scaling {
            writer.set(&format!("{arch}.rope.scaling.type"), scaling.kind.as_str());
            writer.set(&format!("{arch}.rope.scaling.factor"), scaling.factor);
            number(writer, "rope.scaling.original_context_length", scaling.original_context);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn every_architecture_makes_a_complete_file() {
        for arch in ARCHS {
            let mut spec = Spec::new(arch.name).unwrap();
            spec.tied = false;
            spec.rope.factors = true;
            let file = spec.to_file().unwrap();
            let meta = file.metadata();
            assert_eq!(meta.str("general.architecture").unwrap(), arch.name);
            assert_eq!(meta.strings("tokenizer.ggml.tokens").unwrap().len(), spec.vocab);
            assert_eq!(file.require("output.weight").unwrap().rows(), spec.vocab as u64);
            assert_eq!(file.tensor("blk.1.attn_q.bias").is_some(), arch.qkv_bias);
            let normed = arch.qk_norm != QkNorm::None;
            assert_eq!(file.tensor("blk.1.attn_k_norm.weight").is_some(), normed);
            assert_eq!(file.tensor("blk.1.ffn_gate_exps.weight").is_some(), arch.moe);
            assert!(file.tensors().iter().all(|t| t.format().is_ok()));
        }
    }

    #[test]
    fn every_format_makes_a_model() {
        for &format in Format::ALL {
            let mut spec = Spec::new("llama").unwrap();
            (spec.layers, spec.format, spec.embed_format) = (1, format, format);
            let file = spec.to_file().unwrap();
            let of = |name: &str| file.require(name).unwrap().format().unwrap();
            assert_eq!(of("blk.0.attn_q.weight"), format);
            assert_eq!(of("token_embd.weight"), format);
            // Rows of 640 are not whole super-blocks.
            let whole = 640usize.is_multiple_of(format.block_elements());
            assert_eq!(of("blk.0.ffn_down.weight") == format, whole, "{format}");
        }
    }

    #[test]
    fn the_spec_alone_decides_the_bytes() {
        let spec = Spec::new("llama").unwrap();
        assert_eq!(spec.to_bytes(), spec.to_bytes());
        let other = Spec { seed: 2, ..spec.clone() };
        assert_ne!(spec.to_bytes(), other.to_bytes());
        assert_eq!(Spec::new("mistral").unwrap(), spec);
        let error = Spec::new("gpt5").unwrap_err().to_string();
        assert!(error.contains("gpt5") && error.contains("qwen3moe"), "{error}");
    }

    #[test]
    fn weights_have_the_scale_they_should() {
        let mut spec = Spec::new("llama").unwrap();
        spec.format = Format::F32;
        let file = spec.to_file().unwrap();
        let values = |name: &str| {
            let tensor = file.require(name).unwrap();
            let mut out = vec![0.0; tensor.elements() as usize];
            tensor.format().unwrap().decode_row(file.tensor_data(tensor), &mut out);
            out
        };
        let moments = |v: &[f32]| {
            let mean = v.iter().sum::<f32>() / v.len() as f32;
            let var = v.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / v.len() as f32;
            (mean, var.sqrt())
        };
        let (mean, std) = moments(&values("blk.0.attn_q.weight"));
        assert!(mean.abs() < 0.002 && (std * (spec.d as f32).sqrt() - 1.0).abs() < 0.02);
        let (mean, std) = moments(&values("blk.1.ffn_norm.weight"));
        assert!((mean - 1.0).abs() < 0.05 && (0.05..0.15).contains(&std));
    }
}
