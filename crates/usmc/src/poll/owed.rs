//! Registrations that the kernel is not told of until it has to know them.
//!
//! A server of short connections accepts one, registers it, is told that its request is there, answers and closes. For such
//! a connection epoll_ctl(2), the kernel's bookkeeping of it and the wait that reports it are replaced by one question:
//! poll(2) over those that are owed to the kernel, and the set itself for all others. It is asked once; what has nothing to
//! tell then, or is still there at the next wait, is registered. Level-triggered events are a state, so that nothing is
//! told twice or missed.
//!
//! Whether that pays is learned from each set's connections. Nobody sleeps in a set that owes something.

use core::ffi::c_int;
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};

use super::entry::{self, E_OWED, E_TOLD, E_TOLD_AGAIN, Entry};
use super::epoll::{ET, EXCLUSIVE, ONESHOT, Set, WAKEUP, fd_of, set_at, tag_of};
use super::multi;
use super::ready::IN;
use crate::conn::{self, Conn, EARLY, F_ADOPTED, F_CLC, F_COPIED, F_SHARED};
use crate::sys::{self, Errno};
use crate::{kernel_only, single};

/// Most registrations that a set owes.
pub const MOST: usize = 64;

/// From so many connections of one request on, less those that were more, a set puts registrations off.
const SHORT: u32 = 8;
/// No more than so many are remembered.
const SHORT_MOST: u32 = 2 * SHORT;
/// What one that was not short counts.
const LONG: u32 = 2;

/// Whether waits may ask for these events by poll(2): what is true is told, again and again.
fn is_state(events: u32) -> bool {
    events & (ET | ONESHOT | EXCLUSIVE | WAKEUP) == 0
}

/// Puts the registration of a new entry off, if that may pay. The caller keeps the connection's registrations
/// ([`entry::keep`]), here as below.
pub fn owe(set: &Set, number: u32, entry: &Entry, conn: &Conn) -> bool {
    let pays = set.short.load(Relaxed) >= SHORT;
    if !pays
        || !is_state(entry.events.load(Relaxed))
        || conn.phase() != EARLY
        || conn.has(F_CLC | F_SHARED | F_COPIED | F_ADOPTED)
        || set.is_watched.load(Relaxed) != 0
        || kernel_only::reason().is_some()
    {
        return false;
    }
    {
        let Some(_held) = set.lock.enter() else { return false };
        let count = set.owed_count.load(Relaxed);
        if count as usize == MOST {
            return false;
        }
        set.owed[count as usize].store(number, Relaxed);
        entry.hot_at.store(count, Relaxed);
        entry.set_flag(E_OWED, true);
        // SeqCst: a waiter that counts itself as asleep after this sees it, or is seen below.
        single::add(&set.owed_count, 1);
    }
    if set.sleepers.load(SeqCst) == 0 {
        return true;
    }
    let _held = set.lock.enter();
    forgive(set, entry);
    false
}

/// The entry is owed no more. The caller holds the set's lock.
pub fn forgive(set: &Set, entry: &Entry) {
    if !entry.has(E_OWED) {
        return;
    }
    entry.set_flag(E_OWED, false);
    let last = set.owed_count.load(Relaxed) - 1;
    let (at, moved) = (entry.hot_at.load(Relaxed), set.owed[last as usize].load(Relaxed));
    set.owed[at as usize].store(moved, Relaxed);
    if let Some(moved) = entry::at(moved) {
        moved.hot_at.store(at, Relaxed);
    }
    set.owed_count.store(last, Relaxed);
}

/// Whether the set owes anything.
#[inline(always)]
pub fn is_any(set: &Set) -> bool {
    // SeqCst: see `owe`.
    set.owed_count.load(SeqCst) != 0
}

/// Registers an entry that is owed.
///
/// # Errors
/// The kernel's: it has no memory for it, and it stays owed.
pub fn register(number: u32, entry: &Entry) -> Result<(), Errno> {
    let set = set_at(entry.set_index());
    let (fd, u64) = (entry.fd.load(Relaxed) as i32, tag_of(number, entry));
    let mut event = libc::epoll_event { events: entry.events.load(Relaxed), u64 };
    let done = sys::epoll_ctl(fd_of(entry.set_index()), libc::EPOLL_CTL_ADD, fd, &mut event);
    if matches!(done, Err(libc::ENOSPC | libc::ENOMEM)) {
        return done;
    }
    // Of a number that was closed behind our back the kernel would not know by now either.
    let _held = set.lock.enter();
    forgive(set, entry);
    Ok(())
}

/// The same of what was changed to these events, unless it can stay owed.
///
/// # Errors
/// As there.
pub fn modified(number: u32, entry: &Entry) -> Result<(), Errno> {
    // To be asked for anew.
    entry.round.store(0, Relaxed);
    if is_state(entry.events.load(Relaxed)) { Ok(()) } else { register(number, entry) }
}

/// Registers all that set `index` owes but for what was just reported, in wait `told`; 0 = nothing was. False where the
/// kernel has no memory for one.
pub fn pay(index: u32, told: u32) -> bool {
    let set = set_at(index);
    let mut all = true;
    let mut at = set.owed_count.load(Relaxed);
    // From the end: taking one off moves the last one into its place.
    while let Some(place) = at.checked_sub(1) {
        at = place;
        let number = {
            let Some(_held) = set.lock.enter() else { return false };
            if place >= set.owed_count.load(Relaxed) {
                continue;
            }
            set.owed[place as usize].load(Relaxed)
        };
        let Some(entry) = entry::at(number) else { continue };
        let conn = entry.conn.load(Relaxed);
        let Some(_held) = entry::keep(conn) else { return false };
        let is_same =
            entry.has(E_OWED) && entry.set_index() == index && entry.conn.load(Relaxed) == conn;
        if !is_same || (told != 0 && entry.round.load(Relaxed) == told) {
            continue;
        }
        all &= register(number, entry).is_ok();
        // It lasts: nothing is learned from its end.
        entry.set_flag(E_TOLD | E_TOLD_AGAIN, true);
        let short = set.short.load(Relaxed).saturating_sub(LONG);
        set.short.store(if short < SHORT { 0 } else { short }, Relaxed);
    }
    all
}

/// All that any set owes, for a fork that keeps all as it is, sets and registrations. They are the child's, too, from now on.
pub fn pay_for_fork(set: &Set) {
    set.is_watched.store(1, Relaxed);
    while let Some(last) = set.owed_count.load(Relaxed).checked_sub(1) {
        let number = set.owed[last as usize].load(Relaxed);
        if let Some(entry) = entry::at(number) {
            let (fd, u64) = (entry.fd.load(Relaxed) as i32, tag_of(number, entry));
            let mut event = libc::epoll_event { events: entry.events.load(Relaxed), u64 };
            let epfd = fd_of(entry.set_index());
            let _ = sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &mut event);
            entry.set_flag(E_OWED, false);
        }
        set.owed_count.store(last, Relaxed);
    }
}

/// Asks for what the set owes, and for whether the kernel has something to tell of all others. What it reports stays owed
/// until the next wait, and all else is registered. How many events there are.
///
/// # Safety
/// `events` is writable for `max` entries.
pub unsafe fn report(
    (epfd, index): (c_int, u32),
    events: *mut libc::epoll_event,
    max: c_int,
    round: u32,
) -> c_int {
    const NONE: libc::pollfd = libc::pollfd { fd: -1, events: 0, revents: 0 };
    let set = set_at(index);
    let (mut fds, mut numbers) = ([NONE; MOST + 1], [0; MOST]);
    let asked = collect(set, &mut fds, &mut numbers);
    fds[asked] = libc::pollfd { fd: epfd, events: libc::POLLIN, revents: 0 };
    if asked == 0 || sys::poll_now(&mut fds[..=asked]) == 0 {
        pay(index, 0);
        return 0;
    }
    // SAFETY (here as below): the caller's contract.
    let kernels = match fds[asked].revents {
        0 => 0,
        _ => unsafe { multi::kernel_now(epfd, events, max, round) }.max(0),
    };
    let mut all = kernels;
    for (p, number) in fds.iter().zip(numbers).take(asked) {
        if p.revents & !libc::POLLNVAL != 0
            && all < max
            && let Some(entry) = entry::at(number)
        {
            let bits = u32::from(p.revents.cast_unsigned());
            let event = libc::epoll_event { events: bits, u64: tag_of(number, entry) };
            unsafe { events.add(all as usize).write(event) };
            all += 1;
        }
    }
    let ours = unsafe { events.add(kernels as usize) };
    let told = multi::translate(set, ours, all - kernels, round);
    pay(index, round);
    kernels + told
}

/// Those of which nothing was told yet. How many they are.
fn collect(set: &Set, fds: &mut [libc::pollfd], numbers: &mut [u32]) -> usize {
    let Some(_held) = set.lock.enter() else { return 0 };
    let mut asked = 0;
    for place in &set.owed[..set.owed_count.load(Relaxed) as usize] {
        let number = place.load(Relaxed);
        let Some(entry) = entry::at(number) else { continue };
        // A message of the peer's CLC is not the application's.
        if entry.round.load(Relaxed) != 0 || conn::at(entry.conn.load(Relaxed)).has(F_CLC) {
            continue;
        }
        let events = entry.events.load(Relaxed) as u16;
        fds[asked] = libc::pollfd {
            fd: entry.fd.load(Relaxed) as i32,
            events: events.cast_signed(),
            revents: 0,
        };
        numbers[asked] = number;
        asked += 1;
    }
    asked
}

/// The kernel has told of an entry that is not in the ring.
#[inline(always)]
pub fn note_told(entry: &Entry) {
    if !entry.has(E_TOLD_AGAIN) {
        entry.set_flag(if entry.has(E_TOLD) { E_TOLD_AGAIN } else { E_TOLD }, true);
    }
}

/// A registration ends: it was one of a short connection if it was told of once, and that was what the last wait did.
#[inline(always)]
pub fn learn(set: &Set, entry: &Entry) {
    let is_short = entry.has(E_TOLD)
        && !entry.has(E_TOLD_AGAIN)
        && entry.round.load(Relaxed) == set.rounds.load(Relaxed)
        && is_state(entry.events.load(Relaxed));
    if is_short && entry.events.load(Relaxed) & IN != 0 {
        let short = set.short.load(Relaxed);
        if short < SHORT_MOST {
            set.short.store(short + 1, Relaxed);
        }
    }
}
