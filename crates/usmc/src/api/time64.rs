//! The receives that take spans of time or hand some over, as programs call them that are built with 64 bits of time
//! for a 32-bit machine.

use core::ffi::{c_int, c_uint};
use libc::{mmsghdr, msghdr, ssize_t};

use super::bytes;
use crate::os::real;
use crate::os::time::Timespec64;

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
