//! SIGTERM and SIGINT, as a descriptor.

use std::io;
use std::mem;
use std::os::fd::{FromRawFd, OwnedFd};

/// Readable once one of the two has come: they do nothing else from now on. Called before any thread begins.
///
/// # Errors
/// sigprocmask(2), signalfd(2).
pub(crate) fn listen() -> io::Result<OwnedFd> {
    // SAFETY: all-zero is a value of it, and the calls get places of this function.
    unsafe {
        let mut set: libc::sigset_t = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGTERM);
        libc::sigaddset(&raw mut set, libc::SIGINT);
        if libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Whether another one has come.
pub(crate) fn take(signals: &OwnedFd) -> bool {
    rustix::io::read(signals, &mut [0; size_of::<libc::signalfd_siginfo>()]).is_ok_and(|n| n > 0)
}
