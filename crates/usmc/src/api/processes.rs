//! The calls that make processes. libc's fork(3) tells us by itself ([`crate::across::fork::register`]), wherever it is
//! called from.

use core::ffi::{CStr, c_char, c_int, c_long, c_ulong, c_void};
use libc::pid_t;

use super::{after, apart, fail};
use crate::across::{exec, fork as forking};
use crate::os::reason::Reason;
use crate::os::{process, real, sys, table};
use crate::socket::{control, leave_all};

/// What pthread_atfork(3) calls: our own handlers have to be there before anybody's.
///
/// # Safety
/// As the function itself.
pub unsafe fn register_atfork(
    prepare: *mut c_void,
    parent: *mut c_void,
    child: *mut c_void,
    library: *mut c_void,
) -> c_int {
    forking::register();
    // SAFETY: the caller's contract.
    unsafe { real::__register_atfork(prepare, parent, child, library) }
}

/// pthread_atfork(3) where it is libc's
///
/// # Safety
/// As the function itself.
pub unsafe fn atfork(prepare: *mut c_void, parent: *mut c_void, child: *mut c_void) -> c_int {
    forking::register();
    // SAFETY: the caller's contract.
    unsafe { forking::have_called(prepare, parent, child) }
}

/// _Fork(3): fork that calls no handler of pthread_atfork(3)
pub unsafe fn fork_without_handlers() -> pid_t {
    // SAFETY: no pointers.
    forking::around(|| unsafe { real::_Fork() })
}

/// vfork(2): as fork, and the parent waits until the child has executed or ended, as programs rely on.
/// The child's memory is its own, which POSIX allows.
pub unsafe fn vfork() -> pid_t {
    let mut ends = [-1 as c_int; 2];
    // SAFETY: two ints.
    let piped = unsafe { real::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } == 0;
    // SAFETY: no pointers.
    let pid = unsafe { real::fork() };
    if !piped {
        return pid;
    }
    if pid == 0 {
        crate::os::sys::close(ends[0]);
        // The write end stays until exec or exit, out of the way of the numbers the child arranges.
        let _ = table::keep_fd(ends[1]);
        return 0;
    }
    after(pid, |&pid| {
        crate::os::sys::close(ends[1]);
        if pid > 0 {
            let mut byte = 0u8;
            // SAFETY: one writable byte.
            while unsafe { crate::os::sys::read(ends[0], (&raw mut byte).cast(), 1) }
                == Err(libc::EINTR)
            {}
        }
        crate::os::sys::close(ends[0]);
    })
}

/// Where the child of a clone(3) begins.
struct Start {
    function: extern "C" fn(*mut c_void) -> c_int,
    arg: *mut c_void,
}

extern "C" fn started(start: *mut c_void) -> c_int {
    forking::cloned();
    // SAFETY: `clone` below passed a `Start` in its frame, of which the child has a copy of its own.
    let start = unsafe { &*start.cast::<Start>() };
    (start.function)(start.arg)
}

/// clone(2), libc's function, with a stack for the child.
pub unsafe fn clone(
    function: *mut c_void,
    stack: *mut c_void,
    flags: c_int,
    arg: *mut c_void,
    parent_tid: c_ulong,
    tls: c_ulong,
    child_tid: c_ulong,
) -> c_int {
    process::clones(flags as u64);
    const KINDS: c_int = libc::CLONE_THREAD | libc::CLONE_FILES;
    if flags & KINDS == libc::CLONE_THREAD
        && let Err(errno) = leave_all::begins(Reason::OwnFiles)
    {
        return fail(errno);
    }
    if flags & libc::CLONE_VM != 0
        || function.is_null()
        || stack.is_null()
        || process::is_foreign_child()
    {
        // A thread, or nothing at all.
        // SAFETY: the caller's contract.
        return unsafe { real::clone(function, stack, flags, arg, parent_tid, tls, child_tid) };
    }
    // SAFETY: the caller's contract.
    let function = unsafe {
        core::mem::transmute::<*mut c_void, extern "C" fn(*mut c_void) -> c_int>(function)
    };
    let mut start = Start { function, arg };
    forking::around(|| {
        let (started, start) = (started as *mut c_void, (&raw mut start).cast());
        // SAFETY: the caller's contract; the child copies this frame with all memory.
        unsafe { real::clone(started, stack, flags, start, parent_tid, tls, child_tid) }
    })
}

/// Whether a system call that is about to be made makes a process with a memory of its own that goes on where its parent is.
///
/// # Safety
/// The arguments are those of system call `nr`.
pub unsafe fn is_fork(nr: c_long, a: c_long, b: c_long) -> bool {
    const SMALLEST_CLONE_ARGS: c_long = 64;
    let (flags, stack) = match nr {
        libc::SYS_clone => (a as u64, b as u64),
        libc::SYS_clone3 if a as usize >= 4096 && b >= SMALLEST_CLONE_ARGS => {
            // SAFETY: `struct clone_args` is made of 64-bit words, at least 8 of them by its size.
            unsafe { (*(a as *const u64), *(a as *const u64).add(5)) }
        }
        #[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
        libc::SYS_fork => (0, 0),
        _ => return false,
    };
    process::clones(flags);
    flags & libc::CLONE_VM as u64 == 0 && stack == 0
}

/// A system call for which [`is_fork`] is true.
///
/// # Safety
/// As the system call itself.
pub unsafe fn fork_by_number(
    nr: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
) -> c_long {
    // SAFETY: the caller's contract.
    forking::around(|| unsafe { real::syscall(nr, a, b, c, d, e, 0) } as pid_t) as c_long
}

/// Namespaces of process ids and users: in others, others have them.
const NAMESPACES: c_int = libc::CLONE_NEWPID | libc::CLONE_NEWUSER;

/// unshare(2)
pub unsafe fn unshare(flags: c_int) -> c_int {
    if flags & libc::CLONE_FILES != 0
        && let Err(errno) = leave_all::parts_with_files()
    {
        return fail(errno);
    }
    process::clones((flags & NAMESPACES) as u64);
    // SAFETY: no pointers.
    unsafe { real::unshare(flags) }
}

/// setns(2)
pub unsafe fn setns(fd: c_int, kind: c_int) -> c_int {
    // 0: whatever the descriptor is.
    let kinds = if kind == 0 { NAMESPACES } else { kind & NAMESPACES };
    process::clones(kinds as u64);
    // SAFETY: no pointers.
    unsafe { real::setns(fd, kind) }
}

/// daemon(3)
pub unsafe fn daemon(nochdir: c_int, noclose: c_int) -> c_int {
    // SAFETY: no pointers.
    let done = forking::parent_ends(|| unsafe { real::daemon(nochdir, noclose) });
    after(done, |&done| {
        if done == 0 && noclose == 0 {
            // Overwritten inside libc.
            (0..=2).for_each(control::fresh);
        }
    })
}

/// _exit(2)
pub unsafe fn exit_now(status: c_int) {
    exec::end();
    // SAFETY: no pointers.
    unsafe { real::_exit(status) };
}

/// Runs a call that returns only when it fails.
fn exec(call: impl FnOnce() -> c_int) -> c_int {
    if let Err(code) = apart(exec::before_exec) {
        return fail(code);
    }
    after(call(), |_| exec::after_failed_exec())
}

/// Whether there is a program of that name: a search along a path fails often.
///
/// # Safety
/// A string, or null.
unsafe fn is_program(path: *const c_char) -> bool {
    // SAFETY: the caller's contract.
    !path.is_null() && sys::is_executable(unsafe { CStr::from_ptr(path) })
}

type Strings = *const *const c_char;

calls! {
    /// execve(2)
    execve(path: *const c_char, argv: Strings, env: Strings) -> c_int
        |kernel()| if is_program(path) { exec(kernel) } else { kernel() };
    /// execv(3)
    execv(path: *const c_char, argv: Strings) -> c_int
        |kernel()| if is_program(path) { exec(kernel) } else { kernel() };
    /// execvp(3)
    execvp(file: *const c_char, argv: Strings) -> c_int |kernel()| exec(kernel);
    /// execvpe(3)
    execvpe(file: *const c_char, argv: Strings, env: Strings) -> c_int |kernel()| exec(kernel);
    /// fexecve(3)
    fexecve(fd: c_int, argv: Strings, env: Strings) -> c_int |kernel()| exec(kernel);
    /// execveat(2)
    execveat(dir: c_int, path: *const c_char, argv: Strings, env: Strings, flags: c_int) -> c_int
        |kernel()| exec(kernel);
}

/// A `va_list` (System V ABI, x86-64, 3.5.7) of which pointers are taken.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
#[derive(Clone, Copy)]
struct Arguments {
    integers_at: u32,
    vectors_at: u32,
    on_stack: *const *const c_char,
    registers: *const u8,
}

#[cfg(target_arch = "x86_64")]
impl Arguments {
    /// # Safety
    /// `list` is a `va_list`.
    unsafe fn of(list: *mut c_void) -> Arguments {
        // SAFETY: it is passed as its address.
        unsafe { *list.cast::<Arguments>() }
    }

    /// # Safety
    /// There is a further argument, and it is a pointer.
    unsafe fn next(&mut self) -> *const c_char {
        // SAFETY: six registers are saved in words, the rest lies on the stack.
        unsafe {
            if self.integers_at < 48 {
                let at = self.registers.add(self.integers_at as usize);
                self.integers_at += 8;
                *at.cast::<*const c_char>()
            } else {
                let value = *self.on_stack;
                self.on_stack = self.on_stack.add(1);
                value
            }
        }
    }
}

/// A `va_list` where all arguments lie on the stack (System V ABI, i386): the address of the next one.
#[cfg(target_arch = "x86")]
#[derive(Clone, Copy)]
struct Arguments(*const *const c_char);

#[cfg(target_arch = "x86")]
impl Arguments {
    /// # Safety
    /// `list` is a `va_list`.
    unsafe fn of(list: *mut c_void) -> Arguments {
        Arguments(list.cast())
    }

    /// # Safety
    /// There is a further argument, and it is a pointer.
    unsafe fn next(&mut self) -> *const c_char {
        // SAFETY: the caller's contract.
        unsafe {
            let value = *self.0;
            self.0 = self.0.add(1);
            value
        }
    }
}

/// Gathers the arguments of execl(3) up to the null pointer for `call`, which also gets those behind it.
///
/// # Safety
/// `list` is a `va_list` that contains a null pointer.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
unsafe fn gather(list: *mut c_void, call: impl FnOnce(Strings, &mut Arguments) -> c_int) -> c_int {
    // SAFETY: the caller's contract.
    let mut list = unsafe { Arguments::of(list) };
    let mut ahead = list;
    let mut count = 1;
    // SAFETY: a null pointer comes.
    while !unsafe { ahead.next() }.is_null() {
        count += 1;
    }
    // Not on the stack, which may be small, nor by malloc: this is called after fork.
    let argv = match sys::mmap_private(core::ptr::null_mut(), count * size_of::<Strings>()) {
        Ok(at) => at.cast::<*const c_char>(),
        Err(code) => return super::fail(code),
    };
    for i in 0..count {
        // SAFETY: `count` places, and as many arguments, the null pointer included.
        unsafe { argv.add(i).write(list.next()) };
    }
    after(call(argv, &mut list), |_| {
        // SAFETY: mapped above; the call is over.
        unsafe { sys::munmap(argv.cast(), count * size_of::<Strings>()) }
    })
}

/// execl(3)
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
pub unsafe fn execl(path: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { gather(list, |argv, _| execv(path, argv)) }
}

/// execlp(3)
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
pub unsafe fn execlp(file: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { gather(list, |argv, _| execvp(file, argv)) }
}

/// execle(3)
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
pub unsafe fn execle(path: *const c_char, list: *mut c_void) -> c_int {
    // SAFETY: the caller's contract: the environment comes last.
    unsafe { gather(list, |argv, rest| execve(path, argv, rest.next().cast())) }
}
