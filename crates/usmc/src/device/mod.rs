//! The device, a seam: where listeners are known, offers are left and DMBs change hands.
//!
//! Control plane only. The data path never comes here: once a DMB is mapped, both ends work in the ring.
//! A new device is one module that implements [`Device`]; nothing above it changes.

pub mod loopback;

use crate::reason::Reason;
use crate::sys::Errno;
use crate::tuple::{Endpoint, Tuple};

/// A memory buffer both ends map: segment identity and the slot within it (SMC-D: DMB token).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DmbRef {
    /// The segment's random identity.
    pub segment: u64,
    /// Slot within it.
    pub slot: u32,
    /// Which use of the slot (`usmc_shm::handshake::Use`).
    pub usage: u32,
}

/// A place in the device's offer table, with the use count that tells later uses apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OfferId {
    /// Index.
    pub index: u32,
    /// Use count.
    pub use_count: u32,
}

/// A process on this device, as the device numbers them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerProcess(pub u32);

/// What an acceptor finds for its connection.
#[derive(Clone, Copy, Debug)]
pub struct FoundOffer {
    /// Where.
    pub id: OfferId,
    /// What is offered.
    pub dmb: DmbRef,
}

/// A device's control operations. None of them waits for a peer.
pub trait Device: Sync {
    /// Makes a listening address known.
    ///
    /// # Errors
    /// The reason why connections to it stay TCP.
    fn register_listener(&self, netns: u64, at: Endpoint) -> Result<u32, Reason>;
    /// Forgets a listening address registered by this process.
    fn unregister_listener(&self, token: u32);
    /// Whether anybody on this device listens there (maybe already dead: harmless), in this network namespace or,
    /// with `None`, in any.
    fn is_listening(&self, netns: Option<u64>, at: Endpoint) -> bool;

    /// Leaves an offer for the acceptor of `tuple`.
    ///
    /// # Errors
    /// The reason why the connection stays TCP.
    fn offer(&self, tuple: &Tuple, dmb: DmbRef) -> Result<OfferId, Reason>;
    /// Takes an offer back or clears an answered one.
    fn clear_offer(&self, id: OfferId);
    /// Who asked for the offered segment, if anybody did and nobody pushed it yet.
    fn wanted_by(&self, id: OfferId) -> Option<PeerProcess>;
    /// Hands the segment's memory to the process that asked.
    ///
    /// # Errors
    /// The errno of the hand-over; EAGAIN means try again later.
    fn push_segment(&self, id: OfferId, to: PeerProcess, fd: i32) -> Result<(), Errno>;

    /// The offer left for this connection.
    fn find_offer(&self, tuple: &[u64; 6]) -> Option<FoundOffer>;
    /// Asks the offerer for a segment this process does not know.
    ///
    /// # Errors
    /// The reason why it cannot be received.
    fn want_segment(&self, id: OfferId) -> Result<(), Reason>;
    /// The next segment that somebody pushed to this process, as an fd the caller owns.
    fn receive_segment(&self) -> Option<i32>;

    /// This process' identity on the device for segment headers: index and incarnation.
    ///
    /// # Errors
    /// The reason why there is none.
    fn own_identity(&self) -> Result<u64, Reason>;
    /// Whether the process of such an identity still lives.
    fn is_identity_alive(&self, identity: u64) -> bool;

    /// In a forked child: nothing of the parent's identity is ours. `listening`: the child inherits
    /// listeners and may be about to drop the rights it needs to open the device.
    fn after_fork(&self, listening: bool);
    /// The process ends in an orderly way.
    fn leave(&self);
}

/// The device new connections use.
pub fn current() -> &'static dyn Device {
    &loopback::LOOPBACK
}
