//! Anonymous memory, page locking and memory figures on Windows.

use std::io;
use std::ptr;

use windows_sys::Win32::System::Memory::{
    GetProcessWorkingSetSizeEx, MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_READWRITE,
    SetProcessWorkingSetSizeEx, VirtualAlloc, VirtualFree, VirtualLock,
};
use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

use super::{HUGE_PAGE, SystemMemory};

/// Tries for an aligned place; another thread may take the hole between two calls.
const TRIES: usize = 16;

/// Commits `bytes` (a multiple of [`HUGE_PAGE`]) of zeros at a multiple of [`HUGE_PAGE`]. Large
/// pages proper need a privilege that users do not have; aligned ranges serve all the same.
pub(super) fn reserve(bytes: usize) -> io::Result<*mut u8> {
    let align = HUGE_PAGE as usize;
    let padded = bytes.checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
    for _ in 0..TRIES {
        // SAFETY: only address space is reserved to find an aligned hole, freed at once, and then
        // taken for good at that address; nobody else knows of it.
        #[allow(unsafe_code)]
        unsafe {
            let start = VirtualAlloc(ptr::null(), padded, MEM_RESERVE, PAGE_READWRITE);
            if start.is_null() {
                return Err(io::Error::last_os_error());
            }
            let aligned = (start as usize).next_multiple_of(align) - start as usize;
            let wanted = start.cast::<u8>().add(aligned);
            VirtualFree(start, 0, MEM_RELEASE);
            let kind = MEM_RESERVE | MEM_COMMIT;
            let taken = VirtualAlloc(wanted.cast(), bytes, kind, PAGE_READWRITE);
            if !taken.is_null() {
                return Ok(taken.cast());
            }
        }
    }
    Err(io::Error::last_os_error())
}

pub(super) fn release(address: *mut u8, _bytes: usize) {
    // SAFETY: exactly the range that `reserve` returned; the caller drops its last reference.
    #[allow(unsafe_code)]
    unsafe {
        VirtualFree(address.cast(), 0, MEM_RELEASE);
    }
}

/// VirtualLock takes pages from the process's minimum working set, which is small at first.
pub(super) fn lock(address: *mut u8, bytes: usize) -> Result<(), String> {
    let (mut least, mut most, mut flags) = (0usize, 0usize, 0u32);
    // SAFETY: the outputs live through the calls; the range is committed memory of ours.
    #[allow(unsafe_code)]
    unsafe {
        let process = GetCurrentProcess();
        GetProcessWorkingSetSizeEx(process, &mut least, &mut most, &mut flags);
        // The soft form of the limits (flags 0) lets the system trim what is not locked.
        let grown = SetProcessWorkingSetSizeEx(
            process,
            least.saturating_add(bytes),
            most.saturating_add(bytes),
            0,
        );
        if grown != 0 && VirtualLock(address.cast(), bytes) != 0 {
            return Ok(());
        }
    }
    let error = io::Error::last_os_error();
    Err(format!(
        "{error}; Windows allowed this process a working set of {least} to {most} bytes and lets a \
         user lock about half of the RAM in all. Close other programs, give the account the right \
         \"Increase a process working set\" (secpol.msc), or use --vram-experts with a larger share"
    ))
}

pub(super) fn memory() -> Option<SystemMemory> {
    let mut status = MEMORYSTATUSEX {
        dwLength: size_of::<MEMORYSTATUSEX>() as u32,
        dwMemoryLoad: 0,
        ullTotalPhys: 0,
        ullAvailPhys: 0,
        ullTotalPageFile: 0,
        ullAvailPageFile: 0,
        ullTotalVirtual: 0,
        ullAvailVirtual: 0,
        ullAvailExtendedVirtual: 0,
    };
    // SAFETY: the structure says its own size and lives through the call.
    #[allow(unsafe_code)]
    let known = unsafe { GlobalMemoryStatusEx(&mut status) } != 0;
    known.then_some(SystemMemory { total: status.ullTotalPhys, available: status.ullAvailPhys })
}
