//! All connections of the process go back to TCP, and new ones stay there ([`crate::os::kernel_only`]).

use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{config, errno, kernel_only, log, process, real};
use crate::record::numbers;
use crate::stream::fallback;
use crate::watchers::epoll;

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
/// See [`fallback::leave`]; connections that are made from now on are TCP all the same.
pub fn begins(why: Reason) -> Result<(), Errno> {
    if config::get().off || process::is_foreign_child() || kernel_only::is_sandboxed() {
        return Ok(());
    }
    let _errno = errno::keep();
    if kernel_only::begin(why) {
        log::debug(format_args!("all connections are TCP from now on: {}", why.text()));
    }
    epoll::pay_all();
    let mut all = Ok(());
    numbers::for_each(|fd, index, _| all = all.and(fallback::leave(fd, index, why)));
    all
}
