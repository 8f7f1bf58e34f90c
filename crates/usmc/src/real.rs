//! The next definition of every symbol we interpose, which is libc's unless somebody else is preloaded.
//!
//! All are resolved by [`resolve_all`] from `.init_array`. A constructor that runs before ours resolves
//! what it needs on its first call: dlsym may allocate then, which is harmless there since no code of ours
//! is on the stack below malloc.

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::mem;
use core::ptr;
use libc::{epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t, pid_t, pollfd, sigset_t};
use libc::{size_t, sockaddr, socklen_t, ssize_t, timespec, timeval};
use usmc_shm::sync::AtomicPtr;
use usmc_shm::sync::Ordering::Relaxed;

macro_rules! real {
    ($($name:ident($($arg:ident: $ty:ty),*) -> $ret:ty;)*) => {
        #[allow(non_upper_case_globals, reason = "named as the functions they lead to")]
        mod slots {
            use super::*;
            $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());)*
        }
        $(
            /// The next definition of the libc function of this name.
            ///
            /// # Safety
            /// As the function itself.
            #[inline]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                let mut f = slots::$name.load(Relaxed);
                if f.is_null() {
                    f = resolve(&slots::$name, concat!(stringify!($name), "\0"));
                    if f.is_null() {
                        crate::set_errno(libc::ENOSYS);
                        return -1 as _;
                    }
                }
                // SAFETY: the symbol of that name has this signature (libc's header; `libc` crate).
                let f: unsafe extern "C" fn($($ty),*) -> $ret = unsafe { mem::transmute(f) };
                // SAFETY: the caller's contract.
                unsafe { f($($arg),*) }
            }
        )*
        /// Fills every entry.
        pub fn resolve_all() {
            $(resolve(&slots::$name, concat!(stringify!($name), "\0"));)*
        }
    };
}

#[cold]
fn resolve(slot: &AtomicPtr<c_void>, name: &'static str) -> *mut c_void {
    // SAFETY: NUL-terminated by the macro.
    let f = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast::<c_char>()) };
    slot.store(f, Relaxed);
    f
}

real! {
    socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    socketpair(family: c_int, kind: c_int, protocol: c_int, out: *mut c_int) -> c_int;
    connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int;
    listen(fd: c_int, backlog: c_int) -> c_int;
    accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int;
    accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int;
    shutdown(fd: c_int, how: c_int) -> c_int;
    close(fd: c_int) -> c_int;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int;
    closefrom(first: c_int) -> c_int;
    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t;
    readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut sockaddr,
        addr_len: *mut socklen_t) -> ssize_t;
    recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t;
    recvmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec)
        -> c_int;
    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t;
    writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t;
    send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, addr: *const sockaddr,
        addr_len: socklen_t) -> ssize_t;
    sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t;
    sendmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int;
    preadv2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    pwritev2(fd: c_int, iov: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t;
    sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t;
    splice(from: c_int, from_off: *mut libc::loff_t, to: c_int, to_off: *mut libc::loff_t,
        len: size_t, flags: c_uint) -> ssize_t;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int;
    select(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval)
        -> c_int;
    pselect(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t) -> c_int;
    epoll_create(size: c_int) -> c_int;
    epoll_create1(flags: c_int) -> c_int;
    epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int;
    epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int;
    epoll_pwait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int,
        mask: *const sigset_t) -> c_int;
    epoll_pwait2(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec,
        mask: *const sigset_t) -> c_int;
    fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int;
    ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int;
    dup(fd: c_int) -> c_int;
    dup2(old: c_int, new: c_int) -> c_int;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int;
    fork() -> pid_t;
    open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int;
    creat(path: *const c_char, mode: c_uint) -> c_int;
    pipe(out: *mut c_int) -> c_int;
    pipe2(out: *mut c_int, flags: c_int) -> c_int;
    eventfd(value: c_uint, flags: c_int) -> c_int;
    timerfd_create(clock: c_int, flags: c_int) -> c_int;
    signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int;
    inotify_init() -> c_int;
    inotify_init1(flags: c_int) -> c_int;
    memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    syscall(nr: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long;
}
