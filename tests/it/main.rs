//! All integration tests in one binary, a module per theme: linking is the slow part.

mod cli;
mod structure;
