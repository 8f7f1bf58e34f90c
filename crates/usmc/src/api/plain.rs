//! The calls of which the stack need not know more than that they happen: handed on. Each is replaced here
//! by a function of its own once it does.

use core::ffi::{c_int, c_uint};
use libc::{iovec, off64_t, sockaddr, socklen_t, ssize_t};

use super::{apart, fail};
use crate::os::real;
use crate::passing::adopt;
use crate::socket::deputy;

pub use crate::os::real::{
    bind, copy_file_range, sigaction, siginterrupt, signal, sysv_signal, tee, vmsplice,
};

macro_rules! names {
    ($($(#[$doc:meta])* $name:ident: $which:ident;)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int {
            // SAFETY: the caller's contract.
            match unsafe { deputy::name(fd, deputy::Which::$which, addr, len) } {
                Some(()) => 0,
                // SAFETY: the caller's contract.
                None => unsafe { real::$name(fd, addr, len) },
            }
        }
    )* };
}

names! {
    /// getsockname(2)
    getsockname: Own;
    /// getpeername(2)
    getpeername: Peer;
}

/// pidfd_getfd(2). The socket may be one of our own.
pub unsafe fn pidfd_getfd(pidfd: c_int, number: c_int, flags: c_uint) -> c_int {
    // SAFETY: the caller's contract.
    let fd = unsafe { real::pidfd_getfd(pidfd, number, flags) };
    if fd < 0 {
        return fd;
    }
    match apart(|| adopt::fetched(fd)) {
        Ok(()) => fd,
        Err(code) => fail(code),
    }
}

macro_rules! at_offset {
    ($($(#[$doc:meta])* $name:ident = $real:ident;)*) => { $(
        $(#[$doc])*
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
