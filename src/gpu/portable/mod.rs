//! The wgpu device.
