//! Processes that are left to the kernel's TCP altogether, from some moment on:
//!
//! - with an io_uring that cannot be looked into ([`crate::uring`]): what is done to sockets through it passes neither libc
//!   nor us, and may begin at any moment;
//! - with a seccomp filter: it knows the system calls of the program, and kills for ours;
//! - with threads that do not share their descriptors: a number means one thing to one of them, and another to the next.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::SeqCst;

use crate::os::reason::Reason;

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

/// From now on it is, for this reason; false where it was before. All connections are left to the kernel next.
pub fn begin(why: Reason) -> bool {
    // SeqCst: as in `reason`.
    WHY.swap(why as u32, SeqCst) == 0
}
