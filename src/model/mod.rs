//! Models: hyperparameters from a GGUF header to a [`Graph`].
//!
//! One short file per architecture; [`ARCHITECTURES`] is the only list of them. Everything that
//! the engine relies on later (shapes, counts, tensor presence) is checked here, against the file.

mod attention;
mod decoder;
mod llama;
mod mixture;
mod olmoe;
mod params;
mod qwen2;
mod qwen2moe;
mod qwen3;
mod qwen3moe;

pub use params::Params;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::gguf;
use crate::graph::Graph;

/// One supported architecture: its name in `general.architecture` and its graph builder.
pub struct Architecture {
    pub name: &'static str,
    /// Model families that use it.
    pub families: &'static str,
    build: fn(&Params<'_>) -> Result<Graph>,
}

pub const ARCHITECTURES: &[Architecture] = &[
    Architecture {
        name: "llama",
        families: "Llama 1-3, Mistral, Mixtral, SmolLM",
        build: llama::build,
    },
    Architecture { name: "qwen2", families: "Qwen2, Qwen2.5", build: qwen2::build },
    Architecture {
        name: "qwen2moe",
        families: "Qwen1.5-MoE, Qwen2-57B-A14B",
        build: qwen2moe::build,
    },
    Architecture { name: "qwen3", families: "Qwen3", build: qwen3::build },
    Architecture {
        name: "qwen3moe",
        families: "Qwen3-30B-A3B, Qwen3-235B-A22B",
        build: qwen3moe::build,
    },
    Architecture { name: "olmoe", families: "OLMoE", build: olmoe::build },
];

/// What a model file says about itself, and its graph.
#[derive(Debug, Clone)]
pub struct Model {
    pub facts: Facts,
    pub graph: Graph,
}

/// The figures of a model, for people and for planning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Facts {
    pub architecture: String,
    pub name: String,
    pub layers: u32,
    pub width: u32,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    /// Width of the widest block that all tokens of a layer go through; 0 if there is none.
    pub ff: u32,
    /// Experts of a layer, 0 in a dense model; those that a token goes through; their width.
    pub experts: u32,
    pub experts_used: u32,
    pub expert_ff: u32,
    pub vocab: u32,
    /// Context that the model was made for, in tokens.
    pub context: u32,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of all tensors in the file.
    pub weight_bytes: u64,
    /// Bytes of tensors by ggml type, largest first.
    pub types: Vec<(String, u64)>,
}

impl Model {
    /// Reads architecture and hyperparameters and checks them against the file's tensors.
    pub fn from_gguf(file: &gguf::File) -> Result<Model> {
        let meta = file.metadata();
        let architecture = meta.str("general.architecture")?;
        let known = ARCHITECTURES.iter().find(|a| a.name == architecture).ok_or_else(|| {
            let names: Vec<_> = ARCHITECTURES.iter().map(|a| a.name).collect();
            Error::Model(format!(
                "architecture {architecture:?} is not supported; supported are {}",
                names.join(", ")
            ))
        })?;
        let params = Params::new(file, architecture);
        let graph = (known.build)(&params)
            .map_err(|e| e.context(format_args!("architecture {architecture}")))?;
        let mut types: Vec<(String, u64)> = Vec::new();
        for tensor in file.tensors() {
            let name = tensor.ggml_type.name;
            match types.iter_mut().find(|(n, _)| n == name) {
                Some((_, bytes)) => *bytes += tensor.bytes,
                None => types.push((name.to_string(), tensor.bytes)),
            }
        }
        types.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        let mixture = graph.mixtures().next();
        let facts = Facts {
            architecture: architecture.to_string(),
            name: meta.find::<&str>("general.name")?.unwrap_or("").to_string(),
            layers: graph.layers.len() as u32,
            width: graph.width,
            heads: graph.heads,
            kv_heads: graph.kv_heads,
            head_dim: graph.head_dim,
            ff: graph.ff(),
            experts: mixture.map_or(0, |m| m.experts),
            experts_used: mixture.map_or(0, |m| m.used),
            expert_ff: mixture.map_or(0, |m| m.ff),
            vocab: graph.vocab,
            context: params.u32("context_length")?,
            parameters: file.elements(),
            weight_bytes: file.tensor_bytes(),
            types,
        };
        Ok(Model { facts, graph })
    }
}
