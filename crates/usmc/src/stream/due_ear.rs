//! How a process comes to an agent's ear ([`crate::device::room_ear`]): a thread that is about to sleep asks for it.

use usmc_shm::sync::AtomicU32;
use usmc_shm::sync::Ordering::Relaxed;

use crate::device::{room_ear, segment};
use crate::handshake::clc::deputy;
use crate::record::conn::{self, Conn, F_DEPUTY};

/// The connection for whose room an ear is to be had, plus one; 0 = none is.
static DUE: AtomicU32 = AtomicU32::new(0);

/// A doorbell was sent.
pub fn rang(conn: &Conn) {
    if conn.has(F_DEPUTY) && room_ear::is_due(conn.segment.load(Relaxed)) {
        DUE.store(conn::index_of(conn) + 1, Relaxed);
    }
}

/// Gets the ear that is due, if one is. The caller holds no lock, and is about to sleep.
#[inline]
pub fn get_due() {
    if DUE.load(Relaxed) != 0 {
        get();
    }
}

#[cold]
fn get() {
    let Some(conn) = DUE.swap(0, Relaxed).checked_sub(1).map(conn::at) else { return };
    let (segment, room) = (conn.segment.load(Relaxed), conn.clc.room.load(Relaxed));
    // It may have been closed meanwhile, and its record be another's.
    if conn.has(F_DEPUTY)
        && let Ok(ear) = deputy::room_ear(conn, room)
    {
        segment::keep_ear(segment, room, ear);
    }
}
