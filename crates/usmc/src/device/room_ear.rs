//! The ears of agents, one for each room of theirs that this process has mapped ([`usmc_shm::agent::Request::RoomEar`]): an eventfd that wakes the
//! agent, at a part of what a doorbell costs.
//!
//! ```text
//!   Unknown ──DUE doorbells──▶ due, asked for ──▶ Has(eventfd) ──the room is unmapped──▶ Unknown
//!                                     └─────────▶ Never ───────────────────────────────────▲
//! ```

use core::ptr;
use usmc_shm::layout::SegmentHeader;
use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed, Release};
use usmc_shm::sync::{AtomicPtr, AtomicU32};

use super::segment::SEGMENTS;
use crate::os::{sys, table};

/// So many doorbells are worth an ear.
const DUE: u32 = 16;
/// [`Room::ear`]: the agent gives none.
const NEVER: u32 = u32::MAX;

/// An agent's room; its place is the segment's in the table of segments.
struct Room {
    header: AtomicPtr<SegmentHeader>,
    /// The eventfd, plus one; 0 = not known.
    ear: AtomicU32,
    /// Doorbells so far.
    rang: AtomicU32,
}

static ROOMS: [Room; SEGMENTS] = [const {
    Room {
        header: AtomicPtr::new(ptr::null_mut()),
        ear: AtomicU32::new(0),
        rang: AtomicU32::new(0),
    }
}; SEGMENTS];

/// Wakes the agent for a slot of its room. False where it has to be done by a doorbell. The caller's connection has the slot.
pub fn ring(segment: u32, slot: u32) -> bool {
    let Some(room) = ROOMS.get(segment as usize) else { return false };
    // Acquire: the header was stored before.
    let ear = room.ear.load(Acquire);
    if ear == 0 || ear == NEVER || slot >= u64::BITS {
        return false;
    }
    // SAFETY: the segment's, which is mapped as long as a connection has a slot of it, and forgotten before it is unmapped.
    let header = unsafe { &*room.header.load(Relaxed) };
    // AcqRel: the agent that takes the bit sees what it was set for. One that has not taken an earlier bit is about to look.
    header.rang.fetch_or(1 << slot, AcqRel) != 0 || sys::add_one((ear - 1).cast_signed()).is_ok()
}

/// A doorbell was sent to an agent. Whether an ear is to be asked for.
pub fn is_due(segment: u32) -> bool {
    let Some(room) = ROOMS.get(segment as usize) else { return false };
    let rang = room.rang.load(Relaxed).wrapping_add(1);
    room.rang.store(rang, Relaxed);
    rang.is_multiple_of(DUE) && room.ear.load(Relaxed) == 0
}

/// The agent's answer. The caller holds the table's lock.
pub(super) fn keep(segment: u32, header: &SegmentHeader, ear: Option<i32>) {
    let Some(room) = ROOMS.get(segment as usize).filter(|room| room.ear.load(Relaxed) == 0) else {
        ear.inspect(|ear| table::release_fd(*ear));
        return;
    };
    room.header.store(ptr::from_ref(header).cast_mut(), Relaxed);
    room.ear.store(ear.map_or(NEVER, |ear| ear.cast_unsigned() + 1), Release);
}

/// The segment is about to be unmapped. The caller holds the table's lock, and no connection has a slot there.
pub(super) fn forget(segment: u32) {
    let Some(room) = ROOMS.get(segment as usize) else { return };
    let ear = room.ear.swap(0, AcqRel);
    room.rang.store(0, Relaxed);
    if ear != 0 && ear != NEVER {
        table::release_fd((ear - 1).cast_signed());
    }
}
