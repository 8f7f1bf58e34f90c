//! What the kernel's socket itself tells whoever gets hold of it by ways that nobody sees (pidfd_getfd(2), a program
//! without the library that passes it on): by IP options that do nothing to TCP, as in [`crate::socket::smc`].
//!
//! Each of the two writes its own marks and looks for the other's then, so that one of them finds it.

use libc::IPPROTO_IP;

use crate::family::custody;
use crate::os::sockopt;
use crate::os::{kernel_only, sys};
use crate::record::conn::Conn;

/// In a ring, or about to be: what the kernel's TCP carries may be doorbells.
const IN_RING: i32 = libc::IP_RECVORIGDSTADDR;
/// Somebody has it who came unseen: it leaves TCP only where [`custody`] counts all of them.
const TAKEN: i32 = libc::IP_RECVTTL;
/// One of them is not counted: it must not leave TCP.
const UNCOUNTED: i32 = libc::IP_RECVTOS;

fn set(fd: i32, mark: i32, on: bool) {
    if !kernel_only::is_sandboxed() {
        // A filter may refuse it; then it is without.
        let _ = sys::setsockopt(fd, IPPROTO_IP, mark, &i32::from(on));
    }
}

fn has(fd: i32, mark: i32) -> bool {
    sockopt::int(fd, IPPROTO_IP, mark, 0) != 0
}

/// Before the peer can learn that this end takes part in a ring. False where that must not be.
pub fn enter_ring(fd: i32, conn: &Conn) -> bool {
    set(fd, IN_RING, true);
    let is_counted = || !has(fd, UNCOUNTED) && custody::is_known_to_be_sole(fd, conn);
    let free = !has(fd, TAKEN) || is_counted();
    if !free {
        set(fd, IN_RING, false);
    }
    free
}

/// Whether a refusal of [`enter_ring`] is one for all time.
pub fn is_for_good(fd: i32) -> bool {
    has(fd, UNCOUNTED)
}

/// The kernel's TCP carries the application's bytes and nothing else.
pub fn leave_ring(fd: i32) {
    set(fd, IN_RING, false);
}

/// `fd` has come to us, unseen by its holders; `counted`: [`custody`] knows of us. It stays TCP for good, or until it is
/// ours alone. False where it is not TCP any more.
pub fn take(fd: i32, counted: bool) -> bool {
    if !counted {
        set(fd, UNCOUNTED, true);
    }
    set(fd, TAKEN, true);
    !has(fd, IN_RING)
}

/// It listens now, and is no connection.
pub fn give_back(fd: i32) {
    set(fd, TAKEN, false);
    set(fd, UNCOUNTED, false);
}
