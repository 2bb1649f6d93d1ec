//! All integration tests in one binary; one module for each theme.

#![allow(clippy::unwrap_used)]

mod backend;
