//! The calls of which the stack need not know more than that they happen: handed on. Each is replaced here
//! by a function of its own once it does.

use core::ffi::{c_char, c_int, c_uint, c_void};
use libc::{iovec, off64_t, pid_t, ssize_t};

use super::after;
use crate::os::errno::{errno, set_errno};
use crate::os::real;
use crate::passing::adopt;
use crate::socket::control;

pub use crate::os::real::{
    bind, copy_file_range, getpeername, getsockname, sigaction, siginterrupt, signal, sysv_signal,
    tee, vmsplice,
};

macro_rules! made {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*);)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the function itself.
        pub unsafe fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the caller's contract.
            after(unsafe { real::$name($($arg),*) }, |&fd| control::fresh(fd))
        }
    )* };
}

made! {
    /// mkstemp(3)
    mkstemp(template: *mut c_char);
    /// mkostemp(3)
    mkostemp(template: *mut c_char, flags: c_int);
    /// mkstemps(3)
    mkstemps(template: *mut c_char, suffix: c_int);
    /// mkostemps(3)
    mkostemps(template: *mut c_char, suffix: c_int, flags: c_int);
    /// open_by_handle_at(2)
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int);
    /// fanotify_init(2)
    fanotify_init(flags: c_uint, event_flags: c_uint);
    /// pidfd_open(2)
    pidfd_open(pid: pid_t, flags: c_uint);
}

/// pidfd_getfd(2). The socket may be one of our own.
///
/// # Safety
/// As the function itself.
pub unsafe fn pidfd_getfd(pidfd: c_int, number: c_int, flags: c_uint) -> c_int {
    // SAFETY: the caller's contract.
    let fd = unsafe { real::pidfd_getfd(pidfd, number, flags) };
    if fd < 0 {
        return fd;
    }
    let saved = errno();
    match adopt::fetched(fd) {
        Ok(()) => {
            set_errno(saved);
            fd
        }
        Err(code) => super::fail(code),
    }
}

macro_rules! at_offset {
    ($($(#[$doc:meta])* $name:ident = $real:ident;)*) => { $(
        $(#[$doc])*
        ///
        /// # Safety
        /// As the function itself.
        pub unsafe fn $name(fd: c_int, iov: *const iovec, count: c_int, offset: impl Into<off64_t>) -> ssize_t {
            // SAFETY: the caller's contract.
            unsafe { real::$real(fd, iov, count, offset.into()) }
        }
    )* };
}

at_offset! {
    /// preadv(2)
    preadv = preadv64;
    /// pwritev(2)
    pwritev = pwritev64;
}

/// mkstemp64(3)
///
/// # Safety
/// As the function itself.
pub unsafe fn mkstemp64(template: *mut c_char) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { mkostemp(template, libc::O_LARGEFILE) }
}

/// mkostemp64(3)
///
/// # Safety
/// As the function itself.
pub unsafe fn mkostemp64(template: *mut c_char, flags: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { mkostemp(template, flags | libc::O_LARGEFILE) }
}

/// mkstemps64(3)
///
/// # Safety
/// As the function itself.
pub unsafe fn mkstemps64(template: *mut c_char, suffix: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { mkostemps(template, suffix, libc::O_LARGEFILE) }
}

/// mkostemps64(3)
///
/// # Safety
/// As the function itself.
pub unsafe fn mkostemps64(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { mkostemps(template, suffix, flags | libc::O_LARGEFILE) }
}
