//! What the kernel's registration of a connection in the ring is asked for: one recorded value, and one function that
//! compares it with what the kernel has to know.
//!
//! A thread that sleeps in a set hears of a ring by the kernel alone, so the kernel has to know of every event that the
//! application waits for, before that thread sleeps. It may know of more where no thread sleeps: that costs a look in vain, and
//! saves two system calls where an event loop turns a connection off and on again.

use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use super::entry::{self, E_DISABLED, E_KICKED, E_RING, Entry};
use super::set::{Set, WAKEUP, can_change, fd_of, set_at, tag_of};
use crate::os::events::{IN, OUT, PRI, RDHUP, READ_BITS, WRITE_BITS};
use crate::os::sys;
use crate::record::conn;
use crate::watchers::entry::Asked;
use crate::watchers::set;

/// What the kernel has to be asked for where the application wants these events: doorbells where it wants any of data or
/// room, and the end in any case, for a peer that dies with bytes unread in the ring ends by a FIN, and TCP by a reset. The
/// kernel reports errors and hang-ups by itself.
pub fn needed(want: u32) -> Asked {
    let bells = if want & (READ_BITS | WRITE_BITS) != 0 { IN } else { 0 };
    Asked(bells | RDHUP | want & (WAKEUP | PRI))
}

/// What the kernel is to be asked for now; `None` where it knows enough.
///
/// `is_heard`: a thread may sleep on the set, and would be woken for what is asked for in excess. `wakes`: such a thread has to
/// look. Room on a TCP socket is true at once, and by edges it is told once.
pub fn due(asked: Asked, needed: Asked, is_heard: bool, wakes: bool) -> Option<Asked> {
    let lacks = needed.0 & !asked.0 != 0;
    let exceeds = asked.0 & !needed.0 != 0;
    match (wakes, lacks || (is_heard && exceeds)) {
        (true, _) => Some(Asked(needed.0 | OUT)),
        (false, true) => Some(needed),
        (false, false) => None,
    }
}

/// The threads that have to look at a registration that was changed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Those that sleep in the set, or poll it. They look at the hot entries by themselves, before they sleep.
    Sleepers,
    /// The next wait, too: it does not look at this entry by itself.
    Anybody,
}

/// Whether a thread may sleep on the set now. It is seen here, or sees what was changed before: see `epoll_ctl::add`, and
/// `deferred::enter`. Of a thread that polls the set itself nobody knows that it sleeps.
fn is_heard(set: &Set) -> bool {
    set.sleepers.load(SeqCst) != 0 || set.is_watched.load(SeqCst) == set::POLLED
}

/// Brings the kernel's registration of a connection in the ring up to date, and wakes `wake`. The caller keeps the
/// connection's registrations ([`super::entry::keep`]), and holds no set's lock. False where the kernel cannot be told.
pub fn update(number: u32, entry: &Entry, wake: Wake) -> bool {
    let set = set_at(entry.set_index());
    let is_heard = is_heard(set);
    let wakes = wake == Wake::Anybody || (wake == Wake::Sleepers && is_heard);
    let Some(asked) = due(entry.asked(), needed_now(entry), is_heard, wakes) else { return true };
    can_change(entry) && tell(number, entry, asked)
}

/// The connection has come to the ring. The kernel's registration was the application's own. The caller keeps it.
pub fn begin(number: u32, entry: &Entry, wakes: bool) {
    let needed = needed_now(entry);
    tell(number, entry, due(needed, needed, false, wakes).unwrap_or(needed));
}

/// [`needed`], unless it was told once or was deleted.
fn needed_now(entry: &Entry) -> Asked {
    if entry.has(E_DISABLED) { Asked::NOTHING } else { needed(entry.events.load(Relaxed)) }
}

/// Takes back what has woken a thread, which looks at the entry afterwards: a change of another thread meanwhile wakes nobody
/// else. The caller keeps the registration.
pub fn calm(number: u32, entry: &Entry) {
    if !entry.has(E_KICKED) {
        return;
    }
    entry.set_flag(E_KICKED, false);
    // In TCP again, it is told of by what the application wants.
    if entry.has(E_RING) && can_change(entry) {
        tell(number, entry, needed_now(entry));
    }
}

/// Asks the kernel, and records it.
fn tell(number: u32, entry: &Entry, asked: Asked) -> bool {
    let mut event = libc::epoll_event { events: asked.events(), u64: tag_of(number, entry) };
    let fd = entry.fd.load(Relaxed) as i32;
    let done = sys::epoll_ctl(fd_of(entry.set_index()), libc::EPOLL_CTL_MOD, fd, &mut event);
    if done.is_ok() {
        record(entry, asked);
    }
    done.is_ok()
}

/// The kernel has been asked for this. What another process may change without our knowledge is asked for anew each time.
pub fn record(entry: &Entry, asked: Asked) {
    entry.set_flag(E_KICKED, asked.0 & OUT != 0);
    entry.set_asked(known(entry, asked));
}

/// The application's own events, by which the kernel knows it, do for the ring, too.
pub fn record_own(entry: &Entry) {
    entry.set_asked(known(entry, Asked::of(entry.events.load(Relaxed))));
}

fn known(entry: &Entry, asked: Asked) -> Asked {
    let is_shared = conn::at(entry.conn.load(Relaxed)).has(conn::F_SHARED);
    if is_shared { Asked::NOTHING } else { asked }
}

/// Asks for nothing in excess any more: a thread that polls the set would take it for an event. The caller keeps the
/// registration.
pub fn tidy(number: u32, entry: &Entry) {
    let exceeds = entry.asked().0 & !needed_now(entry).0 != 0;
    if exceeds && entry.has(E_RING) && can_change(entry) {
        tell(number, entry, needed_now(entry));
    }
}

/// Fork: another process may change what the kernel is asked for from now on.
pub fn forget_all() {
    entry::for_each(|_, entry| entry.set_asked(Asked::NOTHING));
}

#[cfg(test)]
mod model;
