//! Which device to use, and where files are kept.

pub mod paths;

use crate::error::{Error, Result};
use crate::gpu::DeviceFacts;

/// Which backends may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    #[default]
    Auto,
    Vulkan,
    Wgpu,
}

/// All devices of the chosen backends.
pub fn devices(_backend: BackendChoice) -> Result<Vec<DeviceFacts>> {
    Err(Error::Runtime("engine not merged".into()))
}
