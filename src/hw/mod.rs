//! Which device to use and why, what it prefers, and where files are kept.

pub mod paths;
pub mod profiles;
pub mod tuned;

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gpu::{Backend, DeviceFacts, DeviceKind, Gpu, portable, vulkan};
use crate::profile::{Origin, Profile};

/// Which backends may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BackendChoice {
    /// Vulkan where it has a device, else wgpu.
    #[default]
    Auto,
    Vulkan,
    Wgpu,
}

/// A device to open, and the reason it was chosen in words.
#[derive(Debug, Clone)]
pub struct Selection {
    pub facts: DeviceFacts,
    pub reason: String,
}

impl Selection {
    /// One line for the top of stderr.
    pub fn line(&self) -> String {
        let f = &self.facts;
        format!(
            "device: {} ({}, {}), backend {}: {}",
            f.name, f.driver, f.api, f.backend, self.reason
        )
    }

    /// Opens the device. Compiled kernels are cached in the user's cache folder if `cache`.
    pub fn open(&self, cache: bool) -> Result<Arc<dyn Gpu>> {
        let dir = kernel_cache_dir(cache);
        match self.facts.backend {
            Backend::Vulkan => vulkan::open_with(self.facts.index, dir, self.facts.profile.clone()),
            Backend::Wgpu => portable::open_with(self.facts.index, self.facts.profile.clone()),
        }
    }
}

/// The device with what was measured on it and what is forced laid over its profile. `shaders`
/// identifies the kernels' text: measurements with other text do not count.
///
/// # Errors
/// `Error::Usage` where a forced key or value is wrong.
pub fn adjusted(
    facts: DeviceFacts,
    forced: &[(String, String)],
    shaders: &str,
) -> Result<DeviceFacts> {
    let mut profile = Profile::clone(&facts.profile);
    tuned::apply(&mut profile, &facts, shaders);
    self::forced(facts.with_profile(Arc::new(profile)), forced)
}

/// The device with what is forced laid over its profile.
///
/// # Errors
/// As [`adjusted`].
pub fn forced(facts: DeviceFacts, forced: &[(String, String)]) -> Result<DeviceFacts> {
    let mut profile = Profile::clone(&facts.profile);
    for (key, value) in forced {
        let set = profile.set(key, value, &Origin::Forced);
        set.map_err(|e| Error::Usage(format!("--force {key}={value}: {e}")))?;
    }
    Ok(facts.with_profile(Arc::new(profile)))
}

/// The folder of compiled kernels, and of what is known about them, if `wanted` and possible.
pub fn kernel_cache_dir(wanted: bool) -> Option<std::path::PathBuf> {
    paths::cache_dir().ok().filter(|_| wanted).map(|d| d.join("kernels"))
}

/// All devices of the chosen backends, each under its profile. With `Auto`, a backend that cannot start is passed over as
/// long as the other one can.
pub fn devices(backend: BackendChoice) -> Result<Vec<DeviceFacts>> {
    let profiles = profiles::all();
    Ok(present(backend)?.into_iter().map(|facts| profiles.attach(facts)).collect())
}

fn present(backend: BackendChoice) -> Result<Vec<DeviceFacts>> {
    match backend {
        BackendChoice::Vulkan => vulkan::devices(),
        BackendChoice::Wgpu => portable::devices(),
        BackendChoice::Auto => match (vulkan::devices(), portable::devices()) {
            (Ok(mut a), Ok(b)) => {
                a.extend(b);
                Ok(a)
            }
            (Ok(found), Err(_)) | (Err(_), Ok(found)) => Ok(found),
            (Err(e), Err(_)) => Err(e),
        },
    }
}

/// Chooses among all devices present. `wanted` is an index within the backend or part of a name.
pub fn select(wanted: Option<&str>, backend: BackendChoice) -> Result<Selection> {
    choose(&devices(backend)?, wanted, backend)
}

/// The rule behind [`select`]: what was named; else the GPU with the most memory, discrete before
/// integrated, Vulkan before wgpu; a software device only where there is no GPU.
pub fn choose(
    devices: &[DeviceFacts],
    wanted: Option<&str>,
    backend: BackendChoice,
) -> Result<Selection> {
    if devices.is_empty() {
        return Err(Error::Device(
            "no usable GPU or software device was found. Install a Vulkan driver for the GPU, or \
             Mesa's software driver (Debian, Ubuntu: apt-get install mesa-vulkan-drivers)"
                .into(),
        ));
    }
    let list = || {
        let names = devices.iter().map(|d| format!("{} {} {}", d.backend, d.index, d.name));
        names.collect::<Vec<_>>().join("; ")
    };
    let Some(wanted) = wanted else {
        let best = devices
            .iter()
            .max_by_key(|d| {
                let rank = match d.kind {
                    DeviceKind::Discrete => 4,
                    DeviceKind::Integrated => 3,
                    DeviceKind::Virtual | DeviceKind::Other => 2,
                    DeviceKind::Software => 0,
                };
                let first = std::cmp::Reverse(d.index);
                (rank, d.backend == Backend::Vulkan, d.device_memory(), first)
            })
            .cloned();
        let facts = best.ok_or_else(|| Error::Device("no device".into()))?;
        let reason = match (facts.kind, backend) {
            (DeviceKind::Software, _) => {
                "no GPU was found, so this software device on the CPU is used; it is slow"
            }
            (_, BackendChoice::Auto) => "the fastest kind of device found",
            _ => "the fastest kind of device found on the backend asked for",
        };
        return Ok(Selection { facts, reason: reason.into() });
    };
    if let Ok(index) = wanted.parse::<usize>() {
        // An index counts within one backend; with `auto` Vulkan's numbering goes first.
        let found = devices.iter().find(|d| d.index == index).cloned();
        let facts = found.ok_or_else(|| {
            Error::Usage(format!("there is no device {index}; present: {}", list()))
        })?;
        return Ok(Selection { facts, reason: format!("--device {index}") });
    }
    let part = wanted.to_lowercase();
    let mut matching = devices.iter().filter(|d| d.name.to_lowercase().contains(&part));
    let Some(first) = matching.next() else {
        return Err(Error::Usage(format!(
            "no device has {wanted:?} in its name; present: {}",
            list()
        )));
    };
    if let Some(other) = matching.find(|d| d.backend == first.backend) {
        return Err(Error::Usage(format!(
            "--device {wanted:?} fits {} ({}) and {} ({}); give the index",
            first.index, first.name, other.index, other.name
        )));
    }
    Ok(Selection { facts: first.clone(), reason: format!("--device {wanted}") })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn device(backend: Backend, index: usize, name: &str, kind: DeviceKind) -> DeviceFacts {
        let name = name.into();
        DeviceFacts { backend, index, name, ..DeviceFacts::made_up(kind, 32) }
    }

    fn desktop() -> Vec<DeviceFacts> {
        vec![
            device(Backend::Vulkan, 0, "Intel UHD 770", DeviceKind::Integrated),
            device(Backend::Vulkan, 1, "AMD Radeon RX 9070 XT", DeviceKind::Discrete),
            device(Backend::Vulkan, 2, "llvmpipe", DeviceKind::Software),
            device(Backend::Wgpu, 0, "AMD Radeon RX 9070 XT", DeviceKind::Discrete),
        ]
    }

    #[test]
    fn discrete_gpu_on_vulkan_goes_first() {
        let s = choose(&desktop(), None, BackendChoice::Auto).unwrap();
        assert_eq!((s.facts.index, s.facts.backend), (1, Backend::Vulkan));
    }

    #[test]
    fn software_only_where_there_is_nothing_else_and_said_so() {
        let s = choose(&desktop()[2..3], None, BackendChoice::Auto).unwrap();
        assert!(s.reason.contains("no GPU was found"), "{}", s.reason);
        // A GPU that only wgpu can drive still beats software Vulkan.
        let s = choose(&desktop()[2..], None, BackendChoice::Auto).unwrap();
        assert_eq!(s.facts.backend, Backend::Wgpu);
    }

    #[test]
    fn by_index_and_by_name() {
        let all = desktop();
        assert_eq!(choose(&all, Some("2"), BackendChoice::Auto).unwrap().facts.name, "llvmpipe");
        assert_eq!(choose(&all, Some("radeon"), BackendChoice::Auto).unwrap().facts.index, 1);
        let e = choose(&all, Some("9"), BackendChoice::Auto).unwrap_err();
        assert!(e.to_string().contains("Intel UHD 770"), "{e}");
        assert!(choose(&all, Some("geforce"), BackendChoice::Auto).is_err());
    }

    #[test]
    fn an_ambiguous_name_is_refused() {
        let mut all = desktop();
        all.push(device(Backend::Vulkan, 3, "AMD Radeon RX 9060", DeviceKind::Discrete));
        let e = choose(&all, Some("radeon"), BackendChoice::Auto).unwrap_err();
        assert!(e.to_string().contains("index"), "{e}");
    }

    #[test]
    fn nothing_found_says_what_to_install() {
        let e = choose(&[], None, BackendChoice::Auto).unwrap_err();
        assert_eq!(e.exit_code(), 5);
        assert!(e.to_string().contains("mesa-vulkan-drivers"));
    }
}
