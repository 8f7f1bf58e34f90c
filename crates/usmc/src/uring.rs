//! io_uring. What a program does to its sockets through such a ring passes neither libc nor us, and may begin at any
//! moment once it has one. So from the making of the first one on, all its connections are the kernel's TCP.
//!
//! Rings are made by number (syscall(2)) or by liburing, whose functions [`crate::api`] takes the place of.

use core::ffi::{CStr, c_void};
use usmc_shm::sync::AtomicBool;
use usmc_shm::sync::Ordering::SeqCst;

use crate::reason::Reason;
use crate::socket::demote;
use crate::sys::Errno;
use crate::table::{self, Entry};
use crate::{config, errno, log, process, set_errno};

static USED: AtomicBool = AtomicBool::new(false);

/// Whether this process is left to the kernel.
pub fn is_used() -> bool {
    // SeqCst: a step of the handshake sees it, or is seen by `begins`.
    USED.load(SeqCst)
}

/// Before the process makes a ring.
///
/// # Errors
/// See [`demote::leave`]; connections that are made from now on are TCP all the same.
pub fn begins() -> Result<(), Errno> {
    if config::get().off || process::is_foreign_child() {
        return Ok(());
    }
    let saved = errno();
    if !USED.swap(true, SeqCst) {
        log::debug(format_args!("an io_uring is made: all connections are TCP from now on"));
    }
    let mut all = Ok(());
    table::for_each(0, u32::MAX, |fd, entry| {
        if let Entry::Conn(index) = entry {
            all = all.and(demote::leave(fd, index, Reason::Uring));
        }
    });
    set_errno(saved);
    all
}

/// liburing's function of this name: the next one after ours, or that of a liburing that only a plugin has loaded.
pub fn liburing(name: &CStr) -> Option<*mut c_void> {
    const NAMES: [&CStr; 2] = [c"liburing.so.2", c"liburing.so.1"];
    // SAFETY: NUL-terminated names; RTLD_NOLOAD loads nothing, and the handle counts one more user for good.
    unsafe {
        let mut found = libc::dlsym(libc::RTLD_NEXT, name.as_ptr());
        for library in NAMES {
            if found.is_null() {
                let loaded = libc::dlopen(library.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
                if !loaded.is_null() {
                    found = libc::dlsym(loaded, name.as_ptr());
                }
            }
        }
        (!found.is_null()).then_some(found)
    }
}
