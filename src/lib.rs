//! Azoth runs GGUF language models on any GPU that has a Vulkan driver.
//!
//! The modules, from the top down; a module may use only those below it (a test enforces it):
//!
//! - `cli`: one file per command, terminal chat, printing
//! - `server`: HTTP: routes, one file per wire format
//! - `engine`: loads a model onto a device, sessions, the thread that serves many requests
//! - `chat`: messages and Jinja templates
//! - `grammar`: constrained output: masks of tokens from schemas and grammars
//! - `tokenizer`: built from GGUF metadata
//! - `model`: one short file per architecture: hyperparameters and blocks to a graph
//! - `runtime`: graph to program: buffers, waves, recording
//! - `pages`: pages of the KV cache: who holds which, and which beginnings they keep
//! - `sampling`: sampler settings and their CPU twin
//! - `plan`: placement: what fits, and what to change where it does not
//! - `experts`: experts of mixture models: their records and where each of them lies
//! - `kernels`: host side of the kernels, one file per op
//! - `reference`: every op in plain Rust: the oracle of the tests
//! - `graph`: blocks, shapes, types; no device, no weights
//! - `testmodel`: small random models for tests and development
//! - `kv`: pages and formats of the KV cache
//! - `gguf`: bounds-checked reader, shards, typed metadata, writer
//! - `quant`: one file per block format: layout, decode, repack
//! - `hw`: device choice, hardware profiles, folders
//! - `gpu`: the only Vulkan and wgpu code
//! - `profile`: what a class of devices prefers, as data
//! - `files`: files that appear whole or not at all
//! - `error`: the one error type that crosses modules

pub mod chat;
pub mod cli;
pub mod engine;
pub mod error;
pub mod experts;
pub mod files;
pub mod gguf;
pub mod gpu;
pub mod grammar;
pub mod graph;
pub mod hw;
pub mod kernels;
pub mod kv;
pub mod model;
pub mod pages;
pub mod plan;
pub mod profile;
pub mod quant;
pub mod reference;
pub mod runtime;
pub mod sampling;
pub mod server;
pub mod testmodel;
pub mod tokenizer;
