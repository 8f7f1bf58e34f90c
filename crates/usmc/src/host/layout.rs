//! The device file: identity, processes, listeners, offers. Fixed size, all atomics.

use usmc_shm::board::{Listener, Offer};
use usmc_shm::sync::{AtomicU32, AtomicU64};

/// First eight bytes.
pub const MAGIC: u64 = u64::from_le_bytes(*b"uSMC-ism");
/// Changes whenever a field here moves.
pub const VERSION: u32 = 5;
/// Begins the names of all files of this [`VERSION`]. Processes of others use the directory beside us, with files of
/// their own: they do not meet, and their connections with ours stay TCP.
pub const PREFIX: &str = "v5.";
const _: () = assert!((PREFIX.as_bytes()[1] - b'0') as u32 == VERSION && PREFIX.len() == 3);
/// Processes that use the device at one time.
pub const PROCESSES: usize = 4096;
/// Listening sockets.
pub const LISTENERS: usize = 4096;
/// Offers pending at one time.
pub const OFFERS: usize = 16384;
/// Connections that were passed on from process to process.
pub const PASSED_ON: usize = 1024;
/// Places of one bucket of their table.
pub const PASSED_ON_WAYS: usize = 8;
/// Byte locks that stand for live processes begin here, far behind the file's end.
pub const LOCK_BASE: i64 = 1 << 40;

/// Start of the file.
#[repr(C, align(4096))]
pub struct Header {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Processes from this index on were never used.
    pub high_water: AtomicU32,
    /// The device's GID (128 bits, random).
    pub gid: [AtomicU64; 2],
    /// Counts the uses of `usmc off` and `usmc on`: odd while no connection is to leave TCP. 0 in the files of builds that do not know it.
    pub switch: AtomicU64,
}

/// One process: the holder of the byte lock `LOCK_BASE + index`.
#[repr(C, align(64))]
pub struct Process {
    /// Counts the owners of this index.
    pub incarnation: AtomicU32,
    /// pid in the owner's namespace, for people.
    pub pid: AtomicU32,
    /// 1 while the owner has a mailbox socket and listeners to clean up after.
    pub in_use: AtomicU32,
    /// Segments pushed to its mailbox so far.
    pub mail: AtomicU32,
}

/// A connection that was passed on ([`super::passed_on`]).
#[repr(C, align(64))]
pub struct PassedOnCell {
    /// SO_COOKIE of the socket; 0 free.
    pub cookie: AtomicU64,
    /// Holders in bits 0-31, 1 = the connecting end in bit 32, count of uses above.
    pub state: AtomicU64,
    /// Holders that are to come.
    pub pending: [AtomicU64; 4],
    /// Holders that are one process each, by their ids ([`crate::os::members`]); not all of them.
    pub members: [AtomicU32; 3],
    /// The namespace of these ids ([`crate::os::process::namespace`]); 0 unknown.
    pub namespace: AtomicU32,
}

/// The whole file.
#[repr(C)]
pub struct DeviceFile {
    /// Identity.
    pub header: Header,
    /// Processes.
    pub processes: [Process; PROCESSES],
    /// Listeners.
    pub listeners: [Listener; LISTENERS],
    /// Offers.
    pub offers: [Offer; OFFERS],
    /// Connections that were passed on.
    pub passed_on: [PassedOnCell; PASSED_ON],
}

// 32-bit and 64-bit processes share the file.
const _: () = {
    use core::mem::offset_of;
    assert!(PROCESSES <= usmc_shm::region::units::Member::PROCESSES);
    assert!(
        size_of::<Header>() == 4096
            && offset_of!(Header, gid) == 16
            && offset_of!(Header, switch) == 32
    );
    assert!(size_of::<Process>() == 64 && offset_of!(Process, mail) == 12);
    assert!(offset_of!(DeviceFile, listeners) == 4096 + PROCESSES * 64);
    assert!(size_of::<PassedOnCell>() == 64 && offset_of!(PassedOnCell, pending) == 16);
    let before = 4096 + (PROCESSES + LISTENERS) * 64 + OFFERS * 128;
    assert!(offset_of!(DeviceFile, passed_on) == before);
    assert!(size_of::<DeviceFile>() == (before + PASSED_ON * 64).next_multiple_of(4096));
};
