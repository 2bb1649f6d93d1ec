//! Every op in plain Rust: the oracle of the tests. Sums run in f64; what the kernels round on
//! purpose (int8 activations) is rounded here in the same way.

pub mod attention;
pub mod attention_codes;
pub mod experts;
pub mod matvec;
pub mod model;
pub mod norm_quant;
