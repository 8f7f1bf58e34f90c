//! Doors for the fuzz targets (`fuzz/`): the parts that meet a peer's bytes without a libc symbol in between.

use usmc_shm::layout::Slot;
use usmc_shm::sync::Ordering::Relaxed;

pub use crate::host::layout;
pub use crate::host::{
    DmbRef, FoundOffer, Mail, OfferId, PassedOn, PeerProcess, Receiver, current as device,
};
pub use crate::os::foreign_fd::forget as forget_strangers;
pub use crate::record::tuple::{Endpoint, Tuple, hash, netns};

/// The segments of this process.
pub mod segment {
    pub use crate::device::LOOPBACK;
    pub use crate::device::segment::{
        InUse, OwnSlot, fd_of, let_go, map_peer, take_slot, unuse, use_peer,
    };
}

use crate::family::holders;
use crate::os::table::{self, Entry};
use crate::record::conn::{self, Conn};
use crate::record::phase::Phase;

fn conn(fd: i32) -> Option<&'static Conn> {
    match table::get(fd) {
        Entry::Conn(index) => Some(conn::at(index)),
        _ => None,
    }
}

/// Whether the connection is in the ring.
pub fn is_ring(fd: i32) -> bool {
    conn(fd).is_some_and(|conn| conn.phase() == Phase::Ring)
}

/// Its slot, as this process has it mapped, once there is one.
pub fn slot_of(fd: i32) -> Option<&'static Slot> {
    conn(fd)?.slot()
}

/// What the offer of this connection says, once there is one: segment table index and slot.
pub fn offered(fd: i32) -> Option<(u32, u32)> {
    let conn = conn(fd)?;
    conn.slot()?;
    Some((conn.segment.load(Relaxed), conn.slot_index.load(Relaxed)))
}

/// The connection is used as if a child had it, too: by the slot's locks.
pub fn share(fd: i32) {
    if let Some(conn) = conn(fd) {
        holders::share(conn);
    }
}
