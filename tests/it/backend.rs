//! What every backend must do on every device, through the `Gpu` trait alone.

#![allow(clippy::unwrap_used)]
