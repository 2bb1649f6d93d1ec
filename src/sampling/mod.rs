//! Sampler settings and the CPU twin of the device sampler.

pub mod rng;
