//! syscall(2): calls made by number reach the function of that name, as if made by name. Go's and musl's
//! are raw instructions, which no preload sees; libuv, Rust's rustix and many a portability layer use this.
//!
//! What differs between a system call and libc's function of its name is kept the kernel's: signal sets are
//! 8 bytes, ppoll and pselect6 write back the time that is left, a missing address has no length. Numbers that
//! are not here are `usmc::api::syscall`'s.

use core::ffi::{c_int, c_long, c_void};
use core::mem;
use libc::{sigset_t, timespec};
use usmc::api;
use usmc::api::time::Time;

#[cfg(target_arch = "x86")]
use crate::by_number_i386;

/// Bytes of the kernel's signal set.
pub(crate) const KERNEL_SET: c_long = 8;

/// A signal set of the kernel's size in libc's.
///
/// # Safety
/// `mask` is null or readable for [`KERNEL_SET`] bytes.
pub(crate) unsafe fn widened(mask: c_long) -> Option<sigset_t> {
    let from = mask as *const u64;
    if from.is_null() {
        return None;
    }
    // SAFETY: all-zero is an empty set.
    let mut set: sigset_t = unsafe { mem::zeroed() };
    // SAFETY: 8 bytes by contract; a `sigset_t` begins with the kernel's.
    unsafe { (&raw mut set).cast::<u64>().write(from.read_unaligned()) };
    Some(set)
}

pub(crate) fn at(set: &Option<sigset_t>) -> *const sigset_t {
    set.as_ref().map_or(core::ptr::null(), |set| set)
}

fn now_ns() -> i64 {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a writable timespec. Leaves errno alone for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.ns()
}

/// Runs `call` with a copy of the timeout and writes back what is left of it, as the kernel does.
///
/// # Safety
/// `timeout` is null or a timespec of the caller's.
pub(crate) unsafe fn timed<T: Time>(
    timeout: c_long,
    call: impl FnOnce(*const T) -> c_int,
) -> c_long {
    let place = timeout as *mut T;
    // SAFETY: the caller's contract.
    let Some(given) = (unsafe { place.as_ref() }).copied() else {
        return call(core::ptr::null()) as c_long;
    };
    let start = now_ns();
    let done = call(&raw const given);
    if given.is_valid() {
        let (seconds, rest) = given.parts();
        let whole = i128::from(seconds) * 1_000_000_000 + i128::from(rest * T::UNIT_NS);
        let left = (whole - i128::from(now_ns() - start)).max(0);
        let (seconds, rest) = (left / 1_000_000_000, left % 1_000_000_000);
        // SAFETY: not null, the caller's contract.
        unsafe { *place = T::of(seconds as i64, rest as i64 / T::UNIT_NS) };
    }
    done as c_long
}

/// What syscall(2) does.
///
/// # Safety
/// The arguments are those of system call `nr`.
#[rustfmt::skip]
pub(crate) unsafe extern "C" fn syscall(
    nr: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long,
) -> c_long {
    // SAFETY: the caller's contract.
    #[cfg(target_arch = "x86")]
    if let Some(done) = unsafe { by_number_i386::syscall(nr, [a, b, c, d, e, f]) } {
        return done;
    }
    let fd = a as c_int;
    // SAFETY: the caller's contract; each call has its own arguments in these positions.
    unsafe {
        match nr {
            libc::SYS_preadv2 => api::preadv2(fd, b as _, c as _, d, f as _) as c_long,
            libc::SYS_pwritev2 => api::pwritev2(fd, b as _, c as _, d, f as _) as c_long,
            libc::SYS_preadv => api::preadv(fd, b as _, c as _, d) as c_long,
            libc::SYS_pwritev => api::pwritev(fd, b as _, c as _, d) as c_long,
            libc::SYS_recvmmsg => api::recvmmsg(fd, b as _, c as _, d as _, e as _) as c_long,
            libc::SYS_sendmmsg => api::sendmmsg(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_sendfile => api::sendfile(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_splice => api::splice(fd, b as _, c as _, d as _, e as _, f as _) as c_long,
            libc::SYS_tee => api::tee(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_vmsplice => api::vmsplice(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_copy_file_range => {
                api::copy_file_range(fd, b as _, c as _, d as _, e as _, f as _) as c_long
            }

            libc::SYS_unshare => api::unshare(a as _) as c_long,
            libc::SYS_setns => api::setns(fd, b as _) as c_long,

            libc::SYS_socketpair => api::socketpair(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_bind => api::bind(fd, b as _, c as _) as c_long,
            libc::SYS_getsockname => api::getsockname(fd, b as _, c as _) as c_long,
            libc::SYS_getpeername => api::getpeername(fd, b as _, c as _) as c_long,
            libc::SYS_getsockopt => api::getsockopt(fd, b as _, c as _, d as _, e as _) as c_long,
            libc::SYS_setsockopt => api::setsockopt(fd, b as _, c as _, d as _, e as _) as c_long,

            libc::SYS_ppoll if d == 0 || e == KERNEL_SET => {
                let mask = widened(d);
                timed(c, |timeout: *const timespec| api::ppoll(a as _, b as _, timeout, at(&mask)))
            }
            libc::SYS_pselect6 => {
                // The last argument is a pointer to the set and its size.
                let [mask, size] = (f as *const [c_long; 2]).as_ref().copied().unwrap_or([0, KERNEL_SET]);
                if mask != 0 && size != KERNEL_SET {
                    return api::syscall(nr, a, b, c, d, e, f);
                }
                let mask = widened(mask);
                timed(e, |timeout| {
                    api::pselect(a as _, b as _, c as _, d as _, timeout, at(&mask))
                })
            }
            libc::SYS_epoll_pwait if e == 0 || f == KERNEL_SET => {
                let mask = widened(e);
                api::epoll_pwait(fd, b as _, c as _, d as _, at(&mask)) as c_long
            }
            libc::SYS_epoll_pwait2 if e == 0 || f == KERNEL_SET => {
                let mask = widened(e);
                api::epoll_pwait2(fd, b as _, c as _, d as _, at(&mask)) as c_long
            }

            libc::SYS_openat => api::openat(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_open_by_handle_at => api::open_by_handle_at(fd, b as _, c as _) as c_long,
            libc::SYS_pipe2 => api::pipe2(a as _, b as _) as c_long,
            libc::SYS_eventfd2 => api::eventfd(a as _, b as _) as c_long,
            libc::SYS_timerfd_create => api::timerfd_create(a as _, b as _) as c_long,
            libc::SYS_signalfd4 if c == KERNEL_SET => {
                let mask = widened(b);
                api::signalfd(fd, at(&mask), d as _) as c_long
            }
            libc::SYS_inotify_init1 => api::inotify_init1(fd) as c_long,
            libc::SYS_fanotify_init => api::fanotify_init(a as _, b as _) as c_long,
            libc::SYS_memfd_create => api::memfd_create(a as _, b as _) as c_long,
            libc::SYS_pidfd_open => api::pidfd_open(a as _, b as _) as c_long,
            libc::SYS_pidfd_getfd => api::pidfd_getfd(fd, b as _, c as _) as c_long,

            libc::SYS_execve => api::execve(a as _, b as _, c as _) as c_long,
            libc::SYS_execveat => api::execveat(fd, b as _, c as _, d as _, e as _) as c_long,
            libc::SYS_exit_group => {
                api::exit_now(fd);
                0
            }
            _ if api::is_fork(nr, a, b) => api::fork_by_number(nr, a, b, c, d, e),

            #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
            _ => of_x86(nr, a, b, c, d, e, f),
            #[cfg(not(any(target_arch = "x86_64", target_arch = "x86")))]
            _ => api::syscall(nr, a, b, c, d, e, f),
        }
    }
}

/// Numbers that newer architectures do not have.
///
/// # Safety
/// As [`syscall`].
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
#[rustfmt::skip]
unsafe fn of_x86(
    nr: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long,
) -> c_long {
    #[cfg(target_arch = "x86_64")]
    use libc::SYS_select as SELECT;
    #[cfg(target_arch = "x86")]
    use libc::SYS__newselect as SELECT;
    let fd = a as c_int;
    // SAFETY: the caller's contract.
    unsafe {
        match nr {
            libc::SYS_poll => api::poll(a as _, b as _, c as _) as c_long,
            SELECT => api::select(fd, b as _, c as _, d as _, e as _) as c_long,
            libc::SYS_epoll_create => api::epoll_create(fd) as c_long,
            libc::SYS_epoll_wait => api::epoll_wait(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_open => api::open(a as _, b as _, c as _) as c_long,
            libc::SYS_creat => api::creat(a as _, b as _) as c_long,
            libc::SYS_pipe => api::pipe(a as _) as c_long,
            libc::SYS_eventfd => api::eventfd(a as _, 0) as c_long,
            libc::SYS_signalfd if c == KERNEL_SET => {
                let mask = widened(b);
                api::signalfd(fd, at(&mask), 0) as c_long
            }
            libc::SYS_inotify_init => api::inotify_init() as c_long,
            // The child of the real one would return through our frames on its parent's stack.
            libc::SYS_vfork => api::vfork() as c_long,
            _ => api::syscall(nr, a, b, c, d, e, f),
        }
    }
}

/// Where a call that may make a process with a stack of its own goes on.
///
/// # Safety
/// The arguments are those of system call `nr`.
pub(crate) unsafe extern "C" fn hook(nr: c_long, a: c_long, b: c_long) -> *const c_void {
    // SAFETY: the caller's contract.
    if unsafe { usmc::api::is_fork(nr, a, b) } {
        syscall as *const c_void
    } else {
        usmc::real::address_of_syscall()
    }
}

/// Exports `name` as [`syscall`]. A child with a stack of its own cannot come back through a frame of ours:
/// where one is made, libc's function is jumped to at once.
#[cfg(target_arch = "x86_64")]
macro_rules! export {
    ($name:ident;) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "cmp rdi, {clone}
                 je 2f
                 cmp rdi, {clone3}
                 je 2f
                 jmp {by_number}
                 2:",
                $crate::jump::hook_then_jump!(),
                clone = const libc::SYS_clone,
                clone3 = const libc::SYS_clone3,
                by_number = sym $crate::by_number::syscall,
                hook = sym $crate::by_number::hook,
            )
        }
    };
}

/// The same where the arguments lie on the stack.
#[cfg(target_arch = "x86")]
macro_rules! export {
    ($name:ident;) => {
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C" fn $name() {
            core::arch::naked_asm!(
                "cmp dword ptr [esp + 4], {clone}
                 je 2f
                 cmp dword ptr [esp + 4], {clone3}
                 je 2f
                 jmp {by_number}
                 2:",
                $crate::jump::hook_then_jump!(),
                clone = const libc::SYS_clone,
                clone3 = const libc::SYS_clone3,
                by_number = sym $crate::by_number::syscall,
                hook = sym $crate::by_number::hook,
            )
        }
    };
}

/// Exports `name` as [`syscall`].
#[cfg(not(any(target_arch = "x86_64", target_arch = "x86")))]
macro_rules! export {
    ($name:ident;) => {
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            nr: core::ffi::c_long,
            a: core::ffi::c_long,
            b: core::ffi::c_long,
            c: core::ffi::c_long,
            d: core::ffi::c_long,
            e: core::ffi::c_long,
            f: core::ffi::c_long,
        ) -> core::ffi::c_long {
            // SAFETY: the application calls with the arguments of system call `nr`.
            unsafe { $crate::by_number::syscall(nr, a, b, c, d, e, f) }
        }
    };
}

pub(crate) use export;
