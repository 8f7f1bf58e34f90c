//! What socket(2) really makes of TCP: a library that is preloaded behind us or a BPF program may make another socket
//! of it, whose byte counts are not TCP's. What smc_run's wants we give ourselves; others (mptcpize's) have their way,
//! and the socket is the kernel's affair.
//!
//! Asked once per process, for its first socket.

use core::ffi::c_int;
use libc::{IPPROTO_TCP, SO_DOMAIN, SO_PROTOCOL, SOL_SOCKET};
use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use super::smc::{AF_SMC, IPPROTO_SMC};
use crate::os::errno::{errno, set_errno};
use crate::os::{config, kernel_only, real, sockopt, sys};

/// The makers of TCP sockets in this process.
static MAKER: AtomicU32 = AtomicU32::new(UNKNOWN);
const UNKNOWN: u32 = 0;
/// libc's function, as everywhere.
const LIBC: u32 = 1;
/// The system call, past libraries behind us.
const KERNEL: u32 = 2;
/// Nobody.
const NOBODY: u32 = 3;

/// socket(2) for TCP: the fd, or -1 with errno, and whether it is TCP's.
pub fn tcp(family: c_int, kind: c_int, protocol: c_int) -> (c_int, bool) {
    // SAFETY: no pointers.
    let by_libc = || unsafe { real::socket(family, kind, protocol) };
    let by_kernel = || sys::socket(family, kind, protocol).unwrap_or_else(failed);
    match MAKER.load(Relaxed) {
        LIBC => return (by_libc(), true),
        KERNEL => return (by_kernel(), true),
        NOBODY => return (by_libc(), false),
        _ => {}
    }
    let saved = errno();
    let first = by_libc();
    if config::get().off || kernel_only::is_sandboxed() {
        return (first, true);
    }
    if first < 0 && !matches!(errno(), libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT) {
        return (first, false);
    }
    let is_tcp_already = first >= 0 && is_tcp(first);
    if is_tcp_already || (first >= 0 && !is_smc(first)) {
        MAKER.store(if is_tcp_already { LIBC } else { NOBODY }, Relaxed);
        return (first, is_tcp_already);
    }
    if first >= 0 {
        sys::close(first);
    }
    set_errno(saved);
    let second = by_kernel();
    let is_tcp = second >= 0 && is_tcp(second);
    if second >= 0 {
        MAKER.store(if is_tcp { KERNEL } else { NOBODY }, Relaxed);
    }
    (second, is_tcp)
}

fn failed(code: sys::Errno) -> c_int {
    set_errno(code);
    -1
}

fn is_tcp(fd: c_int) -> bool {
    sockopt::int(fd, SOL_SOCKET, SO_PROTOCOL, 0) == IPPROTO_TCP
}

fn is_smc(fd: c_int) -> bool {
    sockopt::int(fd, SOL_SOCKET, SO_PROTOCOL, 0) == IPPROTO_SMC
        || sockopt::int(fd, SOL_SOCKET, SO_DOMAIN, 0) == AF_SMC
}
