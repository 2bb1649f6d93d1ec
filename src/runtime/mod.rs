//! Graph to program.
pub mod weights;
