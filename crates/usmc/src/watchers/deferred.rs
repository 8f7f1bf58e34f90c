//! Registrations that the kernel is not told of until it has to know them.
//!
//! A server of short connections accepts one, registers it, is told that its request is there, answers and closes. For such
//! a connection epoll_ctl(2), the kernel's bookkeeping of it and the wait that reports it are replaced by one question:
//! poll(2) over those that are deferred, and the set itself for all others. A client that waits until it may send,
//! and for the answer then, is registered once, for the answer.
//!
//! It is asked once, or as long as there is room to send, which rarely ends; what has nothing to tell then, or is still there
//! at the next wait, is registered. A wait that looks for a while before it sleeps asks as long as it looks. Level-triggered
//! events are a state, so that nothing is told twice or missed. Nobody sleeps in a set that owes something. Where there is
//! something to tell at once, no system call is made in vain; whether that is so is learned from each set's connections
//! ([`Habit`]).
//!
//! Edge-triggered ones are put off where all of them are closed before the next wait. How much had come when one was told
//! of is asked for, so that the kernel, which tells of all that is there when it comes to know one after all, tells nothing
//! twice.
//!
//! A change of what is asked for and the end of a registration are put off, too, until the next wait: often another change
//! or the close comes before.

use core::ffi::c_int;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use super::entry::{
    self, E_CHANGED, E_DEFERRED, E_DISABLED, E_KNOWN, E_PARKED, E_PROMPT, E_TOLD, Entry,
};
use super::epoll::{delete, unlink};
use super::set::{ET, EXCLUSIVE, ONESHOT, Set, WAKEUP, entry_of, fd_of, set_at, tag_of};
use crate::os::events::{ERR, HUP, IN, OUT, RDHUP};
use crate::os::sys::{self, Errno};
use crate::os::{kernel_only, single};
use crate::record::conn::{self, Conn, F_ADOPTED, F_CLC, F_COPIED, F_SHARED};
use crate::record::kernel;
use crate::record::phase::Phase;
use crate::watchers::set::{self, DEFERRED, POLLED};

/// Whether waits may ask for these events by poll(2): what is true is told, again and again.
fn is_state(events: u32) -> bool {
    events & (ET | ONESHOT | EXCLUSIVE | WAKEUP) == 0
}

/// Whether they ask for edges, of input alone: of room the kernel would tell once more.
fn is_edge(events: u32) -> bool {
    events & ET != 0 && events & !(ET | IN | RDHUP | ERR | HUP) == 0
}

/// Puts the registration of a new entry off, if that may pay. The caller keeps the connection's registrations
/// ([`entry::keep`]), here as below.
pub fn owe(set: &Set, number: u32, entry: &Entry, conn: &Conn) -> bool {
    // For `note_told`.
    entry.hot_at.store(set.rounds.load(Relaxed), Relaxed);
    let events = entry.events.load(Relaxed);
    let pays =
        (set.habit.puts_off() && is_state(events)) || (set.edges.puts_off() && is_edge(events));
    pays && !conn.has(F_CLC) && enter(set, number, entry, conn, E_DEFERRED)
}

/// Puts the change of a registration off, which the kernel knows by the events `before`.
pub fn owe_change(set: &Set, number: u32, entry: &Entry, conn: &Conn, before: u32) -> bool {
    is_state(before | entry.events.load(Relaxed))
        && enter(set, number, entry, conn, E_DEFERRED | E_CHANGED)
}

/// Puts the end of a registration off: with a close it would end by itself.
pub fn owe_end(set: &Set, number: u32, entry: &Entry, conn: &Conn) -> bool {
    // Such a one could not be changed, should it be wanted again.
    entry.events.load(Relaxed) & EXCLUSIVE == 0
        && enter(set, number, entry, conn, E_DEFERRED | E_PARKED | E_DISABLED)
}

fn enter(set: &Set, number: u32, entry: &Entry, conn: &Conn, flags: u32) -> bool {
    // SeqCst, the second time: a thread that changes one of these and pays then sees the entry, or is seen.
    let may_be = || {
        set.sleepers.load(SeqCst) == 0
            && set.is_watched.load(SeqCst) == 0
            && kernel_only::reason().is_none()
    };
    // Of a connection that is TCP for good nothing tells whether another process has it, too.
    if conn.phase() != Phase::Early || conn.has(F_SHARED | F_COPIED | F_ADOPTED) || !may_be() {
        return false;
    }
    {
        let Some(_held) = set.lock.enter() else { return false };
        let count = set.deferred_count.load(Relaxed);
        if count as usize == DEFERRED {
            return false;
        }
        set.deferred[count as usize].store(number, Relaxed);
        entry.hot_at.store(count, Relaxed);
        entry.set_flag(flags, true);
        single::add(&set.deferred_count, 1);
    }
    if may_be() {
        return true;
    }
    let _held = set.lock.enter();
    forgive(set, entry);
    entry.set_flag(flags, false);
    false
}

/// The entry is deferred no more. The caller holds the set's lock.
pub fn forgive(set: &Set, entry: &Entry) {
    if !entry.has(E_DEFERRED) {
        return;
    }
    entry.set_flag(E_DEFERRED | E_CHANGED, false);
    let last = set.deferred_count.load(Relaxed) - 1;
    let (at, moved) = (entry.hot_at.load(Relaxed), set.deferred[last as usize].load(Relaxed));
    debug_assert!(at <= last);
    if let Some(place) = set.deferred.get(at as usize) {
        place.store(moved, Relaxed);
    }
    if let Some(moved) = entry::at(moved) {
        moved.hot_at.store(at, Relaxed);
    }
    set.deferred_count.store(last, Relaxed);
}

/// The end of the entry is not wanted any more.
pub fn remember(set: &Set, entry: &Entry) {
    if entry.has(E_DEFERRED) {
        let _held = set.lock.enter();
        forgive(set, entry);
    }
}

/// Whether the set owes anything.
#[inline(always)]
pub fn is_any(set: &Set) -> bool {
    // SeqCst: see `enter`.
    set.deferred_count.load(SeqCst) != 0
}

/// Registers an entry that is deferred, unless it is about to end.
///
/// # Errors
/// The kernel's: it has no memory for it, and it stays deferred.
pub fn register(number: u32, entry: &Entry) -> Result<(), Errno> {
    let set = set_at(entry.set_index());
    if entry.has(E_PARKED) {
        let _held = set.lock.enter();
        forgive(set, entry);
        return Ok(());
    }
    let (fd, u64) = (entry.fd.load(Relaxed) as i32, tag_of(number, entry));
    let events = entry.events.load(Relaxed);
    let is_known = is_edge(events) && !entry.has(E_CHANGED) && entry.round.load(Relaxed) != 0;
    entry.set_flag(E_KNOWN, is_known);
    let mut event = libc::epoll_event { events, u64 };
    let done = sys::epoll_ctl(fd_of(entry.set_index()), op(entry), fd, &mut event);
    if matches!(done, Err(libc::ENOSPC | libc::ENOMEM)) {
        return done;
    }
    // Of a number that was closed behind our back the kernel would not know by now either.
    let _held = set.lock.enter();
    forgive(set, entry);
    Ok(())
}

/// What the kernel has to be told of an entry that is deferred.
fn op(entry: &Entry) -> c_int {
    match entry {
        _ if entry.has(E_PARKED) => libc::EPOLL_CTL_DEL,
        _ if entry.has(E_CHANGED) => libc::EPOLL_CTL_MOD,
        _ => libc::EPOLL_CTL_ADD,
    }
}

/// The same of one that was changed, unless it can stay deferred.
///
/// # Errors
/// As there.
pub fn modified(number: u32, entry: &Entry) -> Result<(), Errno> {
    if is_state(entry.events.load(Relaxed)) {
        return Ok(());
    }
    // What is there is an edge for a thread that asks again.
    entry.round.store(0, Relaxed);
    register(number, entry)
}

/// The registration ends. False where the kernel knows nothing of it.
pub fn ended(entry: &Entry) -> bool {
    if entry.has(E_CHANGED) {
        entry.set_flag(E_PARKED | E_DISABLED, true);
        entry.set_flag(E_CHANGED, false);
        return true;
    }
    false
}

/// Which of what a set owes.
#[derive(Clone, Copy)]
pub enum Which {
    All,
    /// Not what can be asked for once more; `again`: as for [`is_due`].
    NotDue {
        again: bool,
    },
    /// Not what was told in this wait.
    NotTold(u32),
}

/// Registers all that set `index` owes. False where the kernel has no memory for one.
pub fn pay(index: u32) -> bool {
    !is_any(set_at(index)) || pay_some(index, Which::All)
}

pub fn pay_some(index: u32, which: Which) -> bool {
    let set = set_at(index);
    let mut numbers = [0; DEFERRED];
    let count = {
        let Some(_held) = set.lock.enter() else { return false };
        let count = set.deferred_count.load(Relaxed) as usize;
        let all = numbers.iter_mut().zip(&set.deferred[..count]);
        all.for_each(|(to, place)| *to = place.load(Relaxed));
        count
    };
    let mut all = true;
    // In the order in which they were made, as that is the order of events.
    for &number in &numbers[..count] {
        let Some(entry) = entry::at(number) else { continue };
        let conn = entry.conn.load(Relaxed);
        let Some(_held) = entry::keep(conn) else { return false };
        let is_same =
            entry.has(E_DEFERRED) && entry.set_index() == index && entry.conn.load(Relaxed) == conn;
        let is_meant = match which {
            Which::All => true,
            Which::NotDue { again } => !is_due(entry, again),
            Which::NotTold(round) => entry.round.load(Relaxed) != round,
        };
        if is_same && is_meant {
            all &= pay_one(set, index, number, entry);
        }
    }
    all
}

fn pay_one(set: &Set, index: u32, number: u32, entry: &Entry) -> bool {
    if entry.has(E_PARKED) {
        let _ = delete(fd_of(index), entry.fd.load(Relaxed) as i32, number, entry);
        return true;
    }
    if !entry.has(E_CHANGED) && is_edge(entry.events.load(Relaxed)) {
        set.edges.was_late();
    } else if !entry.has(E_CHANGED) && !entry.has(E_TOLD) {
        set.habit.was_late();
    }
    entry.set_flag(E_TOLD, true);
    register(number, entry).is_ok()
}

/// Whether the kernel tells more of an entry that it has just come to know than what was told before.
#[cold]
pub fn is_news(fd: c_int, entry: &Entry, events: u32) -> bool {
    entry.set_flag(E_KNOWN, false);
    let known = entry.seen_prod.swap(0, Relaxed);
    events & ENDS & !(known >> ENDS_SHIFT) as u32 != 0
        || kernel::tcp_received(fd) != Some(known & ((1 << ENDS_SHIFT) - 1))
}

/// Something happened to the connection of an edge that bytes do not tell of: it is to be told.
pub fn forget_known(entry: &Entry) {
    if entry.has(E_DEFERRED | E_KNOWN) {
        entry.seen_prod.store(u64::MAX, Relaxed);
    }
}

/// The kernel may tell others of the set's readiness from now on, which do not pay.
pub fn watch(index: u32) {
    let set = set_at(index);
    // SeqCst: see `enter`.
    if set.is_watched.load(Relaxed) != POLLED {
        set.is_watched.store(POLLED, SeqCst);
        set::stop_listening(set, index);
    }
    pay(index);
}

const ENDS: u32 = ERR | HUP;
const ENDS_SHIFT: u32 = 56;

/// What has come of a connection by which `bits` are told: bytes, and [`ENDS`] from bit [`ENDS_SHIFT`] on.
fn received(fd: c_int, entry: &Entry, bits: u32) -> u64 {
    // Where nothing was read yet, it is what is there. A FIN counts, too.
    let is_new = conn::at(entry.conn.load(Relaxed)).calls.load(Relaxed) == 0 && bits & ENDS == 0;
    let bytes = match sys::ioctl_int(fd, libc::FIONREAD) {
        Ok(unread) if is_new => unread as u64 + u64::from(bits & RDHUP != 0),
        _ => kernel::tcp_received(fd).unwrap_or(0),
    };
    bytes | u64::from(bits & ENDS) << ENDS_SHIFT
}

/// Whether the kernel has not been asked for it, or may well have the same to tell once more, or soon something else in a wait that asks
/// `again`.
fn is_due(entry: &Entry, again: bool) -> bool {
    let events = entry.events.load(Relaxed);
    let asks = entry.round.load(Relaxed) == 0 || events & OUT != 0 || again && is_state(events);
    // A message of the peer's CLC is not the application's.
    asks && !entry.has(E_PARKED | E_CHANGED) && !conn::at(entry.conn.load(Relaxed)).has(F_CLC)
}

/// What a set owes at a fork, which keeps all sets and registrations as they are: they are the child's, too, from now on.
pub fn pay_for_fork(set: &Set) {
    set.is_watched.fetch_max(1, SeqCst);
    while let Some(last) = set.deferred_count.load(Relaxed).checked_sub(1) {
        let number = set.deferred[last as usize].load(Relaxed);
        if let Some(entry) = entry::at(number) {
            let is_end = entry.has(E_PARKED);
            let (fd, u64) = (entry.fd.load(Relaxed) as i32, tag_of(number, entry));
            let mut event = libc::epoll_event { events: entry.events.load(Relaxed), u64 };
            let _ = sys::epoll_ctl(fd_of(entry.set_index()), op(entry), fd, &mut event);
            forgive(set, entry);
            if is_end {
                unlink(number, entry);
            }
        }
        // Also where a signal handler that has interrupted a change forks.
        set.deferred_count.store(last, Relaxed);
    }
}

/// What is to be told of the entry with this tag, of which poll(2) has `found` something. `None` where it is another's by
/// now, or an edge that another thread tells.
pub fn tell((set, index): (&Set, u32), fd: c_int, tag: u64, found: u32, round: u32) -> Option<u32> {
    let (number, entry) = entry_of(tag)?;
    let edge = {
        let _held = set.lock.enter()?;
        if number == u32::MAX || !entry.has(E_DEFERRED) || entry.set_index() != index {
            return None;
        }
        let edge = is_edge(entry.events.load(Relaxed));
        if edge && entry.round.swap(round, Relaxed) != 0 {
            return None;
        }
        edge
    };
    let bits = found & (entry.events.load(Relaxed) | ERR | HUP);
    if edge {
        entry.seen_prod.store(received(fd, entry, found), Relaxed);
    }
    (bits != 0).then_some(bits)
}

/// Those that are to be asked for, as far as there is room; `again`: as for [`is_due`]. How many they are.
pub fn collect(set: &Set, again: bool, fds: &mut [libc::pollfd], tags: &mut [u64]) -> usize {
    let Some(_held) = set.lock.enter() else { return 0 };
    let mut asked = 0;
    for place in &set.deferred[..set.deferred_count.load(Relaxed) as usize] {
        if asked == fds.len() {
            break;
        }
        let number = place.load(Relaxed);
        let Some(entry) = entry::at(number) else { continue };
        if !is_due(entry, again) {
            continue;
        }
        // The end of the stream as well: see `received`.
        let events = (entry.events.load(Relaxed) | RDHUP) as u16;
        fds[asked] = libc::pollfd {
            fd: entry.fd.load(Relaxed) as i32,
            events: events.cast_signed(),
            revents: 0,
        };
        tags[asked] = tag_of(number, entry);
        asked += 1;
    }
    asked
}

/// The kernel has told of an entry that is not in the ring, in wait `round`.
#[inline(always)]
pub fn note_told(set: &Set, entry: &Entry, round: u32) {
    if !entry.has(E_TOLD) {
        entry.set_flag(E_TOLD, true);
        learn(set, entry, round);
    }
}

#[inline(never)]
fn learn(set: &Set, entry: &Entry, round: u32) {
    let is_first = entry.has(E_DEFERRED) || entry.hot_at.load(Relaxed).wrapping_add(1) == round;
    let events = entry.events.load(Relaxed);
    if is_edge(events) {
        entry.set_flag(E_PROMPT, is_first);
    } else if is_first && is_state(events) {
        set.habit.was_in_time();
    } else {
        set.habit.had_nothing();
    }
}

/// A registration ends. The caller holds the set's lock.
#[inline(always)]
pub fn learn_end(set: &Set, entry: &Entry) {
    if entry.has(E_PROMPT) && is_edge(entry.events.load(Relaxed)) {
        if entry.round.load(Relaxed) == set.rounds.load(Relaxed) {
            set.edges.was_in_time();
        } else {
            set.edges.had_nothing();
        }
    }
}
