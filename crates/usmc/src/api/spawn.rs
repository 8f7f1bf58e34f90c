//! The calls by which libc makes a process and starts a program there by itself.

use core::ffi::{CStr, c_char, c_int};
use libc::{FILE, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};

use super::{after, fail};
use crate::real;
use crate::socket::control;
use crate::spawn::{Plan, around};

type Strings = *const *mut c_char;
/// posix_spawn(3), or posix_spawnp(3).
type Spawn = unsafe fn(
    *mut pid_t,
    *const c_char,
    *const posix_spawn_file_actions_t,
    *const posix_spawnattr_t,
    Strings,
    Strings,
) -> c_int;

/// # Safety
/// As posix_spawn(3).
unsafe fn spawn(
    spawn: Spawn,
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    argv: Strings,
    env: Strings,
) -> c_int {
    // SAFETY: the caller's contract.
    let plan = unsafe { Plan::of(actions) };
    let mut child = 0;
    // The caller's own place: a handler of SIGCHLD may look there before we return.
    let at = if pid.is_null() { &raw mut child } else { pid };
    let done = around(plan, || {
        // SAFETY: the caller's contract, or our own variable.
        unsafe {
            let done = spawn(at, path, actions, attributes, argv, env);
            (done, (done == 0).then(|| at.read().cast_unsigned()))
        }
    });
    done.unwrap_or_else(|code| code)
}

/// posix_spawn(3)
pub unsafe fn posix_spawn(
    pid: *mut pid_t,
    path: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    argv: Strings,
    env: Strings,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { spawn(real::posix_spawn, pid, path, actions, attributes, argv, env) }
}

/// posix_spawnp(3)
pub unsafe fn posix_spawnp(
    pid: *mut pid_t,
    file: *const c_char,
    actions: *const posix_spawn_file_actions_t,
    attributes: *const posix_spawnattr_t,
    argv: Strings,
    env: Strings,
) -> c_int {
    // SAFETY: the caller's contract.
    unsafe { spawn(real::posix_spawnp, pid, file, actions, attributes, argv, env) }
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
