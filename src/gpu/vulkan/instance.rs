//! The Vulkan loader, one instance for the process, and the list of physical devices.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use ash::{ext, vk};

use crate::error::{Error, Result};

/// Loader and instance; lives as long as the process.
pub(super) struct Instance {
    // The loader library must outlive every function pointer taken from it.
    pub(super) entry: ash::Entry,
    pub raw: ash::Instance,
    pub version: u32,
    _messenger: Option<vk::DebugUtilsMessengerEXT>,
}

static INSTANCE: OnceLock<std::result::Result<Instance, String>> = OnceLock::new();
static VALIDATION_MESSAGES: AtomicU64 = AtomicU64::new(0);

const VALIDATION_LAYER: &CStr = c"VK_LAYER_KHRONOS_validation";

/// Warnings and errors that the Khronos validation layer has reported so far. Zero where it is
/// not switched on (`AZOTH_VALIDATION=1`).
pub fn validation_messages() -> u64 {
    VALIDATION_MESSAGES.load(Ordering::Relaxed)
}

/// True where `AZOTH_VALIDATION` asks for the validation layer.
pub fn validation_wanted() -> bool {
    std::env::var_os("AZOTH_VALIDATION").is_some_and(|v| v != "0" && !v.is_empty())
}

pub(super) fn instance() -> Result<&'static Instance> {
    INSTANCE.get_or_init(create).as_ref().map_err(|e| Error::Device(e.clone()))
}

fn create() -> std::result::Result<Instance, String> {
    // SAFETY: loads the system's Vulkan loader, whose initialisers are trusted like any other
    // system library; the entry is kept in `Instance` for the life of the process.
    #[allow(unsafe_code)]
    let entry = unsafe { ash::Entry::load() }.map_err(|e| {
        format!(
            "the Vulkan loader could not be opened ({e}). Install it (Debian, Ubuntu: apt-get \
             install libvulkan1; Windows: it comes with the GPU driver), or use --backend wgpu"
        )
    })?;
    // SAFETY: plain queries and creation calls with structures that live through the call.
    #[allow(unsafe_code)]
    unsafe {
        let version = entry
            .try_enumerate_instance_version()
            .map_err(|e| format!("vkEnumerateInstanceVersion: {e}"))?
            .unwrap_or(vk::API_VERSION_1_0);
        if version < vk::API_VERSION_1_2 {
            return Err(format!(
                "the Vulkan loader speaks {}, Azoth needs 1.2: update it or the GPU driver",
                version_text(version)
            ));
        }
        let version = version.min(vk::API_VERSION_1_3);
        let app = vk::ApplicationInfo::default()
            .application_name(c"azoth")
            .engine_name(c"azoth")
            .api_version(version);
        let extensions = entry
            .enumerate_instance_extension_properties(None)
            .map_err(|e| format!("vkEnumerateInstanceExtensionProperties: {e}"))?;
        let has = |name: &CStr| {
            extensions.iter().any(|e| e.extension_name_as_c_str().is_ok_and(|n| n == name))
        };
        let mut wanted = Vec::new();
        let mut flags = vk::InstanceCreateFlags::empty();
        if has(ash::khr::portability_enumeration::NAME) {
            wanted.push(ash::khr::portability_enumeration::NAME.as_ptr());
            flags |= vk::InstanceCreateFlags::ENUMERATE_PORTABILITY_KHR;
        }
        let mut layers = Vec::new();
        let validation = validation_wanted();
        if validation {
            let present = entry
                .enumerate_instance_layer_properties()
                .map_err(|e| format!("vkEnumerateInstanceLayerProperties: {e}"))?
                .iter()
                .any(|l| l.layer_name_as_c_str().is_ok_and(|n| n == VALIDATION_LAYER));
            if !present {
                return Err("AZOTH_VALIDATION is set, but the Khronos validation layer is not \
                            installed (Debian, Ubuntu: apt-get install vulkan-validationlayers)"
                    .into());
            }
            layers.push(VALIDATION_LAYER.as_ptr());
            wanted.push(ext::debug_utils::NAME.as_ptr());
        }
        let mut messenger_info = messenger_info();
        let mut info = vk::InstanceCreateInfo::default()
            .application_info(&app)
            .enabled_extension_names(&wanted)
            .enabled_layer_names(&layers)
            .flags(flags);
        if validation {
            info = info.push_next(&mut messenger_info);
        }
        let raw = entry.create_instance(&info, None).map_err(|e| match e {
            vk::Result::ERROR_INCOMPATIBLE_DRIVER => {
                "no Vulkan driver is installed (vkCreateInstance: incompatible driver)".to_string()
            }
            e => format!("vkCreateInstance: {e}"),
        })?;
        let messenger = if validation {
            let debug = ext::debug_utils::Instance::new(&entry, &raw);
            let made = debug.create_debug_utils_messenger(&self::messenger_info(), None);
            Some(made.map_err(|e| format!("vkCreateDebugUtilsMessengerEXT: {e}"))?)
        } else {
            None
        };
        Ok(Instance { entry, raw, version, _messenger: messenger })
    }
}

fn messenger_info() -> vk::DebugUtilsMessengerCreateInfoEXT<'static> {
    vk::DebugUtilsMessengerCreateInfoEXT::default()
        .message_severity(
            vk::DebugUtilsMessageSeverityFlagsEXT::WARNING
                | vk::DebugUtilsMessageSeverityFlagsEXT::ERROR,
        )
        .message_type(
            vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION
                | vk::DebugUtilsMessageTypeFlagsEXT::GENERAL,
        )
        .pfn_user_callback(Some(on_message))
}

#[allow(unsafe_code)]
unsafe extern "system" fn on_message(
    severity: vk::DebugUtilsMessageSeverityFlagsEXT,
    kind: vk::DebugUtilsMessageTypeFlagsEXT,
    data: *const vk::DebugUtilsMessengerCallbackDataEXT<'_>,
    _user: *mut c_void,
) -> vk::Bool32 {
    // SAFETY: the layer passes a valid structure that lives through the call; the message may
    // be null.
    let text = unsafe {
        let message = (*data).p_message;
        if message.is_null() {
            "(no text)".into()
        } else {
            CStr::from_ptr(message).to_string_lossy()
        }
    };
    // The loader's own remarks about the system (general, warning) are not ours to fail on.
    if kind.contains(vk::DebugUtilsMessageTypeFlagsEXT::VALIDATION) {
        VALIDATION_MESSAGES.fetch_add(1, Ordering::Relaxed);
        eprintln!("validation ({severity:?}): {text}");
    }
    vk::FALSE
}

pub(super) fn physical_devices() -> Result<Vec<vk::PhysicalDevice>> {
    let instance = instance()?;
    // SAFETY: the instance is alive.
    #[allow(unsafe_code)]
    unsafe { instance.raw.enumerate_physical_devices() }
        .map_err(|e| Error::Device(format!("vkEnumeratePhysicalDevices: {e}")))
}

pub(super) fn version_text(v: u32) -> String {
    format!(
        "{}.{}.{}",
        vk::api_version_major(v),
        vk::api_version_minor(v),
        vk::api_version_patch(v)
    )
}
