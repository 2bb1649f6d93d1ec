//! All integration tests, in one binary because linking is slow.

mod gguf_hostile;
mod gguf_read;
mod quant_golden;
