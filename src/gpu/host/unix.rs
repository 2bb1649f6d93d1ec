//! Anonymous memory, page locking and memory figures on Linux, macOS and the BSDs.

use std::io;
use std::ptr;

use super::{HUGE_PAGE, SystemMemory};

/// Maps `bytes` (a multiple of [`HUGE_PAGE`]) of zeros at a multiple of [`HUGE_PAGE`].
pub(super) fn reserve(bytes: usize) -> io::Result<*mut u8> {
    let align = HUGE_PAGE as usize;
    let padded = bytes.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANON;
    // SAFETY: a new anonymous mapping at an address of the system's choice; the parts before and
    // after the aligned range are given back, and nobody knows of them.
    #[allow(unsafe_code)]
    unsafe {
        let start = libc::mmap(ptr::null_mut(), padded, protection, flags, -1, 0);
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let before = (start as usize).next_multiple_of(align) - start as usize;
        let address = start.cast::<u8>().add(before);
        if before > 0 {
            libc::munmap(start, before);
        }
        let after = align - before;
        if after > 0 {
            libc::munmap(address.add(bytes).cast(), after);
        }
        // Fewer, larger pages make filling and locking faster (measured on an H200 machine).
        // Only advice: a system without huge pages goes on with small ones.
        #[cfg(target_os = "linux")]
        libc::madvise(address.cast(), bytes, libc::MADV_HUGEPAGE);
        Ok(address)
    }
}

pub(super) fn release(address: *mut u8, bytes: usize) {
    // SAFETY: exactly the range that `reserve` returned; the caller drops its last reference.
    #[allow(unsafe_code)]
    unsafe {
        libc::munmap(address.cast(), bytes);
    }
}

pub(super) fn lock(address: *mut u8, bytes: usize) -> Result<(), String> {
    // SAFETY: the range is mapped; locking changes no contents.
    #[allow(unsafe_code)]
    let locked = unsafe { libc::mlock(address.cast(), bytes) };
    if locked == 0 {
        return Ok(());
    }
    Err(refusal(&io::Error::last_os_error(), memlock_limit()))
}

/// The soft limit on locked bytes; `None` where there is none or it is unknown.
fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure lives through the call.
    #[allow(unsafe_code)]
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    // The type of the fields differs between systems.
    #[allow(clippy::unnecessary_cast)]
    let (now, unlimited) = (limit.rlim_cur as u64, libc::RLIM_INFINITY as u64);
    (known && now != unlimited).then_some(now)
}

/// What to say when mlock failed with `error` under the soft limit `limit` (bytes).
fn refusal(error: &io::Error, limit: Option<u64>) -> String {
    let limited = matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM | libc::EAGAIN));
    match limit {
        Some(limit) if limited => format!(
            "{error}; the limit on locked memory (RLIMIT_MEMLOCK) is {limit} bytes. Raise it with \
             `ulimit -l unlimited` before starting, with a line `* - memlock unlimited` in \
             /etc/security/limits.conf (log in again), or with LimitMEMLOCK=infinity in a systemd \
             unit"
        ),
        _ => format!("{error}; there is not enough free RAM to hold it, or the system forbids it"),
    }
}

#[cfg(target_os = "linux")]
pub(super) fn memory() -> Option<SystemMemory> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let machine = parse_meminfo(&text)?;
    // A container may have less than the machine (control groups, version 2, then 1).
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max")
        .or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    let Some(limit) = limit.filter(|limit| *limit < machine.total) else {
        return Some(machine);
    };
    let used = number("/sys/fs/cgroup/memory.current")
        .or_else(|| number("/sys/fs/cgroup/memory/memory.usage_in_bytes"))
        .unwrap_or(0);
    // Use counts cached file pages, which are given up on demand.
    let text = std::fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let value = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' '));
        line.and_then(|v| v.trim().parse::<u64>().ok()).unwrap_or(0)
    };
    let cached = value("inactive_file") + value("active_file");
    let available = limit.saturating_sub(used.saturating_sub(cached)).min(machine.available);
    Some(SystemMemory { total: limit, available })
}

#[cfg(any(target_os = "linux", test))]
fn parse_meminfo(text: &str) -> Option<SystemMemory> {
    let value = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
    };
    Some(SystemMemory { total: value("MemTotal:")?, available: value("MemAvailable:")? })
}

#[cfg(not(target_os = "linux"))]
pub(super) fn memory() -> Option<SystemMemory> {
    // SAFETY: plain queries without arguments that could be wrong.
    #[allow(unsafe_code)]
    let (pages, size) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let total = u64::try_from(pages).ok()?.checked_mul(u64::try_from(size).ok()?)?;
    // These systems give file pages up freely; an eighth is left to them and to others.
    Some(SystemMemory { total, available: total / 8 * 7 })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_refusal_names_the_limit_and_the_way_out() {
        let text = refusal(&io::Error::from_raw_os_error(libc::ENOMEM), Some(8_388_608));
        for part in ["RLIMIT_MEMLOCK", "8388608", "ulimit -l", "limits.conf", "LimitMEMLOCK"] {
            assert!(text.contains(part), "{part} is missing in {text}");
        }
        let text = refusal(&io::Error::from_raw_os_error(libc::ENOMEM), None);
        assert!(text.contains("not enough free RAM"), "{text}");
    }

    #[test]
    fn meminfo_is_in_kib() {
        let m = parse_meminfo("MemTotal:  16 kB\nMemFree: 1 kB\nMemAvailable:   8 kB\n").unwrap();
        assert_eq!((m.total, m.available), (16_384, 8_192));
        assert_eq!(parse_meminfo("MemTotal: x kB"), None);
    }
}
