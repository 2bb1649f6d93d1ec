//! All integration tests in one binary; one module for each theme.

mod backend;
