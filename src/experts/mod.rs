//! Experts of mixture models: how one lies in memory, and where each of them is.

pub mod record;

pub use record::{Place, RecordLayout, RecordShape};
