//! The device file: identity, processes, listeners, offers. Fixed size, all atomics.

use usmc_shm::sync::Ordering::{AcqRel, Acquire, Relaxed};
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
/// Places a listener may take from its hash on.
pub const LISTENER_PROBES: usize = 64;
/// Offers pending at one time.
pub const OFFERS: usize = 16384;
/// Places of one bucket of the offer table. The first places of all buckets lie together, then the second ones, and so on:
/// offers are short-lived, so that the rest is hardly ever touched and takes no memory.
pub const OFFER_WAYS: usize = 16;
/// Buckets of the offer table.
pub const OFFER_BUCKETS: usize = OFFERS / OFFER_WAYS;
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

/// A listening address. `state` is 0 = free or the owner's process index + 1.
#[repr(C, align(64))]
pub struct Listener {
    /// Owner's index + 1; 0 free; [`LISTENER_CLAIMED`] while being written.
    pub state: AtomicU32,
    /// Host order.
    pub port: AtomicU32,
    /// Namespace.
    pub netns: AtomicU64,
    /// Address, v4-mapped.
    pub addr: [AtomicU64; 2],
    /// When it was last freed by its owner, CLOCK_MONOTONIC nanoseconds.
    pub left_at: AtomicU64,
    /// The owner's effective user id when it registered.
    pub uid: AtomicU32,
}

/// A place that is being filled.
pub const LISTENER_CLAIMED: u32 = u32::MAX;

/// `Offer::state`: phase in bits 0-7, owner's process index in 8-31, use count in 32-63.
pub mod offer_phase {
    /// Nothing here.
    pub const FREE: u8 = 0;
    /// Its owner is writing it.
    pub const CLAIMED: u8 = 1;
    /// Waits for the acceptor.
    pub const OFFERED: u8 = 2;
    /// The acceptor does not know the segment.
    pub const WANTED: u8 = 3;
    /// The segment is in the acceptor's mailbox.
    pub const PUSHED: u8 = 4;
    /// From here on: a handshake by CLC ([`crate::host::agreements`]). The client asks whether anybody holds the
    /// connection's other end.
    pub const OPEN: u8 = 5;
    /// The acceptor does.
    pub const HELD: u8 = 6;
    /// A Proposal is in the stream, or just about to be.
    pub const PROPOSED: u8 = 7;
    /// The acceptor's answer is.
    pub const ANSWERED: u8 = 8;
    /// The client's Confirm is.
    pub const CONFIRMED: u8 = 9;
    /// The sender of the last message, a Proposal or an answer, does not want one in return any more.
    pub const ABANDONED: u8 = 10;
    /// It came to nothing, and no message is in the stream.
    pub const OVER: u8 = 11;
}

/// One offer.
#[repr(C, align(128))]
pub struct Offer {
    /// See [`offer_phase`]. 0 = never used, nor are the further places of this bucket.
    pub state: AtomicU64,
    /// The connection ([`crate::record::tuple::Tuple::words`]).
    pub tuple: [AtomicU64; 6],
    /// Segment identity.
    pub segment: AtomicU64,
    /// Slot.
    pub slot: AtomicU32,
    /// Use of the slot.
    pub usage: AtomicU32,
    /// Process index of the acceptor that wants the segment, or that holds the connection's other end.
    pub wanted_by: AtomicU32,
    /// Process index of the client. The owner in `state` is the end that has still to read a message, and changes.
    pub client: AtomicU32,
    /// Where in its direction's stream a CLC message stands, plus one: the client's Proposal, the answer, what the
    /// client says to that. 0 = none.
    pub message_at: [AtomicU64; 3],
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
    assert!(size_of::<Header>() == 4096 && offset_of!(Header, gid) == 16);
    assert!(size_of::<Process>() == 64 && offset_of!(Process, mail) == 12);
    assert!(size_of::<Listener>() == 64 && offset_of!(Listener, left_at) == 32);
    assert!(offset_of!(Listener, uid) == 40);
    assert!(size_of::<Offer>() == 128 && offset_of!(Offer, wanted_by) == 72);
    assert!(offset_of!(Offer, client) == 76 && offset_of!(Offer, message_at) == 80);
    assert!(offset_of!(DeviceFile, listeners) == 4096 + PROCESSES * 64);
    assert!(size_of::<PassedOnCell>() == 64 && offset_of!(PassedOnCell, pending) == 16);
    let before = 4096 + (PROCESSES + LISTENERS) * 64 + OFFERS * 128;
    assert!(offset_of!(DeviceFile, passed_on) == before);
    assert!(size_of::<DeviceFile>() == (before + PASSED_ON * 64).next_multiple_of(4096));
};

impl Offer {
    /// How it is.
    pub fn seen(&self) -> OfferState {
        // Acquire: pairs with the Release of each step; what its author wrote before is visible.
        self.state.load(Acquire).into()
    }

    /// One step further; false where somebody else was faster with another.
    pub fn step(&self, seen: OfferState, next: OfferState) -> bool {
        // AcqRel: a process that sees the step sees what was written before it.
        self.state.compare_exchange(seen.into(), next.into(), AcqRel, Relaxed).is_ok()
    }
}

/// An offer's state word, unpacked.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct OfferState {
    /// [`offer_phase`].
    pub phase: u8,
    /// Process index of the offerer.
    pub owner: u32,
    /// Use count.
    pub use_count: u32,
}

impl From<u64> for OfferState {
    fn from(word: u64) -> OfferState {
        OfferState {
            phase: word as u8,
            owner: (word >> 8) as u32 & 0xff_ffff,
            use_count: (word >> 32) as u32,
        }
    }
}

impl From<OfferState> for u64 {
    fn from(s: OfferState) -> u64 {
        s.phase as u64 | ((s.owner & 0xff_ffff) as u64) << 8 | (s.use_count as u64) << 32
    }
}
