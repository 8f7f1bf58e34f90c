//! The numbers of a connection: which still mean it, and the duplicate that calls asleep on it need when they are closed.

use core::ops::RangeInclusive;
use usmc_shm::sync::Ordering::{Acquire, Relaxed, SeqCst};

use super::conn::{self, Conn};
use super::users::{CALL, Kind, Left};
use crate::os::hook::Hook;
use crate::os::table::{self, Entry};
use crate::os::{libc_streams, real};

/// The numbers of stdin, stdout and stderr.
pub const STANDARD: RangeInclusive<i32> = 0..=2;

/// Does what the end of a call leaves to be done for its record: the connection may end with it.
pub static ENDED: Hook<(u32, Left)> = Hook::new();

/// A call that sleeps on a connection. It keeps the record, as a system call keeps its socket: a close by
/// another thread takes effect when the call returns.
pub struct Hold {
    index: u32,
    kind: Kind,
}

impl Hold {
    /// Before the first sleep on `fd`, which may be the duplicate of another hold. `None` when the number was closed
    /// already.
    pub fn enter(fd: i32, index: u32) -> Option<Hold> {
        Hold::of_kind(fd, index, CALL)
    }

    /// The same of a call of this kind, which may have been stopped.
    pub fn of_kind(fd: i32, index: u32, kind: Kind) -> Option<Hold> {
        if !conn::at(index).users.enter(kind) {
            return None;
        }
        let hold = Hold { index, kind };
        let is_ours =
            table::still(fd) == Entry::Conn(index) || (fd >= 0 && number(fd, index) == fd);
        is_ours.then_some(hold)
    }

    /// For what is still to be done after a step, whose lock the caller has.
    pub fn in_step(index: u32) -> Option<Hold> {
        conn::at(index).users.enter(CALL).then_some(Hold { index, kind: CALL })
    }

    /// A use that was counted before.
    pub fn of_call(index: u32) -> Hold {
        Hold { index, kind: CALL }
    }

    /// The record.
    pub fn conn(&self) -> &'static conn::Conn {
        conn::at(self.index)
    }

    /// [`number`] of this connection.
    pub fn fd(&self, fd: i32) -> i32 {
        number(fd, self.index)
    }
}

/// `fd`, or the sleepers' duplicate when the number does not mean this connection any more; -1 without one.
pub fn number(fd: i32, index: u32) -> i32 {
    if table::get(fd) == Entry::Conn(index) {
        return fd;
    }
    conn::at(index).spare.load(Acquire).cast_signed() - 1
}

/// The same for a step, by the holder of its lock: a close waits for the lock, so that the number stays what it is.
/// `None` where it was closed before, and the call does not hold the connection.
#[inline(always)]
pub fn number_in_step(fd: i32, index: u32, is_held: bool) -> Option<i32> {
    if table::get(fd) == Entry::Conn(index) { Some(fd) } else { other_number(fd, index, is_held) }
}

#[cold]
fn other_number(fd: i32, index: u32, is_held: bool) -> Option<i32> {
    let other = number(fd, index);
    (is_held || (fd >= 0 && other == fd)).then_some(other)
}

/// A number to ring with; `None` where the connection is about to be closed. The caller is counted in [`Conn::ringing`].
#[inline]
pub fn number_to_ring(fd: i32, conn: &Conn) -> Option<i32> {
    // A record that only visits has its own.
    let Some(index) = conn::around(core::ptr::from_ref(conn).addr()) else { return Some(fd) };
    // In one order with `closing`: it waits for us, or we see that the number is gone.
    let is_ours = |fd| table::still(fd) == Entry::Conn(index);
    let spare = || conn.spare.load(SeqCst).cast_signed() - 1;
    if is_ours(fd) || (fd >= 0 && fd == spare()) {
        return Some(fd);
    }
    any_number(index).filter(|fd| is_ours(*fd) || *fd == spare())
}

/// A number of this connection that stays its own during a sleep of the kernel's that looks at numbers again when it is
/// woken, as poll(2) does: the sleepers' duplicate, where another thread could close `fd`. The caller holds the connection
/// ([`Hold`]), whose end gives it back.
pub fn steady(fd: i32, index: u32) -> i32 {
    let conn = conn::at(index);
    if !real::may_have_threads() || !conn.users.has_calls() {
        return number(fd, index);
    }
    // Made for an earlier sleep, of this call or of another one; it stays until the last of them ends.
    if let Some(spare) = conn.spare.load(Acquire).checked_sub(1) {
        return spare.cast_signed();
    }
    let Ok(copy) = table::duplicate(fd) else { return fd };
    // The library forgets a number before the kernel does, and the record is held: this is a duplicate of ours.
    let is_ours = table::get(fd) == Entry::Conn(index);
    let new = (copy + 1).cast_unsigned();
    if is_ours && conn.spare.compare_exchange(0, new, SeqCst, Relaxed).is_ok() {
        conn.users.keep_spare();
        return copy;
    }
    table::release_fd(copy);
    number(fd, index)
}

/// Sleeps in the kernel's poll(2) until one of these events, or fails with its errno. The caller holds the connection.
pub fn sleeps_in_poll(fd: i32, index: u32, events: i16) -> bool {
    let mut p = libc::pollfd { fd: steady(fd, index), events, revents: 0 };
    // SAFETY: one valid pollfd; the real function is a cancellation point, as send and recv are.
    unsafe { real::poll(&raw mut p, 1, -1) > 0 }
}

/// Calls `each` for every number of a connection.
pub fn for_each(mut each: impl FnMut(i32, u32, &'static Conn)) {
    table::for_each(0, u32::MAX, |fd, entry| {
        if let Entry::Conn(index) = entry {
            each(fd, index, conn::at(index));
        }
    });
}

/// A number of this connection, or the sleepers' duplicate.
pub fn any_number(index: u32) -> Option<i32> {
    let mut any = None;
    for_each(|number, of, _| any = if of == index { Some(number) } else { any });
    let spare = conn::at(index).spare.load(Acquire).cast_signed() - 1;
    any.or((spare >= 0).then_some(spare))
}

/// Closes the sleepers' duplicate.
pub fn release_spare(index: u32) {
    match conn::at(index).spare.swap(0, SeqCst) {
        0 => {}
        copy => table::release_fd(copy.cast_signed() - 1),
    }
}

impl Drop for Hold {
    #[inline]
    fn drop(&mut self) {
        match conn::at(self.index).users.leave_call(self.kind) {
            Left::Needed => {}
            left => ENDED.call((self.index, left)),
        }
    }
}

/// Whether libc's streams stdin, stdout and stderr are about this number, and read and write where nobody sees it.
pub fn is_libcs(fd: i32) -> bool {
    STANDARD.contains(&fd) && !libc_streams::serve()
}

/// A process that has a connection for stdin and stdout hands it on to the programs that it starts, as a shell does, whatever is
/// unread there: the peer is told.
pub fn note_handing_on(conn: &Conn) {
    let index = conn::index_of(conn);
    if let Some(slot) = conn.slot()
        && STANDARD.into_iter().any(|fd| table::get(fd) == Entry::Conn(index))
    {
        conn.end(slot).set_hands_on();
    }
}
