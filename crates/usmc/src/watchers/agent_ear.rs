//! The ears that agents have given a set ([`usmc_shm::agent::Request::Ear`]): UNIX sockets by which an agent wakes the set's sleeper, at a part of
//! what a doorbell costs both.
//!
//! ```text
//!   (unknown) ──DUE doorbells asked for──▶ asked for ──▶ Has(number) ──the set is closed, or the agent has closed the room──▶ (unknown)
//!                                              └───────▶ Never ──the set is closed──────────────────────────────────────────▲
//! ```
//!
//! A set that has ears of [`ROOMS`] rooms gets no other, and is woken by doorbells for the rest.
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
const ROOMS: usize = 8;
/// So many doorbells asked for are worth an ear.
const DUE: u32 = 16;
/// The sockets are emptied behind so many wake-ups: nobody else reads, and one holds some 270 bytes.
const READ_BEHIND: u32 = 32;
/// [`Room::number`] where the agent gives none.
const NEVER: u32 = u32::MAX;

/// The ears of one set. All zeros: none.
pub struct Ears {
    rooms: [Room; ROOMS],
    /// How often a doorbell was asked for that an ear could replace.
    rang: AtomicU32,
    /// The connection for whose room an ear is to be had, plus one; 0 = none is.
    due: AtomicU32,
    /// Wake-ups since the sockets were emptied.
    heard: AtomicU32,
}

/// A room of an agent's, which is one segment.
struct Room {
    /// The segment's identity; 0 = a free place.
    id: AtomicU64,
    number: AtomicU32,
    /// The socket, plus one; 0 = none.
    fd: AtomicU32,
}

impl Room {
    fn socket(&self) -> Option<i32> {
        self.fd.load(Relaxed).checked_sub(1).map(u32::cast_signed)
    }

    /// The caller holds the set's lock, or has it alone.
    fn forget(&self) {
        self.id.store(0, Relaxed);
        if let Some(socket) = self.socket() {
            self.fd.store(0, Relaxed);
            table::release_fd(socket);
        }
    }
}

impl Ears {
    /// Another set uses the record, or its last number was closed. As [`Room::forget`].
    pub fn forget(&self) {
        self.rooms.iter().for_each(Room::forget);
        for cell in [&self.rang, &self.due, &self.heard] {
            cell.store(0, Relaxed);
        }
    }

    fn room(&self, id: u64) -> Option<&Room> {
        self.rooms.iter().find(|room| id != 0 && room.id.load(Relaxed) == id)
    }

    fn free_place(&self) -> Option<&Room> {
        self.rooms.iter().find(|room| room.id.load(Relaxed) == 0)
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
    if ears.free_place().is_some() {
        let rang = ears.rang.load(Relaxed).wrapping_add(1);
        ears.rang.store(rang, Relaxed);
        if rang.is_multiple_of(DUE) {
            ears.due.store(conn::index_of(conn) + 1, Relaxed);
        }
    }
    false
}

/// A registration of the connection ends: another set may have it next. The caller holds the set's lock.
pub fn unlinked(set: &Set, conn: &Conn) {
    if !conn.has(F_DEPUTY) {
        return;
    }
    if let (Some(slot), Some(room)) = (conn.slot(), set.ears.room(conn.clc.room.load(Relaxed)))
        && room.number.load(Relaxed) != NEVER
    {
        conn.end(slot).forget_ear(room.number.load(Relaxed));
    }
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
    let Ok(given) = deputy::ear(conn, id) else { return };
    let given = given.map(|(number, socket)| (number, table::keep_fd(socket)));
    let held = set.lock.enter();
    let ears = &set.ears;
    // Another thread may have been faster, or have closed the set.
    let is_wanted = held.is_some() && ears.room(id).is_none() && set.refs.load(Relaxed) != 0;
    let Some(room) = ears.free_place().filter(|_| is_wanted) else {
        given.inspect(|(_, socket)| table::release_fd(*socket));
        return;
    };
    room.number.store(NEVER, Relaxed);
    if let Some((number, socket)) = given {
        room.fd.store(socket.cast_unsigned() + 1, Relaxed);
        if set::watch_ear(index, socket) {
            room.number.store(number, Relaxed);
        }
    }
    room.id.store(id, Relaxed);
}

/// An agent has woken a sleeper, or something else is over. The caller holds no lock.
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
    let into = scratch.as_mut_ptr();
    for room in &set.ears.rooms {
        let Some(socket) = room.socket() else { continue };
        // SAFETY: writable for its length.
        let read = || unsafe { sys::recv(socket, into, SOME, libc::MSG_DONTWAIT) };
        // The end: the agent has closed the room.
        if (0..SOME).map(|_| read()).find(|read| *read != Ok(SOME)) == Some(Ok(0)) {
            room.forget();
        }
    }
}
