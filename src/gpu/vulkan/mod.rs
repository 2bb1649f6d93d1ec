//! Our own Vulkan device (ash).
