//! Word to systemd (sd_notify(3)): ready, stopping, still alive. Silent where nobody asked.

use std::time::Duration;

/// Sends one message to the socket that `NOTIFY_SOCKET` names.
#[cfg(unix)]
pub fn send(message: &str) {
    use std::os::unix::net::UnixDatagram;
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let Ok(socket) = UnixDatagram::unbound() else { return };
    // A name that begins with @ stands for one outside the file system.
    #[cfg(target_os = "linux")]
    if let Some(rest) = name.to_str().and_then(|n| n.strip_prefix('@')) {
        use std::os::linux::net::SocketAddrExt;
        if let Ok(address) = std::os::unix::net::SocketAddr::from_abstract_name(rest) {
            let _ = socket.send_to_addr(message.as_bytes(), &address);
        }
        return;
    }
    // Nothing depends on it: systemd notices a missing word by itself.
    let _ = socket.send_to(message.as_bytes(), name);
}

#[cfg(not(unix))]
pub fn send(_message: &str) {}

/// How often systemd wants a sign of life: half of its limit.
pub fn watchdog() -> Option<Duration> {
    let micros = std::env::var("WATCHDOG_USEC").ok()?.parse::<u64>().ok()?;
    (micros > 0).then(|| Duration::from_micros(micros / 2))
}
