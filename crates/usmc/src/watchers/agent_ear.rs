//! The ears that agents have given a set ([`usmc_shm::agent::Request::Ear`]): pipes by which an agent wakes the set's sleeper, at a part of what a
//! doorbell costs both.
//!
//! ```text
//!   (unknown) ──DUE sleeps by doorbells──▶ asked for ──▶ Has(number) ──the set is closed, or others need the place──▶ (unknown)
//!                                              └───────▶ Never
//! ```
//!
//! An ear serves hot entries of a set in which one thread sleeps: a second one that sleeps there, too, is woken for what the first one does not
//! take only by a doorbell that it finds in the stream. Where the ear is not known to the agent, or hears nothing, the agent rings.

use usmc_shm::layout::{ARM_EAR, ARM_TCP, Slot};
use usmc_shm::sync::Ordering::{Relaxed, SeqCst};
use usmc_shm::sync::{AtomicU32, AtomicU64};

use super::set::{self, Set};
use crate::handshake::clc::deputy;
use crate::os::{sys, table};
use crate::record::conn::{self, Conn, F_DEPUTY, F_SHARED};

/// Rooms of agents with an ear in one set.
const ROOMS: usize = 4;
/// So many sleeps without one are worth an ear.
const DUE: u32 = 16;
/// The pipes are emptied behind so many events: nobody else reads, and each has a page.
const READ_BEHIND: u32 = 64;
/// [`Room::number`] where the agent gives none.
const NEVER: u32 = u32::MAX;

/// The ears of one set. All zeros: none.
pub struct Ears {
    rooms: [Room; ROOMS],
    /// Where the next room goes once all places are taken.
    next: AtomicU32,
    /// Sleeps in which a doorbell was asked for that an ear could replace.
    rang: AtomicU32,
    /// The connection for whose room an ear is to be had, plus one; 0 = none is.
    due: AtomicU32,
    /// Events since the pipes were emptied.
    heard: AtomicU32,
}

/// A room of an agent's, which is one segment.
struct Room {
    /// The segment's identity; 0 = a free place.
    id: AtomicU64,
    number: AtomicU32,
    /// The pipe, plus one; 0 = none.
    fd: AtomicU32,
}

impl Room {
    fn pipe(&self) -> Option<i32> {
        self.fd.load(Relaxed).checked_sub(1).map(u32::cast_signed)
    }

    /// The caller holds the set's lock, or has it alone.
    fn forget(&self) {
        self.id.store(0, Relaxed);
        if let Some(pipe) = self.pipe() {
            self.fd.store(0, Relaxed);
            table::release_fd(pipe);
        }
    }
}

impl Ears {
    /// Another set uses the record, or its last number was closed.
    pub fn forget(&self) {
        self.rooms.iter().for_each(Room::forget);
        for cell in [&self.rang, &self.due, &self.heard] {
            cell.store(0, Relaxed);
        }
    }

    fn room(&self, id: u64) -> Option<&Room> {
        self.rooms.iter().find(|room| room.id.load(Relaxed) == id)
    }
}

/// What the sleeper of the set is to be woken by (`ARM_*`) for a connection that stays hot. The caller holds the set's lock.
#[inline]
pub fn bit(set: &Set, conn: &Conn, slot: &Slot) -> u32 {
    if conn.has(F_DEPUTY) && serves(set, conn, slot) { ARM_EAR } else { ARM_TCP }
}

fn serves(set: &Set, conn: &Conn, slot: &Slot) -> bool {
    // SeqCst: a thread that comes to sleep meanwhile arms behind this one, or is counted.
    let is_alone = set.sleepers.load(SeqCst) == 1 && set.is_watched.load(SeqCst) == 0;
    if !is_alone || conn.has(F_SHARED) {
        return false;
    }
    let ears = &set.ears;
    if let Some(room) = ears.room(conn.clc.room.load(Relaxed)) {
        let number = room.number.load(Relaxed);
        return number != NEVER && conn.end(slot).hears_by(number);
    }
    let rang = ears.rang.load(Relaxed) + 1;
    ears.rang.store(rang, Relaxed);
    if rang >= DUE {
        ears.rang.store(0, Relaxed);
        ears.due.store(conn::index_of(conn) + 1, Relaxed);
    }
    false
}

/// Gets the ear that is due, if one is. The caller holds no lock, and is about to sleep.
#[inline]
pub fn get_due(set: &Set, index: u32) {
    if let Some(conn) = set.ears.due.load(Relaxed).checked_sub(1) {
        set.ears.due.store(0, Relaxed);
        get(set, index, conn::at(conn));
    }
}

#[cold]
fn get(set: &Set, index: u32, conn: &Conn) {
    let id = conn.clc.room.load(Relaxed);
    // It may have been closed meanwhile, and its record be another's.
    if id == 0 || !conn.has(F_DEPUTY) {
        return;
    }
    let given = deputy::ear(conn).map(|(number, pipe)| (number, table::keep_fd(pipe)));
    let held = set.lock.enter();
    let ears = &set.ears;
    // Another thread may have been faster.
    if held.is_none() || ears.room(id).is_some() {
        given.inspect(|(_, pipe)| table::release_fd(*pipe));
        return;
    }
    let next = || &ears.rooms[ears.next.fetch_add(1, Relaxed) as usize % ROOMS];
    let room = ears.room(0).unwrap_or_else(next);
    room.forget();
    room.number.store(NEVER, Relaxed);
    if let Some((number, pipe)) = given {
        room.fd.store(pipe.cast_unsigned() + 1, Relaxed);
        if set::watch_ear(index, pipe) {
            room.number.store(number, Relaxed);
        }
    }
    room.id.store(id, Relaxed);
}

/// An ear has ended a sleep, or something else that is over.
pub fn heard(set: &Set) {
    let heard = set.ears.heard.load(Relaxed) + 1;
    set.ears.heard.store(heard, Relaxed);
    if heard >= READ_BEHIND {
        set.ears.heard.store(0, Relaxed);
        empty(set);
    }
}

#[cold]
fn empty(set: &Set) {
    let Some(_held) = set.lock.enter() else { return };
    const SOME: usize = 512;
    let mut scratch = [0u8; SOME];
    let into = scratch.as_mut_ptr().cast();
    for pipe in set.ears.rooms.iter().filter_map(Room::pipe) {
        // SAFETY: writable for its length.
        while unsafe { sys::read_now(pipe, into, SOME) } == Ok(SOME) {}
    }
}
