//! epoll_ctl(2): what a set is asked to watch.

use usmc_shm::sync::Ordering::{Relaxed, Release};

use super::asked::{self, Wake};
use super::entry::{
    self, E_DEFERRED, E_DISABLED, E_EDGE, E_HOT, E_KNOWN, E_PARKED, E_RING, E_TCP, Entry,
};
use super::epoll::{delete, disarm, end, find, unlink, would_tell};
use super::set::{ET, EXCLUSIVE, ONESHOT, Set, WAKEUP, set_at, tag_of};
use super::{deferred, hot};
use crate::handshake::transition;
use crate::os::events::{self, HUP, IN, OUT, WRITE_BITS};
use crate::os::reason::Reason;
use crate::os::sys::{self, Errno};
use crate::os::{clock, single};
use crate::record::conn::{self, Conn};
use crate::record::phase::Phase;
use crate::stream::bells;
use crate::watch::observer;

/// epoll_ctl(2) on a tracked socket. `None`: not ours, make the real call with the real arguments.
///
/// The application's event has been copied by the caller.
pub fn control(
    epfd: i32,
    set_index: u32,
    op: i32,
    fd: i32,
    index: u32,
    event: Option<libc::epoll_event>,
) -> Option<Result<(), Errno>> {
    let conn = conn::at(index);
    let set = set_at(set_index);
    if op == libc::EPOLL_CTL_ADD && event.is_some_and(|event| event.events & EXCLUSIVE != 0) {
        // Its registration cannot be changed, and so cannot follow the connection into the ring.
        match conn.phase() {
            Phase::Fresh => conn.keep_to_kernel(),
            Phase::Early | Phase::Offered | Phase::Attached => {
                transition::decline(fd, index, Reason::KernelFeature);
            }
            _ => {}
        }
    }
    let _held = entry::keep(index)?;
    let known = find(set_index, fd, conn);
    match (op, event) {
        (libc::EPOLL_CTL_ADD, Some(event)) => {
            match known {
                Some((number, entry)) if entry.has(E_PARKED) => {
                    if (event.events | entry.events.load(Relaxed)) & EXCLUSIVE == 0 {
                        deferred::remember(set, entry);
                        entry.set_flag(E_PARKED, false);
                        return Some(modify(epfd, set, fd, (number, entry), event));
                    }
                    let _ = delete(epfd, fd, number, entry);
                }
                Some(_) => return Some(Err(libc::EEXIST)),
                None => {}
            }
            if conn.phase() == Phase::Listen {
                observer::inherited(fd, index);
            }
            if matches!(conn.phase(), Phase::Plain | Phase::Listen) {
                return None;
            }
            if event.events & EXCLUSIVE != 0 && conn.phase() == Phase::Fresh {
                return None;
            }
            const WITH_EXCLUSIVE: u32 = IN | OUT | events::ERR | HUP | WAKEUP | ET | EXCLUSIVE;
            if event.events & EXCLUSIVE != 0 && event.events & !WITH_EXCLUSIVE != 0 {
                return Some(Err(libc::EINVAL));
            }
            Some(add(epfd, set, set_index, fd, index, event))
        }
        _ if known.is_some_and(|(_, entry)| entry.has(E_PARKED)) => Some(Err(libc::ENOENT)),
        (libc::EPOLL_CTL_MOD, Some(event)) => Some(modify(epfd, set, fd, known?, event)),
        (libc::EPOLL_CTL_DEL, _) => {
            let (number, entry) = known?;
            if entry.has(E_DEFERRED) {
                if !deferred::ended(entry) {
                    unlink(number, entry);
                }
                return Some(Ok(()));
            }
            if !entry.has(E_RING) && deferred::owe_end(set, number, entry, conn) {
                return Some(Ok(()));
            }
            if entry.has(E_RING) && !conn.has(conn::F_SHARED) {
                park(set, conn, entry);
                return Some(Ok(()));
            }
            Some(delete(epfd, fd, number, entry))
        }
        _ => None,
    }
}

/// EPOLL_CTL_DEL without the system call.
fn park(set: &Set, conn: &Conn, entry: &Entry) {
    let _held = set.lock.enter();
    disarm(conn, entry);
    entry.set_flag(E_PARKED | E_DISABLED, true);
}

/// Deletes those of these entries for real that are parked, so that the kernel's view of the set is true; those that have
/// been rung for are looked at from now on.
pub fn unpark(set_index: u32) {
    deferred::pay(set_index);
    let set = set_at(set_index);
    entry::for_each_of(set_index, |number, entry| {
        if entry.has(E_PARKED) {
            let _ = end(number, entry);
            return;
        }
        asked::tidy(number, entry);
        let conn = conn::at(entry.conn.load(Relaxed));
        if entry.has(E_RING)
            && !entry.has(E_HOT | E_DISABLED)
            && conn.slot().is_some_and(|slot| bells::has_bells(conn, slot))
        {
            let _held = set.lock.enter();
            hot::heat(set, number, entry);
            hot::note_news(set);
        }
    });
}

fn add(
    epfd: i32,
    set: &Set,
    set_index: u32,
    fd: i32,
    index: u32,
    event: libc::epoll_event,
) -> Result<(), Errno> {
    let conn = conn::at(index);
    let number = entry::alloc().ok_or(libc::ENOSPC)?;
    let entry = entry::at(number).ok_or(libc::ENOSPC)?;
    let in_ring = conn.phase() == Phase::Ring;
    let asked = asked::needed(event.events);
    let events = if in_ring { asked.events() } else { event.events };
    entry.fd.store(fd as u32, Relaxed);
    entry.conn.store(index, Relaxed);
    entry.events.store(event.events, Relaxed);
    entry.data.store(event.u64, Relaxed);
    entry.seen_prod.store(0, Relaxed);
    entry.seen_bits.store(0, Relaxed);
    entry.round.store(0, Relaxed);
    entry.seen_blocks.store(u32::MAX, Relaxed);
    entry.flags.store(if in_ring { E_RING | E_EDGE | E_TCP } else { 0 }, Relaxed);
    if event.events & WRITE_BITS != 0 {
        note_room(set, entry);
    }
    entry.next.store(conn.watchers.load(Relaxed), Relaxed);
    // Release: pairs with the Acquire in `entry::for_each_of`.
    entry.set.store(set_index as u16 + 1, Release);
    conn.watchers.store(number + 1, Release);
    // SeqCst: a waiter that counts itself as asleep after this sees it, or is seen by `kick`.
    single::add(&set.tagged, 1);
    if deferred::owe(set, number, entry, conn) {
        return Ok(());
    }
    let hot = in_ring && {
        let _held = set.lock.enter();
        if would_tell(set, entry) {
            hot::note_news(set);
        }
        hot::heat(set, number, entry)
    };
    let u64 = tag_of(number, entry);
    let done =
        sys::epoll_ctl(epfd, libc::EPOLL_CTL_ADD, fd, &mut libc::epoll_event { events, u64 });
    if done.is_err() {
        unlink(number, entry);
    } else if in_ring {
        asked::record(entry, asked);
        asked::update(number, entry, wake(hot));
    }
    done
}

fn modify(
    epfd: i32,
    set: &Set,
    fd: i32,
    (number, entry): (u32, &Entry),
    event: libc::epoll_event,
) -> Result<(), Errno> {
    if (event.events | entry.events.load(Relaxed)) & EXCLUSIVE != 0 {
        return Err(libc::EINVAL);
    }
    let held = set.lock.enter();
    let conn = conn::at(entry.conn.load(Relaxed));
    // What is reported as long as it lasts is not changed by asking for the same again.
    const BY_CHANGE: u32 = ET | ONESHOT | WAKEUP;
    if entry.events.load(Relaxed) == event.events
        && event.events & BY_CHANGE == 0
        && !entry.has(E_RING | E_DISABLED)
        // Another process may have changed what the kernel knows.
        && !conn.has(conn::F_COPIED)
    {
        entry.data.store(event.u64, Relaxed);
        return Ok(());
    }
    let before = entry.events.load(Relaxed);
    // What is told as long as it lasts, and was to be told before, is no news.
    let was_told = entry.has(E_RING) && before & ET == 0 && would_tell(set, entry);
    // The counts depend on the events: take them back before these change.
    disarm(conn, entry);
    // The kernel goes on reporting what it has just reported in the order of before.
    let is_in_order = entry.round.load(Relaxed) == set.rounds.load(Relaxed) && before & ET == 0;
    if event.events & WRITE_BITS != 0 && !is_in_order {
        note_room(set, entry);
    }
    hot::change(set, entry, event.events);
    entry.data.store(event.u64, Relaxed);
    if (before | event.events) & ONESHOT != 0 {
        // Last: what is told beside this of what it was is not taken for the one event of what it is.
        entry.arm_anew();
    } else {
        entry.set_flag(E_DISABLED, false);
    }
    entry.set_flag(E_EDGE, true);
    if !entry.has(E_RING) {
        entry.set_flag(E_KNOWN, false);
        drop(held);
        if entry.has(E_DEFERRED) {
            return deferred::modified(number, entry);
        }
        if deferred::owe_change(set, number, entry, conn, before) {
            return Ok(());
        }
        let u64 = tag_of(number, entry);
        let mut kernel = libc::epoll_event { events: event.events, u64 };
        return sys::epoll_ctl(epfd, libc::EPOLL_CTL_MOD, fd, &mut kernel);
    }
    if !was_told && would_tell(set, entry) {
        hot::note_news(set);
    }
    let hot = hot::heat(set, number, entry);
    drop(held);
    asked::update(number, entry, wake(hot));
    Ok(())
}

/// Room is asked for. Those that have some are told of in the order in which they were asked for it, in TCP and in rings.
fn note_room(set: &Set, entry: &Entry) {
    entry.stamp.store(clock::tsc(), Relaxed);
    if !entry.has(E_RING) {
        // The next wait asks the kernel, whatever rings have to tell.
        set.kernel_at.store(0, Relaxed);
    }
}

/// A changed entry has to be looked at: by sleepers alone where the next wait looks at it by itself, as it is hot.
pub fn wake(hot: bool) -> Wake {
    if hot { Wake::Sleepers } else { Wake::Anybody }
}
