//! The calls by which libc makes a process and starts a program there by itself.

use core::ffi::{CStr, c_char, c_int};
use libc::{FILE, posix_spawn_file_actions_t, posix_spawnattr_t};

use super::{after, fail};
use crate::across::spawn::{Plan, around};
use crate::os::errno::errno;
use crate::os::{procfs, real};
use crate::socket::control;

type Strings = *const *mut c_char;
/// Starts a program by `spawn`, which is given the place for the number that names its process and fills it in. `pid`:
/// which process that is.
///
/// # Safety
/// `actions` are as posix_spawn(3) takes them, and `named` is null or a place for the number.
unsafe fn spawn(
    actions: *const posix_spawn_file_actions_t,
    named: *mut c_int,
    pid: impl FnOnce(c_int) -> u32,
    spawn: impl FnOnce(*mut c_int) -> c_int,
) -> c_int {
    // SAFETY: the caller's contract.
    let plan = unsafe { Plan::of(actions) };
    let mut own = 0;
    // The caller's own place: a handler of SIGCHLD may look there before we return.
    let at = if named.is_null() { &raw mut own } else { named };
    let done = around(plan, || {
        let done = match spawn(at) {
            // Not in this libc.
            -1 => errno(),
            done => done,
        };
        // SAFETY: the caller's contract, or our own variable.
        (done, (done == 0).then(|| pid(unsafe { at.read() })))
    });
    done.unwrap_or_else(|code| code)
}

macro_rules! spawns {
    ($($(#[$doc:meta])* $name:ident: $pid:expr;)*) => { $(
        $(#[$doc])*
        pub unsafe fn $name(
            named: *mut c_int,
            path: *const c_char,
            actions: *const posix_spawn_file_actions_t,
            attributes: *const posix_spawnattr_t,
            argv: Strings,
            env: Strings,
        ) -> c_int {
            // SAFETY: the caller's contract.
            unsafe {
                spawn(actions, named, $pid, |at| {
                    real::$name(at, path, actions, attributes, argv, env)
                })
            }
        }
    )* };
}

spawns! {
    /// posix_spawn(3)
    posix_spawn: c_int::cast_unsigned;
    /// posix_spawnp(3)
    posix_spawnp: c_int::cast_unsigned;
    /// pidfd_spawn(3), since glibc 2.39; elsewhere it says ENOSYS.
    pidfd_spawn: named_by_pidfd;
    /// pidfd_spawnp(3), likewise.
    pidfd_spawnp: named_by_pidfd;
}

/// The process of a pidfd that was just made; 0 = it is gone already.
fn named_by_pidfd(pidfd: c_int) -> u32 {
    control::fresh(pidfd);
    procfs::pid_of(pidfd).unwrap_or(0)
}

/// popen(3)
pub unsafe fn popen(command: *const c_char, mode: *const c_char) -> *mut FILE {
    let reads = !super::is_nowhere(mode)
        // SAFETY: the caller's contract.
        && unsafe { CStr::from_ptr(mode) }.to_bytes().contains(&b'r');
    let done = around(Plan::Overwrites(c_int::from(reads)), || {
        // SAFETY: the caller's contract.
        let stream = unsafe { real::popen(command, mode) };
        (stream, (!stream.is_null()).then_some(0))
    });
    let stream = done.unwrap_or_else(|code| {
        fail::<c_int>(code);
        core::ptr::null_mut()
    });
    after(stream, |&stream| {
        if !stream.is_null() {
            // SAFETY: a stream that was just made.
            control::fresh(unsafe { real::fileno(stream) });
        }
    })
}

/// system(3)
pub unsafe fn system(command: *const c_char) -> c_int {
    if command.is_null() {
        // Asks whether there is a shell.
        // SAFETY: as above.
        return unsafe { real::system(command) };
    }
    let done = around(Plan::NOTHING, || {
        // SAFETY: the caller's contract.
        let status = unsafe { real::system(command) };
        (status, (status != -1).then_some(0))
    });
    done.unwrap_or_else(fail)
}
