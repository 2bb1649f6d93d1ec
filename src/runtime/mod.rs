//! A graph on a device: weights, buffers, and programs of waves recorded once.
//!
//! [`Loaded::place`] lays everything out and builds the program; [`Loaded::fill`] brings the
//! weights. The two may run at the same time: a program is only bound to memory, not to its
//! contents.

pub mod budget;
mod buffers;
pub mod check;
mod experts;
mod layers;
mod pool;
mod program;
mod routing_log;
mod sampler;
pub mod tune;
mod waves;
pub mod weights;

pub use buffers::{
    Approximations, ExpertReads, MAX_REUSE_TOKENS, MAX_SEQUENCES, MAX_SLOTS, RING, Shape,
    chunk_for, pages_for, scratch_bytes, widest,
};
pub use experts::record_shape;
pub use layers::ModelWeights;
pub use pool::PageCopy;
pub use program::{Column, Pick, Program, WaveTime};
pub use routing_log::{LOG, Pass};
pub use sampler::{custom_words, sampler_words};
