//! What the kernel's socket itself tells a process that gets hold of it by ways that its holders do not see (pidfd_getfd(2), a program
//! without the library that passes it on): by IP options that do nothing to TCP, as in [`crate::socket::smc`].
//!
//! Each of the two writes its own marks and looks for the other's then, so that one of them finds it.

use libc::IPPROTO_IP;

use crate::os::{kernel_only, sockopt, sys};

/// In a ring, or about to be: what the kernel's TCP carries may be doorbells.
const IN_RING: i32 = libc::IP_RECVORIGDSTADDR;
/// A process has it that came unseen: it must not leave TCP.
const TAKEN: i32 = libc::IP_RECVTTL;

fn set(fd: i32, mark: i32, on: bool) {
    if !kernel_only::is_sandboxed() {
        // A filter may refuse it; then it is without.
        let _ = sys::setsockopt(fd, IPPROTO_IP, mark, &i32::from(on));
    }
}

fn has(fd: i32, mark: i32) -> bool {
    sockopt::int(fd, IPPROTO_IP, mark, 0) != 0
}

/// Before the peer can learn that this end takes part in a ring. False where that must not be, ever.
pub fn enter_ring(fd: i32) -> bool {
    set(fd, IN_RING, true);
    let is_free = !has(fd, TAKEN);
    if !is_free {
        set(fd, IN_RING, false);
    }
    is_free
}

/// The kernel's TCP carries the application's bytes and nothing else.
pub fn leave_ring(fd: i32) {
    set(fd, IN_RING, false);
}

/// `fd` has come to this process, unseen by its holders: the connection stays TCP from now on. False where it is in a ring, or about to
/// be.
pub fn take(fd: i32) -> bool {
    set(fd, TAKEN, true);
    !has(fd, IN_RING)
}

/// As [`take`], for a process that does not keep a socket in a ring: where the answer is false, the mark is as it was before. Another
/// process may have set it.
pub fn take_if_free(fd: i32) -> bool {
    let was_taken = has(fd, TAKEN);
    let is_free = take(fd);
    if !is_free && !was_taken {
        give_back(fd);
    }
    is_free
}

/// The mark of [`take`] goes: this process does not keep the socket, or listens on it.
pub fn give_back(fd: i32) {
    set(fd, TAKEN, false);
}
