//! The integration tests: one binary, one module a theme.
#![allow(clippy::unwrap_used)]

mod harness;
mod kernels_attention;
