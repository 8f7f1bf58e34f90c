//! The next definition of every symbol we interpose, which is libc's unless somebody else is preloaded.
//!
//! All are resolved by [`resolve_all`] from `.init_array`, before the program's first instruction, so that
//! no call in a signal handler or below malloc ever looks for one. Another library's constructor may call
//! earlier: it resolves what it needs on that call. That takes the loader's lock ([`linkmap`]), which is
//! harmless there: the program has not started, so no signal handler of its own and no other thread exists.
//!
//! A symbol that this libc lacks (`close_range` before glibc 2.34) becomes the raw system call, so that
//! the program sees what the kernel says; where there is no such call it fails with ENOSYS, or does nothing
//! where there is nothing to be done. Everything the application may block in is libc's own function, which
//! is a cancellation point and must stay one.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use core::{mem, ptr};
use libc::{
    FILE, aiocb, epoll_event, fd_set, iovec, loff_t, mmsghdr, msghdr, nfds_t, off64_t, pid_t,
    pollfd, posix_spawn_file_actions_t, posix_spawnattr_t, pthread_mutex_t, pthread_mutexattr_t,
    sigaction as Sigaction, sigevent, sighandler_t, sigset_t, size_t, sockaddr, socklen_t, ssize_t,
    timespec, timeval,
};
use usmc_shm::sync::Ordering::Relaxed;
use usmc_shm::sync::{AtomicPtr, AtomicU32};

use crate::os::linkmap::{self, Place, Wanted};

#[cfg(target_pointer_width = "32")]
use crate::os::time::{Timespec64, Timeval64};
#[cfg(target_pointer_width = "32")]
use libc::off_t;

/// What a stream of fopencookie(3) calls, `cookie_io_functions_t`. Cookies are descriptors.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Functions {
    /// As read(2).
    pub read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    /// As write(2), with 0 for an error.
    pub write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    /// As lseek(2), by a pointer.
    pub seek: Option<unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    /// As close(2).
    pub close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

/// What a failing libc function of this type returns.
trait Failed {
    const FAILED: Self;
}

macro_rules! failed {
    ($($type:ty: $value:expr;)*) => { $(
        impl Failed for $type {
            const FAILED: $type = $value;
        }
    )* };
}

failed! { i32: -1; i64: -1; isize: -1; (): (); sighandler_t: libc::SIG_ERR; }

impl<T> Failed for *mut T {
    const FAILED: *mut T = ptr::null_mut();
}

/// The body of a stand-in for a symbol that this libc lacks.
macro_rules! stand_in {
    ($ret:ty, ENOSYS $(, $arg:ident)*) => {{
        crate::os::errno::set_errno(libc::ENOSYS);
        <$ret as Failed>::FAILED
    }};
    ($ret:ty, NOTHING $(, $arg:ident)*) => { Default::default() };
    // Offsets that these calls take have two words where a word has 32 bits, and both everywhere.
    ($ret:ty, SYS_preadv2, $($arg:ident),*) => { stand_in!(@positioned $ret, SYS_preadv2, $($arg),*) };
    ($ret:ty, SYS_pwritev2, $($arg:ident),*) => { stand_in!(@positioned $ret, SYS_pwritev2, $($arg),*) };
    (@positioned $ret:ty, $nr:ident, $fd:ident, $iov:ident, $count:ident, $at:ident, $flags:ident) => {
        stand_in!(@pad $ret, $nr, [$fd as usize, $iov as usize, $count as usize, $at as usize,
            ($at as u64 >> 32) as usize, $flags as usize,] 0 0 0 0 0 0)
    };
    // It wants the size of a set of the kernel's signals, which is 64 bits, and 64 bits of time.
    ($ret:ty, SYS_epoll_pwait2, $($arg:ident),*) => {
        if cfg!(target_pointer_width = "64") {
            stand_in!(@pad $ret, SYS_epoll_pwait2, [$($arg as usize,)* 8,] 0 0 0 0 0 0)
        } else {
            stand_in!($ret, ENOSYS)
        }
    };
    ($ret:ty, $nr:ident $(, $arg:ident)*) => { stand_in!(@pad $ret, $nr, [$($arg as usize,)*] 0 0 0 0 0 0) };
    (@pad $ret:ty, $nr:ident, [$($arg:expr,)*] $($zero:literal)*) => {{
        let given: &[usize] = &[$($arg),*];
        let mut all = [$($zero as usize),*];
        for (place, value) in all.iter_mut().zip(given) {
            *place = *value;
        }
        let [a, b, c, d, e, f] = all;
        // SAFETY: the caller's arguments are those the system call of this name takes.
        let done = unsafe { crate::os::sys::raw(libc::$nr, a, b, c, d, e, f) };
        match crate::os::sys::failure(done) {
            Some(errno) => {
                crate::os::errno::set_errno(errno);
                <$ret as Failed>::FAILED
            }
            None => done as $ret,
        }
    }};
}

/// `name(args) -> ret, SYS_call;` makes `real::name`; the last word says what stands in for a missing symbol.
macro_rules! real {
    ($($(#[$if:meta])* $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty, $otherwise:ident;)*) => {
        #[allow(non_upper_case_globals, reason = "named as the functions they lead to")]
        mod slots {
            use super::*;
            $($(#[$if])* pub static $name: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());)*
        }
        #[allow(unused_variables, reason = "ENOSYS looks at no argument")]
        #[allow(non_snake_case, reason = "named as the functions they stand in for")]
        mod missing {
            use super::*;
            $(
                $(#[$if])*
                pub extern "C" fn $name($($arg: $ty),*) -> $ret {
                    stand_in!($ret, $otherwise $(, $arg)*)
                }
            )*
        }
        $(
            $(#[$if])*
            /// The next definition of the libc function of this name.
            ///
            /// # Safety
            /// As the function itself.
            #[inline(always)]
            #[allow(non_snake_case, reason = "libc's name")]
            #[allow(clippy::too_many_arguments, reason = "libc's signature")]
            pub unsafe fn $name($($arg: $ty),*) -> $ret {
                // Relaxed: the value is an address that is the same whoever found it.
                let mut f = slots::$name.load(Relaxed);
                if f.is_null() {
                    f = resolvers::$name();
                }
                // SAFETY: the symbol of that name has this signature (libc's header; usmc-preload proves
                // it against the `libc` crate), and so has its stand-in.
                let f: unsafe extern "C" fn($($ty),*) -> $ret = unsafe { mem::transmute(f) };
                // SAFETY: the caller's contract.
                unsafe { f($($arg),*) }
            }
        )*
        #[allow(non_snake_case, reason = "named as the functions they look for")]
        mod resolvers {
            use super::*;
            $(
                $(#[$if])*
                #[cold]
                pub fn $name() -> *mut c_void {
                    const NAME: &CStr = as_c_str(concat!(stringify!($name), "\0"));
                    resolve(&slots::$name, NAME, missing::$name as *mut c_void)
                }
            )*
        }
        /// All of them.
        static WANTED: &[Wanted<'static>] = &[$(
            $(#[$if])*
            Wanted::new(as_c_str(concat!(stringify!($name), "\0")), &slots::$name)
        ),*];
        /// Fills every entry.
        pub fn resolve_all() {
            linkmap::find_all(Place::BehindUs, WANTED);
            // What is nowhere is looked for by another name, or stood in for.
            $(
                $(#[$if])*
                if slots::$name.load(Relaxed).is_null() {
                    resolvers::$name();
                }
            )*
            tables::resolve_all();
            // A program that names it has it to itself, and libc uses that, too.
            STDERR.store(linkmap::find(Place::Anywhere, c"stderr").cast(), Relaxed);
            SINGLE_THREADED.store(find(c"__libc_single_threaded").cast(), Relaxed);
            know_libc();
        }
    };
}

const fn as_c_str(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a symbol's name holds no NUL"),
    }
}

/// Looks `name` up behind us; null when there is none.
fn find(name: &CStr) -> *mut c_void {
    linkmap::find(Place::BehindUs, name)
}

/// Whether libc is musl, whose structures differ in a few places from glibc's, which are the kernel's: 0 = not looked yet.
static LIBC: AtomicU32 = AtomicU32::new(0);
const GLIBC: u32 = 1;
const MUSL: u32 = 2;

/// Whether this process has musl for its libc.
#[inline]
pub fn is_musl() -> bool {
    match LIBC.load(Relaxed) {
        0 => know_libc() == MUSL,
        libc => libc == MUSL,
    }
}

#[cold]
fn know_libc() -> u32 {
    let libc = if find(c"gnu_get_libc_version").is_null() { MUSL } else { GLIBC };
    LIBC.store(libc, Relaxed);
    libc
}

/// A length in a structure that musl declares as an int with padding beside it, of which nothing is known, where the
/// kernel and glibc have a size_t (`struct msghdr`, `struct cmsghdr`).
#[inline]
pub fn length(field: usize) -> usize {
    if is_musl() { field as c_uint as usize } else { field }
}

/// libc's own note (2.32) that the process has had one thread only so far. It errs to the safe side.
static SINGLE_THREADED: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// The application makes a thread by itself (clone(2)), of which libc does not know.
pub fn expect_threads() {
    SINGLE_THREADED.store(ptr::null_mut(), Relaxed);
}

/// Whether another thread of this process may run; one that is made by a bare system call is not seen.
#[inline(always)]
pub fn may_have_threads() -> bool {
    let single = SINGLE_THREADED.load(Relaxed);
    // SAFETY: libc's variable of that name, one byte that is there as long as libc is; libc may write it at any moment.
    single.is_null() || unsafe { single.read_volatile() } == 0
}

static STDERR: AtomicPtr<*mut FILE> = AtomicPtr::new(ptr::null_mut());

/// Where the variable of that name is, or null.
pub fn stderr() -> *const *mut FILE {
    STDERR.load(Relaxed)
}

fn resolve(slot: &AtomicPtr<c_void>, name: &CStr, otherwise: *mut c_void) -> *mut c_void {
    let mut f = find(name);
    if f.is_null() {
        f = without_64(name);
    }
    if f.is_null() {
        f = otherwise;
    }
    slot.store(f, Relaxed);
    f
}

/// The function that is the same as `name` where offsets have 64 bits anyway: musl since 1.2.4 has no other.
fn without_64(name: &CStr) -> *mut c_void {
    let mut plain = [0u8; 32];
    match name.to_bytes().strip_suffix(b"64") {
        Some(rest) if cfg!(target_pointer_width = "64") && rest.len() < plain.len() => {
            plain[..rest.len()].copy_from_slice(rest);
            CStr::from_bytes_until_nul(&plain).map_or(ptr::null_mut(), find)
        }
        _ => ptr::null_mut(),
    }
}

/// Where syscall(2) lies: it is jumped to, since its arguments cannot be named.
pub fn address_of_syscall() -> *const c_void {
    // Relaxed: see above.
    let known = slots::syscall.load(Relaxed);
    if known.is_null() { resolvers::syscall() } else { known }
}

/// Tables of libc's streams, and functions that stand in them (`api::streams`); null where this libc shows none.
macro_rules! tables {
    ($($name:ident)*) => {
        /// What libc's streams are made of.
        #[allow(non_snake_case, reason = "libc's names")]
        pub mod tables {
            use super::*;
            #[allow(non_upper_case_globals, reason = "named as what they lead to")]
            mod slots {
                use super::*;
                $(pub static $name: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());)*
            }
            $(
                /// libc's own of this name, or null.
                pub fn $name() -> *mut c_void {
                    slots::$name.load(Relaxed)
                }
            )*
            /// Fills every entry.
            pub(super) fn resolve_all() {
                $(
                    let name = const { as_c_str(concat!(stringify!($name), "\0")) };
                    slots::$name.store(find(name), Relaxed);
                )*
            }
        }
    };
}

tables! { _IO_file_jumps _IO_wfile_jumps _IO_file_read _IO_file_write _IO_file_close _IO_2_1_stdout_ _IO_2_1_stderr_ }

real! {
    socket(family: c_int, kind: c_int, protocol: c_int) -> c_int, SYS_socket;
    socketpair(family: c_int, kind: c_int, protocol: c_int, out: *mut c_int) -> c_int, SYS_socketpair;
    bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, SYS_bind;
    connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> c_int, SYS_connect;
    listen(fd: c_int, backlog: c_int) -> c_int, SYS_listen;
    accept(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, ENOSYS;
    accept4(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t, flags: c_int) -> c_int, SYS_accept4;
    shutdown(fd: c_int, how: c_int) -> c_int, SYS_shutdown;
    close(fd: c_int) -> c_int, SYS_close;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, SYS_close_range;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int,
        SYS_getsockopt;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, len: socklen_t) -> c_int,
        SYS_setsockopt;
    getsockname(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, SYS_getsockname;
    getpeername(fd: c_int, addr: *mut sockaddr, len: *mut socklen_t) -> c_int, SYS_getpeername;

    read(fd: c_int, buf: *mut c_void, len: size_t) -> ssize_t, SYS_read;
    readv(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t, SYS_readv;
    preadv64(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t) -> ssize_t, SYS_preadv;
    preadv64v2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t, SYS_preadv2;
    recv(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int) -> ssize_t, SYS_recvfrom;
    recvfrom(fd: c_int, buf: *mut c_void, len: size_t, flags: c_int, addr: *mut sockaddr,
        addr_len: *mut socklen_t) -> ssize_t, SYS_recvfrom;
    recvmsg(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t, SYS_recvmsg;
    recvmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec)
        -> c_int, SYS_recvmmsg;
    write(fd: c_int, buf: *const c_void, len: size_t) -> ssize_t, SYS_write;
    writev(fd: c_int, iov: *const iovec, count: c_int) -> ssize_t, SYS_writev;
    pwritev64(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t) -> ssize_t, SYS_pwritev;
    pwritev64v2(fd: c_int, iov: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t, SYS_pwritev2;
    send(fd: c_int, buf: *const c_void, len: size_t, flags: c_int) -> ssize_t, SYS_sendto;
    sendto(fd: c_int, buf: *const c_void, len: size_t, flags: c_int, addr: *const sockaddr,
        addr_len: socklen_t) -> ssize_t, SYS_sendto;
    sendmsg(fd: c_int, msg: *const msghdr, flags: c_int) -> ssize_t, SYS_sendmsg;
    sendmmsg(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, SYS_sendmmsg;
    sendfile64(out: c_int, from: c_int, offset: *mut off64_t, count: size_t) -> ssize_t, ENOSYS;
    #[cfg(target_pointer_width = "32")]
    sendfile(out: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t, SYS_sendfile;
    splice(from: c_int, from_off: *mut loff_t, to: c_int, to_off: *mut loff_t, len: size_t,
        flags: c_uint) -> ssize_t, SYS_splice;
    tee(from: c_int, to: c_int, len: size_t, flags: c_uint) -> ssize_t, SYS_tee;
    vmsplice(fd: c_int, iov: *const iovec, count: size_t, flags: c_uint) -> ssize_t, SYS_vmsplice;
    copy_file_range(from: c_int, from_off: *mut loff_t, to: c_int, to_off: *mut loff_t, len: size_t,
        flags: c_uint) -> ssize_t, SYS_copy_file_range;

    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, ENOSYS;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int,
        ENOSYS;
    select(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut timeval)
        -> c_int, ENOSYS;
    pselect(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const timespec,
        mask: *const sigset_t) -> c_int, ENOSYS;
    epoll_create(size: c_int) -> c_int, ENOSYS;
    epoll_create1(flags: c_int) -> c_int, SYS_epoll_create1;
    epoll_ctl(epfd: c_int, op: c_int, fd: c_int, event: *mut epoll_event) -> c_int, SYS_epoll_ctl;
    epoll_wait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int) -> c_int, ENOSYS;
    epoll_pwait(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: c_int,
        mask: *const sigset_t) -> c_int, ENOSYS;
    epoll_pwait2(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const timespec,
        mask: *const sigset_t) -> c_int, SYS_epoll_pwait2;

    fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int, SYS_fcntl;
    #[cfg(target_pointer_width = "32")]
    fcntl64(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int, SYS_fcntl64;
    ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int, SYS_ioctl;
    prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int, SYS_prctl;
    dup(fd: c_int) -> c_int, SYS_dup;
    dup2(old: c_int, new: c_int) -> c_int, ENOSYS;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int, SYS_dup3;
    fork() -> pid_t, ENOSYS;
    __register_atfork(prepare: *mut c_void, parent: *mut c_void, child: *mut c_void,
        library: *mut c_void) -> c_int, ENOSYS;
    // musl's only; see `fork::register`.
    pthread_atfork(prepare: *mut c_void, parent: *mut c_void, child: *mut c_void) -> c_int, ENOSYS;
    clone(start: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void, parent_tid: c_ulong,
        tls: c_ulong, child_tid: c_ulong) -> c_int, ENOSYS;
    _Fork() -> pid_t, ENOSYS;
    execve(path: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int, SYS_execve;
    execv(path: *const c_char, argv: *const *const c_char) -> c_int, ENOSYS;
    execvp(file: *const c_char, argv: *const *const c_char) -> c_int, ENOSYS;
    execvpe(file: *const c_char, argv: *const *const c_char, env: *const *const c_char) -> c_int, ENOSYS;
    fexecve(fd: c_int, argv: *const *const c_char, env: *const *const c_char) -> c_int, ENOSYS;
    execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, env: *const *const c_char,
        flags: c_int) -> c_int, SYS_execveat;
    // Does not return.
    _exit(status: c_int) -> c_int, SYS_exit_group;
    daemon(nochdir: c_int, noclose: c_int) -> c_int, ENOSYS;
    unshare(flags: c_int) -> c_int, SYS_unshare;
    setns(fd: c_int, kind: c_int) -> c_int, SYS_setns;
    fdopen(fd: c_int, mode: *const c_char) -> *mut FILE, ENOSYS;
    perror(what: *const c_char) -> (), ENOSYS;
    fputs(text: *const c_char, stream: *mut FILE) -> c_int, ENOSYS;
    __xpg_strerror_r(code: c_int, text: *mut c_char, room: size_t) -> c_int, ENOSYS;
    fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE, ENOSYS;
    freopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE, ENOSYS;
    freopen64(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE, ENOSYS;
    fclose(stream: *mut FILE) -> c_int, ENOSYS;
    fflush(stream: *mut FILE) -> c_int, ENOSYS;
    fileno(stream: *mut FILE) -> c_int, ENOSYS;
    vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int, ENOSYS;
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int, ENOSYS;
    vfprintf(stream: *mut FILE, format: *const c_char, list: *mut c_void) -> c_int, ENOSYS;
    __vfprintf_chk(stream: *mut FILE, flag: c_int, format: *const c_char, list: *mut c_void) -> c_int,
        ENOSYS;
    aio_read(control: *mut aiocb) -> c_int, ENOSYS;
    aio_read64(control: *mut aiocb) -> c_int, ENOSYS;
    aio_write(control: *mut aiocb) -> c_int, ENOSYS;
    aio_write64(control: *mut aiocb) -> c_int, ENOSYS;
    lio_listio(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int, ENOSYS;
    lio_listio64(mode: c_int, list: *const *mut aiocb, count: c_int, event: *mut sigevent) -> c_int, ENOSYS;
    // Returns nothing.
    backtrace_symbols_fd(addresses: *const *mut c_void, count: c_int, fd: c_int) -> c_int, ENOSYS;
    // The lock of all streams; they return nothing.
    _IO_list_lock() -> c_int, ENOSYS;
    _IO_list_unlock() -> c_int, ENOSYS;
    _IO_list_resetlock() -> c_int, ENOSYS;
    syscall(nr: c_long, a: c_long, b: c_long, c: c_long, d: c_long, e: c_long, f: c_long) -> c_long,
        ENOSYS;

    sigaction(signal: c_int, new: *const Sigaction, old: *mut Sigaction) -> c_int, ENOSYS;
    signal(number: c_int, handler: sighandler_t) -> sighandler_t, ENOSYS;
    sysv_signal(number: c_int, handler: sighandler_t) -> sighandler_t, ENOSYS;
    siginterrupt(number: c_int, flag: c_int) -> c_int, ENOSYS;

    open(path: *const c_char, flags: c_int, mode: c_uint) -> c_int, ENOSYS;
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int, SYS_openat;
    creat(path: *const c_char, mode: c_uint) -> c_int, ENOSYS;
    open_by_handle_at(mount: c_int, handle: *mut c_void, flags: c_int) -> c_int, SYS_open_by_handle_at;
    mkstemp(template: *mut c_char) -> c_int, ENOSYS;
    mkostemp(template: *mut c_char, flags: c_int) -> c_int, ENOSYS;
    mkstemps(template: *mut c_char, suffix: c_int) -> c_int, ENOSYS;
    mkostemps(template: *mut c_char, suffix: c_int, flags: c_int) -> c_int, ENOSYS;
    pipe(out: *mut c_int) -> c_int, ENOSYS;
    pipe2(out: *mut c_int, flags: c_int) -> c_int, SYS_pipe2;
    eventfd(value: c_uint, flags: c_int) -> c_int, SYS_eventfd2;
    timerfd_create(clock: c_int, flags: c_int) -> c_int, SYS_timerfd_create;
    signalfd(fd: c_int, mask: *const sigset_t, flags: c_int) -> c_int, ENOSYS;
    inotify_init() -> c_int, ENOSYS;
    inotify_init1(flags: c_int) -> c_int, SYS_inotify_init1;
    fanotify_init(flags: c_uint, event_flags: c_uint) -> c_int, SYS_fanotify_init;
    memfd_create(name: *const c_char, flags: c_uint) -> c_int, SYS_memfd_create;
    pidfd_open(pid: pid_t, flags: c_uint) -> c_int, SYS_pidfd_open;
    pidfd_getfd(pidfd: c_int, fd: c_int, flags: c_uint) -> c_int, SYS_pidfd_getfd;
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char)
        -> c_int, ENOSYS;
    posix_spawnp(pid: *mut pid_t, file: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char)
        -> c_int, ENOSYS;
    pidfd_spawn(pidfd: *mut c_int, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char)
        -> c_int, ENOSYS;
    pidfd_spawnp(pidfd: *mut c_int, file: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, argv: *const *mut c_char, env: *const *mut c_char)
        -> c_int, ENOSYS;
    popen(command: *const c_char, mode: *const c_char) -> *mut FILE, ENOSYS;
    system(command: *const c_char) -> c_int, ENOSYS;
    // See `spawn`.
    posix_spawn_file_actions_init(actions: *mut posix_spawn_file_actions_t) -> c_int, ENOSYS;
    posix_spawn_file_actions_destroy(actions: *mut posix_spawn_file_actions_t) -> c_int, ENOSYS;
    posix_spawn_file_actions_addclose(actions: *mut posix_spawn_file_actions_t, fd: c_int) -> c_int, ENOSYS;
    posix_spawn_file_actions_adddup2(actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int)
        -> c_int, ENOSYS;
    posix_spawn_file_actions_addopen(actions: *mut posix_spawn_file_actions_t, fd: c_int, path: *const c_char,
        flags: c_int, mode: c_uint) -> c_int, ENOSYS;
    posix_spawn_file_actions_addclosefrom_np(actions: *mut posix_spawn_file_actions_t, first: c_int) -> c_int,
        ENOSYS;

    // With 64 bits of time.
    #[cfg(target_pointer_width = "32")]
    __recvmsg64(fd: c_int, msg: *mut msghdr, flags: c_int) -> ssize_t, ENOSYS;
    #[cfg(target_pointer_width = "32")]
    __recvmmsg64(fd: c_int, msgs: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut Timespec64) -> c_int,
        ENOSYS;
    #[cfg(target_pointer_width = "32")]
    __ppoll64(fds: *mut pollfd, count: nfds_t, timeout: *const Timespec64, mask: *const sigset_t) -> c_int,
        ENOSYS;
    #[cfg(target_pointer_width = "32")]
    __select64(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *mut Timeval64) -> c_int,
        ENOSYS;
    #[cfg(target_pointer_width = "32")]
    __pselect64(count: c_int, r: *mut fd_set, w: *mut fd_set, x: *mut fd_set, timeout: *const Timespec64,
        mask: *const sigset_t) -> c_int, ENOSYS;
    #[cfg(target_pointer_width = "32")]
    __epoll_pwait2_time64(epfd: c_int, events: *mut epoll_event, max: c_int, timeout: *const Timespec64,
        mask: *const sigset_t) -> c_int, ENOSYS;
    // See `unwind`; what they return is nothing. A program without libpthread (glibc before 2.34) cannot cancel a thread.
    _pthread_cleanup_push(buffer: *mut c_void, routine: *mut c_void, arg: *mut c_void) -> c_int, NOTHING;
    _pthread_cleanup_pop(buffer: *mut c_void, execute: c_int) -> c_int, NOTHING;
    pthread_testcancel() -> c_int, NOTHING;
    pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int, NOTHING;
    // See `host/own_word.rs`. Without libpthread there are none.
    pthread_mutexattr_init(kind: *mut pthread_mutexattr_t) -> c_int, ENOSYS;
    pthread_mutexattr_setrobust(kind: *mut pthread_mutexattr_t, robust: c_int) -> c_int, ENOSYS;
    pthread_mutexattr_setpshared(kind: *mut pthread_mutexattr_t, shared: c_int) -> c_int, ENOSYS;
    pthread_mutex_init(mutex: *mut pthread_mutex_t, kind: *const pthread_mutexattr_t) -> c_int, ENOSYS;
    pthread_mutex_trylock(mutex: *mut pthread_mutex_t) -> c_int, ENOSYS;
    pthread_mutex_consistent(mutex: *mut pthread_mutex_t) -> c_int, ENOSYS;

    // Reached only when their check has failed: they end the program as libc ends it.
    __read_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t) -> ssize_t, ENOSYS;
    __recv_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int) -> ssize_t, ENOSYS;
    __recvfrom_chk(fd: c_int, buf: *mut c_void, len: size_t, size: size_t, flags: c_int,
        addr: *mut sockaddr, addr_len: *mut socklen_t) -> ssize_t, ENOSYS;
    __poll_chk(fds: *mut pollfd, count: nfds_t, timeout: c_int, size: size_t) -> c_int, ENOSYS;
    __ppoll_chk(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t,
        size: size_t) -> c_int, ENOSYS;
    __open_2(path: *const c_char, flags: c_int) -> c_int, ENOSYS;
    __open64_2(path: *const c_char, flags: c_int) -> c_int, ENOSYS;
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int, ENOSYS;
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int, ENOSYS;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_symbol_is_the_system_call() {
        assert_eq!(missing::close(-1), -1);
        assert_eq!(crate::os::errno::errno(), libc::EBADF);
        let fd = missing::memfd_create(c"test".as_ptr(), 0);
        assert!(fd >= 0);
        assert_eq!(missing::write(fd, c"bytes".as_ptr().cast(), 5), 5);
        let mut buf = [0u8; 8];
        let iov = iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: 8 };
        assert_eq!(missing::preadv64(fd, &raw const iov, 1, 1), 4);
        assert_eq!(&buf[..4], b"ytes");
        assert_eq!(missing::preadv64v2(fd, &raw const iov, 1, 2, 0), 3);
        assert_eq!(&buf[..3], b"tes");
        assert_eq!(missing::pwritev64v2(fd, &raw const iov, 1, 1 << 33, 0), 8);
        assert_eq!(missing::preadv64v2(fd, &raw const iov, 1, (1 << 33) + 5, 0), 3);
        assert_eq!(missing::close(fd), 0);
    }

    #[test]
    fn a_missing_symbol_without_a_call_fails_in_its_own_way() {
        assert!(missing::fdopen(0, c"r".as_ptr()).is_null());
        assert_eq!(crate::os::errno::errno(), libc::ENOSYS);
        assert_eq!(missing::signal(1, libc::SIG_DFL), libc::SIG_ERR);
        assert_eq!(missing::daemon(0, 0), -1);
    }

    #[test]
    fn a_failed_look_up_leaves_no_trace() {
        let (slot, otherwise) = (AtomicPtr::new(ptr::null_mut()), &raw const ERRNO as *mut c_void);
        static ERRNO: c_int = 7;
        crate::os::errno::set_errno(ERRNO);
        assert_eq!(resolve(&slot, c"usmc_no_such_symbol", otherwise), otherwise);
        assert_eq!(slot.load(Relaxed), otherwise);
        assert_eq!(crate::os::errno::errno(), ERRNO);
    }

    #[test]
    fn what_a_libc_has_without_64_alone_is_found() {
        assert_eq!(without_64(c"usmc_no_such_symbol64"), ptr::null_mut());
        assert_eq!(without_64(c"sendfile"), ptr::null_mut());
        let is_one = cfg!(target_pointer_width = "64");
        assert_eq!(without_64(c"fdopen64"), if is_one { find(c"fdopen") } else { ptr::null_mut() });
    }

    #[test]
    fn what_does_nothing_leaves_errno_alone() {
        crate::os::errno::set_errno(libc::E2BIG);
        assert_eq!(missing::_pthread_cleanup_pop(ptr::null_mut(), 0), 0);
        assert_eq!(crate::os::errno::errno(), libc::E2BIG);
    }

    #[test]
    fn what_is_found_is_called() {
        resolve_all();
        // SAFETY: no pointers.
        assert_eq!(unsafe { close(-1) }, -1);
        assert_eq!(crate::os::errno::errno(), libc::EBADF);
        let found = slots::close.load(Relaxed);
        assert!(!found.is_null() && found != missing::close as *mut c_void);
    }
}
