//! dup(2) and the flags of an open file description.

use crate::family::holders;
use crate::os::log;
use crate::os::reason::Reason;
use crate::os::sys::Errno;
use crate::os::table::{self, Entry};
use crate::record::conn;
use crate::record::numbers;
use crate::record::phase::Phase;
use crate::stream::{fallback, unread};
use crate::watchers::set;

/// `new` is a duplicate of `old`.
pub fn duplicated(old: i32, new: i32) {
    let entry = table::settled(old);
    match entry {
        Entry::Conn(index) if new.cast_unsigned() as usize >= table::FDS => {
            // A number that we cannot know: it is the kernel's socket.
            if fallback::leave(old, index, Reason::TableFull).is_err() {
                log::warn(format_args!("fd {new}: a duplicate of {old} that sees doorbells"));
            }
            return;
        }
        Entry::Conn(index) => {
            conn::at(index).users.add();
        }
        Entry::Epoll(index) => set::duplicated(index),
        Entry::Uring(index) => table::URING_DUPLICATED.call(index),
        Entry::Foreign | Entry::Internal => {
            table::set(new, Entry::Foreign);
            return;
        }
    }
    table::set(new, entry);
    if numbers::is_libcs(new) {
        // As under inetd.
        used_by_libc(new);
    } else if let Entry::Conn(index) = entry
        && numbers::STANDARD.contains(&new)
    {
        numbers::note_handing_on(conn::at(index));
    }
}

/// libc itself is going to use `fd` (its streams read and write where no preload sees it): the connection is or
/// becomes TCP.
pub fn used_by_libc(fd: i32) {
    let Entry::Conn(index) = table::get(fd) else { return };
    if fallback::leave(fd, index, Reason::Stdio).is_err() {
        log::warn(format_args!(
            "fd {fd}: a connection that cannot go back to TCP; what stdio writes there by itself is lost"
        ));
    }
}

/// O_NONBLOCK was set or cleared on `fd`.
pub fn nonblocking(fd: i32, on: bool) {
    if let Entry::Conn(index) = table::settled(fd) {
        holders::note_nonblocking(conn::at(index), on);
    }
}

/// O_ASYNC is about to be set on `fd`.
///
/// # Errors
/// See [`fallback::leave`].
pub fn signals(fd: i32) -> Result<(), Errno> {
    let Entry::Conn(index) = table::get(fd) else { return Ok(()) };
    match conn::at(index).phase() {
        Phase::Fresh => conn::at(index).keep_to_kernel(),
        // Of a listener the kernel sees all, and what it accepts is without the flag.
        Phase::Listen => {}
        _ => return fallback::leave(fd, index, Reason::KernelFeature),
    }
    Ok(())
}

/// FIONREAD where the kernel does not know it.
pub fn unread(fd: i32) -> Option<i32> {
    let Entry::Conn(index) = table::get(fd) else { return None };
    unread::unread(fd, index).map(|n| i32::try_from(n).unwrap_or(i32::MAX))
}

/// What SIOCOUTQ counts beside the kernel's: bytes in the ring that the peer has not read.
pub fn unsent(fd: i32) -> Option<i32> {
    let Entry::Conn(index) = table::get(fd) else { return None };
    let conn = conn::at(index);
    let slot = conn.slot().filter(|_| conn.phase() == Phase::Ring)?;
    i32::try_from(conn.tx(slot).unread()).ok()
}

/// Whether the kernel can answer SIOCATMARK: what the ring holds comes before any mark.
pub fn knows_mark(fd: i32) -> bool {
    let Entry::Conn(index) = table::get(fd) else { return true };
    unread::is_past_ring(fd, index)
}

/// Calls made on a fresh description (socket, accept, open, …): what the number meant before is over,
/// by a close behind our back, too.
pub fn fresh(fd: i32) {
    if fd < 0 {
        return;
    }
    match table::get(fd) {
        Entry::Foreign => table::is_fresh(fd),
        Entry::Internal => {
            table::set(fd, Entry::Foreign);
        }
        Entry::Conn(_) | Entry::Epoll(_) | Entry::Uring(_) => {
            let _ = super::close::closing_stale(fd);
        }
    }
}
