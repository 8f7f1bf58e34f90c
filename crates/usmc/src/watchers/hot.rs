//! The entries of a set that were active of late: they are looked at, all others are armed and ring.
//!
//! An entry becomes hot when the kernel reports its doorbell, and when it is added or modified. An entry that was not
//! active between two sleeps is armed and forgotten, so waits cost what the active connections cost.

use usmc_shm::layout::{ARM_TCP, Slot};
use usmc_shm::sync::Ordering::{Acquire, Relaxed, SeqCst};

use super::agent_ear;
use super::deferred;
use super::entry::{self, E_ACTIVE, E_ARMED, E_DISABLED, E_HOT, Entry};
use super::epoll;
use super::set::Set;
use crate::os::events::WRITE_BITS;
use crate::record::conn::{self, Conn};
use crate::record::phase::Phase;
use crate::stream::hearing::{EAR_LOOK_MS, Hearing};
use crate::stream::{bells, ready, room};
use crate::watchers::report;
use crate::watchers::set::{self, HOT};

/// A set that never sleeps sorts its hot entries out every so many waits.
const SWEEP_EVERY: u32 = 1024;

/// An entry that an ear serves stays hot for so many waits: to look at it costs less than a doorbell.
const LATELY: u32 = 32;

/// Puts an entry on the list, if there is room or room can be made; an entry that stays cold is armed.
/// Returns whether it is hot. The caller holds the set's lock.
pub fn heat(set: &Set, number: u32, entry: &Entry) -> bool {
    if !entry.has(E_ACTIVE) {
        entry.set_flag(E_ACTIVE, true);
    }
    if entry.has(E_HOT) {
        return true;
    }
    // Its place among these is about to mean another.
    deferred::forgive(set, entry);
    // What has come while it was not hot does not count: the thread that the kernel tells of it says so.
    add_to_print(set, 0u64.wrapping_sub(arrived(entry)));
    if set.hot_count.load(Relaxed) as usize == HOT && is_sweep_due(set) {
        sweep(set);
    }
    let count = set.hot_count.load(Relaxed);
    if count as usize == HOT {
        add_to_print(set, arrived(entry));
        epoll::arm(entry);
        return false;
    }
    set.was_hot.store(1, Relaxed);
    set.hot[count as usize].store(number, Relaxed);
    entry.hot_at.store(count, Relaxed);
    set.hot_count.store(count + 1, Relaxed);
    entry.set_flag(E_HOT, true);
    true
}

/// Takes an entry off the list. The caller holds the set's lock.
pub fn cool(set: &Set, entry: &Entry) {
    if !entry.has(E_HOT) {
        return;
    }
    entry.set_flag(E_HOT, false);
    add_to_print(set, arrived(entry));
    let last = set.hot_count.load(Relaxed) - 1;
    let (at, moved) = (entry.hot_at.load(Relaxed), set.hot[last as usize].load(Relaxed));
    set.hot[at as usize].store(moved, Relaxed);
    if let Some(moved) = entry::at(moved) {
        moved.hot_at.store(at, Relaxed);
    }
    set.hot_count.store(last, Relaxed);
}

/// What changes with each arrival at a hot entry: of bytes, of an end, of room.
fn arrived(entry: &Entry) -> u64 {
    let conn = conn::at(entry.conn.load(Relaxed));
    let Some(slot) = conn.slot() else { return 0 };
    let peer = conn.peer(slot);
    let ended = u64::from(peer.flags(Relaxed).bits()) << 48
        | u64::from(conn.kernel_events.load(Relaxed)) << 32;
    let rooms = u64::from(rooms(entry, conn, slot)) << 16;
    peer.prod.load(Acquire).wrapping_add(ended).wrapping_add(rooms)
}

/// How often room has come for a sender that had none, where that is waited for.
fn rooms(entry: &Entry, conn: &Conn, slot: &Slot) -> u32 {
    if entry.events.load(Relaxed) & WRITE_BITS == 0 {
        return 0;
    }
    let blocks = conn.tx_blocks.load(Relaxed);
    blocks - u32::from(blocks > 0 && !conn.tx(slot).is_writable())
}

/// Changes what an entry waits for, which is no arrival. The caller holds the set's lock.
pub fn change(set: &Set, entry: &Entry, events: u32) {
    let before = arrived(entry);
    entry.events.store(events, Relaxed);
    if entry.has(E_HOT) {
        add_to_print(set, before.wrapping_sub(arrived(entry)));
    }
}

/// The part of a set's [`print`] that does not come from its hot entries. The caller holds the set's lock.
fn add_to_print(set: &Set, more: u64) {
    set.print.store(set.print.load(Relaxed).wrapping_add(more), Relaxed);
}

/// Something is there to be told that no arrival in a ring tells of, for a thread that has the set in another, by edges. The
/// caller holds the set's lock.
pub fn note_news(set: &Set) {
    add_to_print(set, 1);
}

/// A number that changes with each arrival at the set, and not by entries that become hot or cool off.
pub fn print(set: &Set) -> u64 {
    let Some(_held) = set.lock.enter() else { return 0 };
    let hot = &set.hot[..set.hot_count.load(Relaxed) as usize];
    let arrived = hot.iter().filter_map(|place| entry::at(place.load(Relaxed))).map(arrived);
    arrived.fold(set.print.load(Relaxed), u64::wrapping_add)
}

/// The tag of the hot entry at this place; `None` behind the last.
pub fn tag_at(set: &Set, at: usize) -> Option<u64> {
    let _held = set.lock.enter()?;
    let hot = &set.hot[..set.hot_count.load(Relaxed) as usize];
    let number = hot.get(at)?.load(Relaxed);
    Some(set::tag_of(number, entry::at(number)?))
}

/// Calls `act` with the first `most` hot entries.
pub fn each(set: &Set, most: usize, mut act: impl FnMut(u32, &'static Entry)) {
    let Some(_held) = set.lock.enter() else { return };
    let count = (set.hot_count.load(Relaxed) as usize).min(most);
    for place in &set.hot[..count] {
        let number = place.load(Relaxed);
        if let Some(entry) = entry::at(number) {
            act(number, entry);
        }
    }
}

/// When a sleeper has to look again by itself.
#[derive(Clone, Copy, Default)]
pub struct Looks {
    /// What wakes it.
    pub hearing: Hearing,
    /// In so many nanoseconds: it waits for room, and perhaps in vain ([`room::look_in_ns`]).
    pub stuck_ns: Option<u64>,
}

impl Looks {
    /// What both say.
    pub fn and(self, other: Looks) -> Looks {
        let stuck_ns = match (self.stuck_ns, other.stuck_ns) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        Looks { hearing: self.hearing.max(other.hearing), stuck_ns }
    }

    /// The longest sleep; `None` = for ever.
    pub fn most_ns(self) -> Option<u64> {
        const MS: u64 = 1_000_000;
        let look_ns = match self.hearing {
            Hearing::Bells => None,
            Hearing::Ear => Some(EAR_LOOK_MS * MS),
            Hearing::Nothing => Some(MS),
        };
        [look_ns, self.stuck_ns].into_iter().flatten().min()
    }

    /// The sleep is one that the ear does not end.
    pub fn without_ear(self) -> Looks {
        let hearing =
            if self.hearing == Hearing::Bells { Hearing::Bells } else { Hearing::Nothing };
        Looks { hearing, ..self }
    }
}

/// Before a sleep: hot entries ask for their doorbells, and those that were not active are let go.
pub fn arm(set: &Set) -> Looks {
    let Some(_held) = set.lock.enter() else { return Looks::default() };
    sort_out(set, true)
}

/// When a sleep for room on this entry has to look for itself, if it waits for any. Nobody rings for that, so it stays hot.
fn stuck_ns(entry: &Entry) -> Option<u64> {
    let conn = conn::at(entry.conn.load(Relaxed));
    let waits = !entry.has(E_DISABLED)
        && entry.events.load(Relaxed) & WRITE_BITS != 0
        && conn.phase() == Phase::Ring;
    room::look_in_ns(conn, conn.slot().filter(|_| waits)?)
}

/// Takes a connection out of the ring whose room is waited for in this set, and in vain. Whether there was one.
pub fn leave_stuck(set: &Set) -> bool {
    (0..).map_while(|at| tag_at(set, at)).any(|tag| match set::entry_of(tag) {
        Some((number, entry)) if number != u32::MAX && stuck_ns(entry).is_some() => {
            room::leave_if_stuck(set::live_fd(entry), entry.conn.load(Relaxed), || true)
        }
        _ => false,
    })
}

/// Lets entries go that were not active since the last time. The caller holds the set's lock.
pub fn sweep(set: &Set) {
    set.swept.store(set.rounds.load(Relaxed), Relaxed);
    sort_out(set, false);
}

/// Keeps the list short where the set never sleeps. The caller holds the set's lock.
pub fn sweep_now_and_then(set: &Set, round: u32) {
    if round.wrapping_sub(set.swept.load(Relaxed)) > SWEEP_EVERY {
        sweep(set);
    }
}

fn is_sweep_due(set: &Set) -> bool {
    set.rounds.load(Relaxed).wrapping_sub(set.swept.load(Relaxed)) > 16
}

/// Whether one of the last waits has told of the entry.
fn was_told_lately(set: &Set, entry: &Entry) -> bool {
    set.rounds.load(Relaxed).wrapping_sub(entry.round.load(Relaxed)) < LATELY
}

fn sort_out(set: &Set, arm_all: bool) -> Looks {
    let mut looks = Looks::default();
    // From the end: taking one off moves the last one into its place.
    for at in (0..set.hot_count.load(Relaxed) as usize).rev() {
        let Some(entry) = entry::at(set.hot[at].load(Relaxed)) else { continue };
        let conn = conn::at(entry.conn.load(Relaxed));
        let active = entry.has(E_ACTIVE);
        if active {
            entry.set_flag(E_ACTIVE, false);
        }
        if entry.has(E_DISABLED) {
            if !active {
                cool(set, entry);
            }
            continue;
        }
        let Some(slot) = conn.slot() else { continue };
        let want = entry.events.load(Relaxed);
        let hearing = ready::hearing(conn, slot, want);
        let stuck_ns = stuck_ns(entry);
        let is_idle = !active && hearing == Hearing::Bells && stuck_ns.is_none();
        let bit = if arm_all { agent_ear::bit(set, conn, slot) } else { ARM_TCP };
        let let_go = is_idle && (bit == ARM_TCP || !was_told_lately(set, entry));
        if let_go || arm_all {
            if bells::owes_ack(conn, slot) {
                bells::clear_bells(set::live_fd(entry), conn, slot);
            }
            // What is let go of is found by its doorbell alone.
            let bit = if let_go { ARM_TCP } else { bit };
            if !entry.has(E_ARMED) || want & WRITE_BITS != 0 || !conn.rx(slot).is_rx_armed_by(bit) {
                epoll::arm_by(entry, bit);
            }
            looks = looks.and(Looks { hearing, stuck_ns });
            // It may have become ready before it was armed.
            if let_go && report::take_events(entry, true) == 0 {
                cool(set, entry);
            }
        }
    }
    looks
}

/// After a sleep: somebody looks now, and further doorbells would be for nothing.
pub fn disarm(set: &Set) {
    if set.hot_count.load(Relaxed) == 0 {
        return;
    }
    each(set, HOT, |_, entry| {
        // Under the lock: a thread that counts itself as asleep after this look arms after we are through.
        if set.sleepers.load(SeqCst) == 0 && entry.has(E_ARMED) {
            epoll::disarm(conn::at(entry.conn.load(Relaxed)), entry);
        }
    });
}
