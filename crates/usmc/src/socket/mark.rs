//! What the kernel's socket itself tells whoever gets hold of it by ways that nobody sees (pidfd_getfd(2), a program
//! without the library that passes it on): by IP options that do nothing to TCP, as in [`super::smc`].
//!
//! Each of the two writes its own mark and looks for the other's then, so that one of them finds it.

use libc::IPPROTO_IP;

use crate::{kernel, kernel_only, sys};

/// In a ring, or about to be: what the kernel's TCP carries may be doorbells.
const IN_RING: i32 = libc::IP_RECVORIGDSTADDR;
/// Somebody has it whom no holder knows: it must not leave TCP.
const TAKEN: i32 = libc::IP_RECVTTL;

fn set(fd: i32, mark: i32, on: bool) {
    if !kernel_only::is_sandboxed() {
        // A filter may refuse it; then it is without.
        let _ = sys::setsockopt(fd, IPPROTO_IP, mark, &i32::from(on));
    }
}

/// Before the peer can learn that this end takes part in a ring. False where that must not be.
pub fn enter_ring(fd: i32) -> bool {
    set(fd, IN_RING, true);
    let free = kernel::option(fd, IPPROTO_IP, TAKEN, 0) == 0;
    if !free {
        set(fd, IN_RING, false);
    }
    free
}

/// The kernel's TCP carries the application's bytes and nothing else.
pub fn leave_ring(fd: i32) {
    set(fd, IN_RING, false);
}

/// `fd` has come to us, unknown to its holders: it stays TCP from now on. False where it does not any more.
pub fn take(fd: i32) -> bool {
    set(fd, TAKEN, true);
    kernel::option(fd, IPPROTO_IP, IN_RING, 0) == 0
}

/// It listens now, and is no connection.
pub fn give_back(fd: i32) {
    set(fd, TAKEN, false);
}
