//! Processes that are left to the kernel's TCP altogether, from some moment on:
//!
//! - with an io_uring that cannot be looked into ([`crate::uring`]): what is done to sockets through it passes neither libc
//!   nor us, and may begin at any moment;
//! - with a seccomp filter: it knows the system calls of the program, and kills for ours;
//! - with threads that do not share their descriptors: a number means one thing to one of them, and another to the next.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::SeqCst;

use crate::os::errno::errno;
use crate::os::errno::set_errno;
use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::os::table::{self, Entry};
use crate::os::{config, log, process, real, sys};
use crate::stream::demote;
use crate::watchers::epoll;

static WHY: AtomicU32 = AtomicU32::new(Reason::None as u32);

/// Why this process is left to the kernel, if it is.
#[inline]
pub fn reason() -> Option<Reason> {
    // SeqCst: a step of the handshake sees it, or is seen by `begins`.
    match WHY.load(SeqCst) {
        0 => None,
        code => Reason::from_code(code as u8),
    }
}

/// Whether system calls of our own may end this process.
pub fn is_sandboxed() -> bool {
    reason() == Some(Reason::Sandboxed)
}

/// Before a thread of several gets a table of descriptors of its own (CLONE_FILES, by unshare(2), or not, by clone(2)).
///
/// # Errors
/// As for [`begins`].
#[cold]
pub fn parts_with_files() -> Result<(), Errno> {
    if real::may_have_threads() && has_threads() { begins(Reason::OwnFiles) } else { Ok(()) }
}

/// A child of a process with threads has one, as far as libc tells or not.
fn has_threads() -> bool {
    let mut count = 0;
    match sys::each_fd_in(c"/proc/self/task", false, |_| count += 1) {
        Ok(()) => count > 1,
        Err(_) => true,
    }
}

/// Before the process uses such an io_uring, or installs a filter.
///
/// # Errors
/// See [`demote::leave`]; connections that are made from now on are TCP all the same.
pub fn begins(why: Reason) -> Result<(), Errno> {
    if config::get().off || process::is_foreign_child() || is_sandboxed() {
        return Ok(());
    }
    let saved = errno();
    if WHY.swap(why as u32, SeqCst) == 0 {
        log::debug(format_args!("all connections are TCP from now on: {}", why.text()));
    }
    epoll::pay_all();
    let mut all = Ok(());
    table::for_each(0, u32::MAX, |fd, entry| {
        if let Entry::Conn(index) = entry {
            all = all.and(demote::leave(fd, index, why));
        }
    });
    set_errno(saved);
    all
}
