//! dup(2) and the flags of an open file description.

use core::ops::RangeInclusive;
use core::sync::atomic::Ordering::Relaxed;
use usmc_shm::layout::END_HANDS_ON;

use super::recv;
use crate::api::streams;
use crate::os::log;
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::table::{self, Entry};
use crate::record::conn::{self, Conn, F_KERNEL_ONLY, F_NONBLOCK, FRESH, LISTEN};
use crate::stream::demote;
use crate::uring;
use crate::watchers::epoll;

/// `new` is a duplicate of `old`.
pub fn duplicated(old: i32, new: i32) {
    let entry = table::settled(old);
    match entry {
        Entry::Conn(index) if new.cast_unsigned() as usize >= table::FDS => {
            // A number that we cannot know: it is the kernel's socket.
            if demote::leave(old, index, Reason::TableFull).is_err() {
                log::warn(format_args!("fd {new}: a duplicate of {old} that sees doorbells"));
            }
            return;
        }
        Entry::Conn(index) => {
            conn::at(index).users.add();
        }
        Entry::Epoll(index) => epoll::duplicated(index),
        Entry::Uring(index) => uring::duplicated(index),
        Entry::Foreign | Entry::Internal => {
            table::set(new, Entry::Foreign);
            return;
        }
    }
    table::set(new, entry);
    if is_libcs(new) {
        // As under inetd.
        used_by_libc(new);
    } else if let Entry::Conn(index) = entry
        && STANDARD.contains(&new)
    {
        note_handing_on(conn::at(index));
    }
}

/// The numbers of stdin, stdout and stderr.
const STANDARD: RangeInclusive<i32> = 0..=2;

/// Whether libc's streams stdin, stdout and stderr are about this number, and read and write where nobody sees it.
pub fn is_libcs(fd: i32) -> bool {
    STANDARD.contains(&fd) && !streams::serve()
}

/// Who has a connection for stdin and stdout hands it on to the programs that it starts, as a shell does, whatever is unread
/// there: the peer is told.
pub fn note_handing_on(conn: &Conn) {
    let index = conn::index_of(conn);
    if let Some(slot) = conn.slot()
        && STANDARD.into_iter().any(|fd| table::get(fd) == Entry::Conn(index))
    {
        conn.end(slot).flags.fetch_or(END_HANDS_ON, Relaxed);
    }
}

/// libc itself is going to use `fd` (its streams read and write where no preload sees it): the connection is or
/// becomes TCP.
pub fn used_by_libc(fd: i32) {
    let Entry::Conn(index) = table::get(fd) else { return };
    if demote::leave(fd, index, Reason::Stdio).is_err() {
        log::warn(format_args!(
            "fd {fd}: a connection that cannot go back to TCP; what stdio writes there by itself is lost"
        ));
    }
}

/// O_NONBLOCK was set or cleared on `fd`.
pub fn nonblocking(fd: i32, on: bool) {
    if let Entry::Conn(index) = table::settled(fd) {
        conn::at(index).set_flag(F_NONBLOCK, on);
    }
}

/// Whether O_ASYNC is set.
pub fn has_signals(fd: i32) -> bool {
    sys::fcntl(fd, libc::F_GETFL, 0).is_ok_and(|flags| flags & libc::O_ASYNC as usize != 0)
}

/// O_ASYNC is about to be set on `fd`.
///
/// # Errors
/// See [`demote::leave`].
pub fn signals(fd: i32) -> Result<(), Errno> {
    let Entry::Conn(index) = table::get(fd) else { return Ok(()) };
    match conn::at(index).phase() {
        FRESH => conn::at(index).set_flag(F_KERNEL_ONLY, true),
        // Of a listener the kernel sees all, and what it accepts is without the flag.
        LISTEN => {}
        _ => return demote::leave(fd, index, Reason::KernelFeature),
    }
    Ok(())
}

/// FIONREAD where the kernel does not know it.
pub fn unread(fd: i32) -> Option<i32> {
    let Entry::Conn(index) = table::get(fd) else { return None };
    recv::unread(fd, index).map(|n| i32::try_from(n).unwrap_or(i32::MAX))
}

/// What SIOCOUTQ counts beside the kernel's: bytes in the ring that the peer has not read.
pub fn unsent(fd: i32) -> Option<i32> {
    let Entry::Conn(index) = table::get(fd) else { return None };
    let conn = conn::at(index);
    let slot = conn.slot().filter(|_| conn.phase() == conn::RING)?;
    i32::try_from(conn.tx(slot).unread()).ok()
}

/// Asks whether an urgent byte is next.
pub const SIOCATMARK: libc::c_ulong = 0x8905;

/// Whether it is, in the kernel.
pub fn is_at_mark(fd: i32) -> bool {
    sys::ioctl_int(fd, SIOCATMARK).is_ok_and(|at_mark| at_mark != 0)
}

/// Whether the kernel can answer SIOCATMARK: what the ring holds comes before any mark.
pub fn knows_mark(fd: i32) -> bool {
    let Entry::Conn(index) = table::get(fd) else { return true };
    recv::is_past_ring(fd, index)
}

/// Calls made on a fresh description (socket, accept, open, …): what the number meant before is over,
/// whoever closed it behind our back.
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
