//! The calls that take spans of time or hand some over, as programs call them that are built with 64 bits of time
//! for a 32-bit machine.

use core::ffi::{c_int, c_uint};
use libc::{epoll_event, fd_set, mmsghdr, msghdr, nfds_t, pollfd, sigset_t, ssize_t};

use super::{bytes, waits};
use crate::os::real;
use crate::os::time::{Timespec64, Timeval64};

/// recvmsg(2); timestamps among the control messages are the kernel's.
pub unsafe fn recvmsg_time64(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's contract, as for all calls below.
    unsafe { bytes::recvmsg_by(fd, msg, flags, || real::__recvmsg64(fd, msg, flags)) }
}

/// recvmmsg(2)
pub unsafe fn recvmmsg_time64(
    fd: c_int,
    msgs: *mut mmsghdr,
    count: c_uint,
    flags: c_int,
    timeout: *mut Timespec64,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        bytes::recvmmsg_by(
            (fd, msgs, count, flags, timeout),
            || real::__recvmmsg64(fd, msgs, count, flags, timeout),
            |msg, flags| recvmsg_time64(fd, msg, flags),
        )
    }
}

/// ppoll(2)
pub unsafe fn ppoll_time64(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const Timespec64,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        waits::ppoll_by(fds, count, timeout, mask, || real::__ppoll64(fds, count, timeout, mask))
    }
}

/// select(2)
pub unsafe fn select_time64(
    count: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    timeout: *mut Timeval64,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        waits::select_in(count, [r, w, x], timeout, |count| {
            real::__select64(count, r, w, x, timeout)
        })
    }
}

/// pselect(2)
pub unsafe fn pselect_time64(
    count: c_int,
    r: *mut fd_set,
    w: *mut fd_set,
    x: *mut fd_set,
    timeout: *const Timespec64,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        waits::pselect_in(count, [r, w, x], timeout, mask, |count| {
            real::__pselect64(count, r, w, x, timeout, mask)
        })
    }
}

/// epoll_pwait2(2)
pub unsafe fn epoll_pwait2_time64(
    epfd: c_int,
    events: *mut epoll_event,
    max: c_int,
    timeout: *const Timespec64,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: as above.
    unsafe {
        waits::epoll_pwait2_by(epfd, events, max, timeout, mask, || {
            real::__epoll_pwait2_time64(epfd, events, max, timeout, mask)
        })
    }
}
