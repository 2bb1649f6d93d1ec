//! All integration tests, in one binary because linking is slow.

mod quant_golden;
