//! What the libc of a 32-bit machine exports besides the functions of `symbols.rs`: the calls of programs that are
//! built with 64 bits of time (`-D_TIME_BITS=64`).

use core::ffi::{c_int, c_uint, c_ulong, c_void};
use libc::{epoll_event, fd_set, mmsghdr, msghdr, nfds_t, pollfd, sigset_t, socklen_t, ssize_t};
use usmc::api::{Timespec64, Timeval64};

use crate::interpose::interpose;

interpose! {
    // The option is taken as it is: both of libc's functions know both kinds of time.
    __getsockopt64(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int
        = getsockopt;
    __setsockopt64(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int
        = setsockopt;
    __sendmsg64(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t = sendmsg;
    __sendmmsg64(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int = sendmmsg;
    __recvmsg64(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t = recvmsg_time64;
    __recvmmsg64(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut Timespec64) -> c_int
        = recvmmsg_time64;
    __ppoll64(fds: *mut pollfd, count: nfds_t, timeout: *const Timespec64, mask: *const sigset_t) -> c_int
        = ppoll_time64;
    __select64(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut Timeval64) -> c_int
        = select_time64;
    __pselect64(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const Timespec64,
        mask: *const sigset_t) -> c_int = pselect_time64;
    __epoll_pwait2_time64(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const Timespec64,
        mask: *const sigset_t) -> c_int = epoll_pwait2_time64;
    __fcntl_time64(fd: c_int, cmd: c_int; arg: c_ulong) -> c_int = fcntl64;
    __ioctl_time64(fd: c_int, request: c_ulong; arg: c_ulong) -> c_int = ioctl;
    __prctl_time64(option: c_int; a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int = prctl;
}
