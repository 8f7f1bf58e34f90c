//! Calls by number that differ on i386 from those of other machines: 64-bit offsets in two words, two kinds of time,
//! and the ways of Linux 2.0 to call socket and select.

use core::ffi::{c_int, c_long};
use usmc::api::{self, Timespec64};

use crate::by_number::{self, KERNEL_SET, at, timed, widened};

/// From `asm/unistd_32.h`.
const SYS_PSELECT6_TIME64: c_long = 413;
const SYS_PPOLL_TIME64: c_long = 414;
const SYS_RECVMMSG_TIME64: c_long = 417;

/// The call, if it is one of these.
///
/// # Safety
/// The arguments are those of system call `nr`.
#[rustfmt::skip]
pub(crate) unsafe fn syscall(nr: c_long, [a, b, c, d, e, f]: [c_long; 6]) -> Option<c_long> {
    let fd = a as c_int;
    let offset = i64::from(d as u32) | i64::from(e) << 32;
    // SAFETY: the caller's contract; each call has its own arguments in these positions.
    let done = unsafe {
        match nr {
            libc::SYS_socketcall => return socketcall(a, b),
            libc::SYS_select => {
                let [n, r, w, x, timeout] = words(a)?;
                api::select(n as _, r as _, w as _, x as _, timeout as _)
            }
            libc::SYS_fcntl | libc::SYS_fcntl64 => api::fcntl_by_number(nr, fd, b as _, c as _),
            libc::SYS_preadv => return Some(api::preadv(fd, b as _, c as _, offset) as c_long),
            libc::SYS_pwritev => return Some(api::pwritev(fd, b as _, c as _, offset) as c_long),
            libc::SYS_preadv2 => {
                return Some(api::preadv2(fd, b as _, c as _, offset, f as _) as c_long)
            }
            libc::SYS_pwritev2 => {
                return Some(api::pwritev2(fd, b as _, c as _, offset, f as _) as c_long)
            }
            libc::SYS_sendfile64 => {
                return Some(api::sendfile64(fd, b as _, c as _, d as _) as c_long)
            }
            SYS_RECVMMSG_TIME64 => api::recvmmsg_time64(fd, b as _, c as _, d as _, e as _),
            SYS_PPOLL_TIME64 if d == 0 || e == KERNEL_SET => {
                let mask = widened(d);
                return Some(timed(c, |timeout: *const Timespec64| {
                    api::ppoll_time64(a as _, b as _, timeout, at(&mask))
                }));
            }
            SYS_PSELECT6_TIME64 => {
                let [mask, size] = words(f).unwrap_or([0, KERNEL_SET]);
                if mask != 0 && size != KERNEL_SET {
                    return None;
                }
                let mask = widened(mask);
                return Some(timed(e, |timeout: *const Timespec64| {
                    api::pselect_time64(a as _, b as _, c as _, d as _, timeout, at(&mask))
                }));
            }
            libc::SYS_epoll_pwait2 if e == 0 || f == KERNEL_SET => {
                let mask = widened(e);
                api::epoll_pwait2_time64(fd, b as _, c as _, d as _, at(&mask))
            }
            // Of another size: nobody but the kernel.
            libc::SYS_epoll_pwait2 => return Some(api::syscall(nr, a, b, c, d, e, f)),
            _ => return None,
        }
    };
    Some(done)
}

/// Arguments that lie in memory. `None` where nothing can be mapped: the kernel says EFAULT.
///
/// # Safety
/// `place` is readable for so many words, or below the first page.
unsafe fn words<const N: usize>(place: c_long) -> Option<[c_long; N]> {
    // SAFETY: the caller's contract.
    (place as usize >= 4096).then(|| unsafe { (place as *const [c_long; N]).read_unaligned() })
}

/// socketcall(2), of which `man 2 socketcall` and `linux/net.h` have the numbers.
///
/// # Safety
/// As the system call itself.
#[rustfmt::skip]
unsafe fn socketcall(call: c_long, args: c_long) -> Option<c_long> {
    /// How many words each call takes, by its number.
    const COUNTS: [usize; 21] = [0, 3, 3, 3, 2, 3, 3, 3, 4, 4, 4, 6, 6, 2, 5, 5, 3, 3, 4, 5, 4];
    let count = *COUNTS.get(call as usize)?;
    let place = args as usize;
    if count == 0 || place < 4096 {
        return None;
    }
    let mut all = [0; 6];
    // SAFETY: the caller's contract: `count` words.
    unsafe { all.as_mut_ptr().copy_from_nonoverlapping(place as *const c_long, count) };
    let [a, b, c, d, e, f] = all;
    let fd = a as c_int;
    // SAFETY: as above.
    let done = unsafe {
        match call {
            1 => api::socket(fd, b as _, c as _) as c_long,
            3 => api::connect(fd, b as _, c as _) as c_long,
            4 => api::listen(fd, b as _) as c_long,
            5 => api::accept(fd, b as _, c as _) as c_long,
            9 => api::send(fd, b as _, c as _, d as _) as c_long,
            10 => api::recv(fd, b as _, c as _, d as _) as c_long,
            13 => api::shutdown(fd, b as _) as c_long,
            16 => api::sendmsg(fd, b as _, c as _) as c_long,
            17 => api::recvmsg(fd, b as _, c as _) as c_long,
            18 => api::accept4(fd, b as _, c as _, d as _) as c_long,
            // The others have numbers of their own, and the same arguments.
            _ => {
                let nr = match call {
                    2 => libc::SYS_bind,
                    6 => libc::SYS_getsockname,
                    7 => libc::SYS_getpeername,
                    8 => libc::SYS_socketpair,
                    11 => libc::SYS_sendto,
                    12 => libc::SYS_recvfrom,
                    14 => libc::SYS_setsockopt,
                    15 => libc::SYS_getsockopt,
                    19 => libc::SYS_recvmmsg,
                    _ => libc::SYS_sendmmsg,
                };
                by_number::syscall(nr, a, b, c, d, e, f)
            }
        }
    };
    Some(done)
}
