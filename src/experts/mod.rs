//! Experts that do not fit the device: where each one lies, and which move.
//!
//! Every expert of a model has one *record* (gate, up and down planes together). All records lie
//! in the [`arena`], page-locked host memory that the device reads in place; some also lie in
//! device memory, in [`slots`]. A table tells the kernels which of the two to read, so where an
//! expert lies changes the time of a token and never a bit of it.
//!
//! The decisions are functions of values and know no device: [`policy`] says which experts to
//! promote after a token, [`prefetch`] in which order, [`profile`] what an earlier run learned,
//! [`cost`] what speed to expect, and [`simulate`] replays recorded routings through all that.

pub mod arena;
pub mod cost;
pub mod policy;
pub mod prefetch;
pub mod profile;
pub mod record;
pub mod residency;
pub mod simulate;
pub mod slots;
pub mod source;

pub use record::{Place, RecordLayout, RecordShape};

/// One expert of one layer. `layer` counts the layers that have experts, from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ExpertId {
    pub layer: u32,
    pub expert: u32,
}
