//! Options of sockets that are numbers.

use super::sys;

/// Where a peek begins.
pub const SO_PEEK_OFF: i32 = 42;
/// SO_TIMESTAMP, SO_TIMESTAMPNS and SO_TIMESTAMPING, each for both sizes of time_t.
pub const STAMPS: [i32; 6] = [29, 35, 37, 63, 64, 65];

/// Its value, or `default` where the kernel does not tell.
pub fn int(fd: i32, level: i32, name: i32, default: i32) -> i32 {
    let mut value = default;
    match sys::getsockopt(fd, level, name, &mut value) {
        Ok(_) => value,
        Err(_) => default,
    }
}

/// Whether one is set that only the kernel's TCP can serve, and that no call of this process has shown: the socket was configured by
/// others.
pub fn are_kernels(fd: i32) -> bool {
    let socket = |name, otherwise| int(fd, libc::SOL_SOCKET, name, otherwise);
    STAMPS.into_iter().any(|name| socket(name, 0) != 0) || socket(SO_PEEK_OFF, -1) >= 0
}

/// What the kernel counts of a socket's buffers, in bytes with its own structures (sock_diag(7), SK_MEMINFO_*).
pub struct MemInfo {
    /// What the send buffer may hold.
    pub send_buffer: u32,
    /// What it holds.
    pub queued: u32,
}

/// `None` where the kernel does not tell.
pub fn meminfo(fd: i32) -> Option<MemInfo> {
    /// Of linux/socket.h (asm-generic).
    const SO_MEMINFO: i32 = 55;
    /// SK_MEMINFO_SNDBUF of linux/sock_diag.h.
    const SNDBUF: usize = 3;
    /// SK_MEMINFO_WMEM_QUEUED.
    const QUEUED: usize = 5;
    let mut words = [0u32; 9];
    let len = sys::getsockopt(fd, libc::SOL_SOCKET, SO_MEMINFO, &mut words).ok()?;
    let is_told = len >= (QUEUED + 1) * size_of::<u32>();
    is_told.then_some(MemInfo { send_buffer: words[SNDBUF], queued: words[QUEUED] })
}
