//! The calls that make, duplicate, flag and close descriptors.

use core::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void};
use libc::{pid_t, sigset_t};

use super::{after, aio, apart, fail, is_readable};
use crate::os::reason::Reason;
use crate::os::table::{self, Entry};
use crate::os::unwind::{cancellation_point, keeping};
use crate::os::{errno, real};
use crate::record::kernel;
use crate::socket::{close as closing, control, leave_all};
use crate::watchers::set;

/// close(2)
pub unsafe fn close(fd: c_int) -> c_int {
    if table::settled(fd) != Entry::Foreign {
        // What is cancelled has closed nothing.
        cancellation_point();
        if !apart(|| closing::closing(fd)) {
            // To the application this number is not open.
            return fail::<i32>(libc::EBADF);
        }
        // SAFETY: no pointers.
        return keeping(Changing(fd), || unsafe { real::close(fd) }).1;
    }
    // SAFETY: no pointers.
    unsafe { real::close(fd) }
}

/// A number that the real call is about to close.
struct Changing(c_int);

impl Drop for Changing {
    fn drop(&mut self) {
        table::changed(self.0);
    }
}

/// close_range(2)
pub unsafe fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    const CLOSE_RANGE_UNSHARE: c_int = 2;
    // CLOSE_RANGE_CLOEXEC closes nothing yet, and the kernel refuses others.
    let closes = flags & !CLOSE_RANGE_UNSHARE == 0;
    if first > last || !closes || crate::os::process::is_foreign_child() {
        // SAFETY: no pointers.
        return unsafe { real::close_range(first, last, flags) };
    }
    if flags & CLOSE_RANGE_UNSHARE != 0
        && let Err(errno) = leave_all::parts_with_files()
    {
        return fail(errno);
    }
    let errno = errno::keep();
    let mut from = first;
    let mut done = 0;
    table::for_each(first, last, |fd, entry| {
        if entry == Entry::Internal {
            // Around ours.
            if fd as c_uint > from {
                // SAFETY: no pointers.
                done |= unsafe { real::close_range(from, fd as c_uint - 1, flags) };
            }
            from = fd as c_uint + 1;
        } else {
            closing::closing(fd);
        }
    });
    drop(errno);
    if from <= last {
        // SAFETY: no pointers.
        done |= unsafe { real::close_range(from, last, flags) };
    }
    table::changed_all(first, last);
    done
}

/// closefrom(3)
pub unsafe fn closefrom(first: c_int) {
    // SAFETY: no pointers.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// dup(2)
pub unsafe fn dup(fd: c_int) -> c_int {
    // SAFETY: no pointers.
    after(unsafe { real::dup(fd) }, |&new| {
        if new >= 0 {
            control::fresh(new);
            control::duplicated(fd, new);
        }
    })
}

/// Says whether `new` may be overwritten, ending what it was. [`overwritten`] comes behind the real call.
fn overwrite(old: c_int, new: c_int) -> bool {
    if old == new {
        return true;
    }
    if table::settled(new) == Entry::Foreign {
        if table::settled(old) != Entry::Foreign {
            // Others must not use it before we know it.
            table::change(new);
        }
        return true;
    }
    // An invalid `old` must leave `new` alone, and so must a number that is not allowed any more.
    if crate::os::sys::fcntl(old, libc::F_GETFD, 0).is_err()
        || new as u64 >= crate::os::sys::nofile_limit()
    {
        return true;
    }
    closing::closing(new)
}

/// `done` is what dup2(2) or dup3(2) has returned.
fn overwritten(old: c_int, new: c_int, done: c_int) {
    if done >= 0 && old != new {
        control::duplicated(old, new);
    } else {
        table::changed(new);
    }
}

/// dup2(2)
pub unsafe fn dup2(old: c_int, new: c_int) -> c_int {
    if !overwrite(old, new) {
        return fail::<i32>(libc::EBUSY);
    }
    // SAFETY: no pointers.
    after(unsafe { real::dup2(old, new) }, |&done| overwritten(old, new, done))
}

/// dup3(2)
pub unsafe fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if old != new && flags & !libc::O_CLOEXEC == 0 && !overwrite(old, new) {
        return fail::<i32>(libc::EBUSY);
    }
    // SAFETY: no pointers.
    after(unsafe { real::dup3(old, new, flags) }, |&done| overwritten(old, new, done))
}

/// Before O_ASYNC is set: its signals come from the kernel, for what the kernel sees.
fn signals(fd: c_int) -> Result<(), c_int> {
    apart(|| control::signals(fd))
}

/// fcntl(2); `arg` is whatever the command takes.
pub unsafe fn fcntl(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int {
    // SAFETY: the caller's contract.
    controlled(fd, cmd, arg, || unsafe { real::fcntl(fd, cmd, arg) })
}

/// fcntl64(2), whose locks have 64-bit offsets
#[cfg(target_pointer_width = "64")]
pub use fcntl as fcntl64;

/// fcntl64(2), whose locks have 64-bit offsets
#[cfg(target_pointer_width = "32")]
pub unsafe fn fcntl64(fd: c_int, cmd: c_int, arg: c_ulong) -> c_int {
    // SAFETY: the caller's contract.
    controlled(fd, cmd, arg, || unsafe { real::fcntl64(fd, cmd, arg) })
}

/// fcntl(2) by one of its two numbers, without what libc makes of its arguments
#[cfg(target_pointer_width = "32")]
pub unsafe fn fcntl_by_number(nr: c_long, fd: c_int, cmd: c_int, arg: c_ulong) -> c_int {
    // SAFETY: the caller's contract.
    let call = || unsafe { real::syscall(nr, fd as _, cmd as _, arg as _, 0, 0, 0) } as c_int;
    controlled(fd, cmd, arg, call)
}

/// fcntl(2), by `call`.
fn controlled(fd: c_int, cmd: c_int, arg: c_ulong, call: impl FnOnce() -> c_int) -> c_int {
    if cmd == libc::F_SETFL
        && arg as c_int & libc::O_ASYNC != 0
        && let Err(code) = signals(fd)
    {
        return fail::<i32>(code);
    }
    after(call(), |&done| match cmd {
        libc::F_DUPFD | libc::F_DUPFD_CLOEXEC if done >= 0 => {
            control::fresh(done);
            control::duplicated(fd, done);
        }
        libc::F_SETFL if done == 0 => {
            control::nonblocking(fd, arg as c_int & libc::O_NONBLOCK != 0)
        }
        _ => {}
    })
}

/// ioctl(2); `arg` is whatever the request takes.
pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: c_ulong) -> c_int {
    if request == libc::FIOASYNC
        && is_readable(arg as *const c_int)
        // SAFETY: the caller's contract.
        && unsafe { *(arg as *const c_int) } != 0
        && let Err(code) = signals(fd)
    {
        return fail::<i32>(code);
    }
    // SAFETY: the caller's contract.
    if let Err(code) = unsafe { aio::leave_to_request(fd, request, arg) } {
        return fail::<i32>(code);
    }
    let before_mark = request == kernel::SIOCATMARK && !apart(|| control::knows_mark(fd));
    // SAFETY: the caller's contract.
    let done = unsafe { real::ioctl(fd, request, arg) };
    if done == 0 && matches!(table::settled(fd), Entry::Conn(_)) {
        let value = arg as *mut c_int;
        if request == libc::FIONBIO {
            // SAFETY: the kernel has just read an int there.
            control::nonblocking(fd, unsafe { *value } != 0);
        } else if request == libc::FIONREAD
            && let Some(n) = control::unread(fd)
        {
            // SAFETY: the kernel has just written an int there.
            unsafe { *value = n };
        } else if request == libc::TIOCOUTQ
            && let Some(n) = control::unsent(fd)
        {
            // SAFETY: as above.
            unsafe { *value += n };
        } else if before_mark {
            // SAFETY: as above.
            unsafe { *value = 0 };
        }
    }
    done
}

/// sockatmark(3): libc's asks the kernel by itself.
pub unsafe fn sockatmark(fd: c_int) -> c_int {
    let mut mark: c_int = 0;
    // SAFETY: an int on our stack.
    match unsafe { ioctl(fd, kernel::SIOCATMARK, &raw mut mark as c_ulong) } {
        0 => mark,
        failed => failed,
    }
}

macro_rules! fresh_fd {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*);)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the caller's contract.
            after(unsafe { real::$name($($arg),*) }, |&fd| control::fresh(fd))
        }
    )* };
}

fresh_fd! {
    /// open(2)
    open(path: *const c_char, flags: c_int, mode: c_uint);
    /// openat(2)
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint);
    /// creat(2)
    creat(path: *const c_char, mode: c_uint);
    /// eventfd(2)
    eventfd(value: c_uint, flags: c_int);
    /// timerfd_create(2)
    timerfd_create(clock: c_int, flags: c_int);
    /// signalfd(2)
    signalfd(fd: c_int, mask: *const sigset_t, flags: c_int);
    /// inotify_init(2)
    inotify_init();
    /// inotify_init1(2)
    inotify_init1(flags: c_int);
    /// memfd_create(2)
    memfd_create(name: *const c_char, flags: c_uint);
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

/// `name(args) = other(args);`: with O_LARGEFILE, which means something on 32-bit machines only.
macro_rules! large {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) = $other:ident($($given:expr),*);)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the caller's contract.
            unsafe { $other($($given),*) }
        }
    )* };
}

const LARGE: c_int = libc::O_LARGEFILE;

large! {
    /// open64(2)
    open64(path: *const c_char, flags: c_int, mode: c_uint) = open(path, flags | LARGE, mode);
    /// openat64(2)
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: c_uint) = openat(dir, path, flags | LARGE, mode);
    /// creat64(2)
    creat64(path: *const c_char, mode: c_uint) = open64(path, libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC, mode);
    /// mkstemp64(3)
    mkstemp64(template: *mut c_char) = mkostemp(template, LARGE);
    /// mkostemp64(3)
    mkostemp64(template: *mut c_char, flags: c_int) = mkostemp(template, flags | LARGE);
    /// mkstemps64(3)
    mkstemps64(template: *mut c_char, suffix: c_int) = mkostemps(template, suffix, LARGE);
    /// mkostemps64(3)
    mkostemps64(template: *mut c_char, suffix: c_int, flags: c_int) = mkostemps(template, suffix, flags | LARGE);
}

/// pipe(2)
pub unsafe fn pipe(out: *mut c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { pipe2(out, 0) }
}

/// pipe2(2)
pub unsafe fn pipe2(out: *mut c_int, flags: c_int) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { fresh_pair(out, real::pipe2(out, flags)) }
}

/// A call that was to make two descriptors has returned `done`.
///
/// # Safety
/// `out` is what the call was given to fill in.
pub(super) unsafe fn fresh_pair(out: *const c_int, done: c_int) -> c_int {
    after(done, |&done| {
        if done == 0 {
            // SAFETY: the caller's contract.
            let pair = unsafe { [*out, *out.add(1)] };
            pair.into_iter().for_each(control::fresh);
        }
    })
}

calls! {
    /// epoll_create(2)
    epoll_create(size: c_int) -> c_int |kernel()| after(kernel(), |&fd| made_set(fd));
    /// epoll_create1(2)
    epoll_create1(flags: c_int) -> c_int |kernel()| after(kernel(), |&fd| made_set(fd));
}

fn made_set(fd: c_int) {
    if fd >= 0 {
        control::fresh(fd);
        set::created(fd);
    }
}

/// What cannot leave the ring any more goes wrong at its next call that is not the program's own.
fn sandboxed() {
    if leave_all::begins(Reason::Sandboxed).is_err() {
        crate::os::log::warn(format_args!(
            "a seccomp filter comes, and connections are still in the ring"
        ));
    }
}

/// prctl(2)
pub unsafe fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    // A null filter asks whether filters exist.
    let filters = a == libc::SECCOMP_MODE_FILTER as c_ulong && b != 0;
    if option == libc::PR_SET_SECCOMP && (filters || a == libc::SECCOMP_MODE_STRICT as c_ulong) {
        sandboxed();
    }
    // SAFETY: the caller's contract.
    unsafe { real::prctl(option, a, b, c, d) }
}

/// syscall(2): the calls above, made by number.
pub unsafe fn syscall(
    nr: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let fd = a as c_int;
    // SAFETY: the caller's contract; each call has its own arguments in these positions.
    unsafe {
        match nr {
            libc::SYS_read => super::read(fd, b as _, c as _) as c_long,
            libc::SYS_write => super::write(fd, b as _, c as _) as c_long,
            libc::SYS_readv => super::readv(fd, b as _, c as _) as c_long,
            libc::SYS_writev => super::writev(fd, b as _, c as _) as c_long,
            libc::SYS_recvfrom if e == 0 => super::recv(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_recvfrom => {
                super::recvfrom(fd, b as _, c as _, d as _, e as _, f as _) as c_long
            }
            libc::SYS_sendto => super::sendto(fd, b as _, c as _, d as _, e as _, f as _) as c_long,
            libc::SYS_recvmsg => super::recvmsg(fd, b as _, c as _) as c_long,
            libc::SYS_sendmsg => super::sendmsg(fd, b as _, c as _) as c_long,
            libc::SYS_socket => super::socket(fd, b as _, c as _) as c_long,
            libc::SYS_connect => super::connect(fd, b as _, c as _) as c_long,
            libc::SYS_listen => super::listen(fd, b as _) as c_long,
            libc::SYS_accept4 => super::accept4(fd, b as _, c as _, d as _) as c_long,
            #[cfg(target_arch = "x86_64")]
            libc::SYS_accept => super::accept(fd, b as _, c as _) as c_long,
            libc::SYS_shutdown => super::shutdown(fd, b as _) as c_long,
            libc::SYS_close => close(fd) as c_long,
            libc::SYS_close_range => close_range(a as _, b as _, c as _) as c_long,
            libc::SYS_dup => dup(fd) as c_long,
            #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
            libc::SYS_dup2 => dup2(fd, b as _) as c_long,
            libc::SYS_dup3 => dup3(fd, b as _, c as _) as c_long,
            libc::SYS_fcntl => fcntl(fd, b as _, c as _) as c_long,
            libc::SYS_ioctl => ioctl(fd, b as _, c as _) as c_long,
            libc::SYS_epoll_create1 => epoll_create1(fd) as c_long,
            libc::SYS_epoll_ctl => super::epoll_ctl(fd, b as _, c as _, d as _) as c_long,
            libc::SYS_epoll_pwait if e == 0 => {
                super::epoll_pwait(fd, b as _, c as _, d as _, core::ptr::null()) as c_long
            }
            libc::SYS_prctl => prctl(a as _, b as _, c as _, d as _, e as _) as c_long,
            libc::SYS_seccomp => {
                const STRICT: c_long = libc::SECCOMP_SET_MODE_STRICT as c_long;
                const FILTER: c_long = libc::SECCOMP_SET_MODE_FILTER as c_long;
                if a == STRICT || (a == FILTER && c != 0) {
                    sandboxed();
                }
                real::syscall(nr, a, b, c, d, e, f)
            }
            libc::SYS_io_submit => super::io_submit_by_number(a, b, c as _),
            libc::SYS_io_uring_setup => super::uring::io_uring_setup_by_number(a, b as _),
            libc::SYS_io_uring_enter => super::uring::io_uring_enter_by_number(a, b, c, d, e, f),
            libc::SYS_io_uring_register => super::uring::io_uring_register_by_number(a, b, c, d),
            _ => real::syscall(nr, a, b, c, d, e, f),
        }
    }
}
