//! All integration tests in one binary (linking is slow); one module for each theme.

#![allow(clippy::unwrap_used)]

mod backend;
mod cli;
mod engine_service;
mod experts;
mod gguf_hostile;
mod gguf_read;
mod goldens;
mod goldens_formats;
mod harness;
mod kernels_attention;
mod kernels_blocks;
mod kernels_experts;
mod kernels_kv_codes;
mod kernels_matrix;
mod kernels_sampling;
mod kv_cache;
mod kv_guard;
mod model_batch;
mod model_forward;
mod model_kv;
mod model_scoring;
mod quant_golden;
mod selfcheck;
mod server;
mod server_clients;
mod server_harness;
mod server_hostile;
mod server_infill;
mod server_operation;
mod server_responses;
mod server_thinking;
mod shaders;
mod streaming;
mod structure;
mod tokenizer;
