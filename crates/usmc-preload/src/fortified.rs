//! The `_chk` twins that `-D_FORTIFY_SOURCE` compiles calls into: the object's size is checked, then the
//! ordinary function runs. A violation ends the program as glibc ends it.

use core::ffi::{c_int, c_void};
use libc::{nfds_t, pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

unsafe extern "C" {
    fn __chk_fail() -> !;
}

fn check(wanted: usize, size: usize) {
    if wanted > size {
        // SAFETY: glibc's own end for overflows.
        unsafe { __chk_fail() }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t {
    check(len, size);
    // SAFETY: the caller's contract, here and below.
    unsafe { usmc::api::read(fd, buf, len) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __recv_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
) -> ssize_t {
    check(len, size);
    // SAFETY: see above.
    unsafe { usmc::api::recv(fd, buf, len, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    buf: *mut c_void,
    len: size_t,
    size: size_t,
    flags: c_int,
    addr: *mut sockaddr,
    addr_len: *mut socklen_t,
) -> ssize_t {
    check(len, size);
    // SAFETY: see above.
    unsafe { usmc::api::recvfrom(fd, buf, len, flags, addr, addr_len) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    size: size_t,
) -> c_int {
    check((count as usize).saturating_mul(size_of::<pollfd>()), size);
    // SAFETY: see above.
    unsafe { usmc::api::poll(fds, count, timeout) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn __ppoll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    mask: *const sigset_t,
    size: size_t,
) -> c_int {
    check((count as usize).saturating_mul(size_of::<pollfd>()), size);
    // SAFETY: see above.
    unsafe { usmc::api::ppoll(fds, count, timeout, mask) }
}
