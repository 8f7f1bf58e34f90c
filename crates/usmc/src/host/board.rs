//! The board of a device: tables in which both ends of a connection find each other ([`usmc_shm::board`]).

use usmc_shm::board::{Listener, Offer};

use crate::os::reason::Reason;

/// The owners of a board's entries, as far as this process knows them.
pub trait Owners: Sync {
    /// This process. It becomes one of them the first time.
    ///
    /// # Errors
    /// The reason why it cannot.
    fn own(&self) -> Result<u32, Reason>;

    /// Whether this one lives, or may live.
    fn lives(&self, owner: u32) -> bool;

    /// Whether connections may come to it: it is not about to lose the device.
    fn stays(&self, _owner: u32) -> bool {
        true
    }
}

/// A device's board.
#[derive(Clone, Copy)]
pub struct Board<'a> {
    /// The number of the device.
    pub device: u8,
    /// Addresses where an acceptor is.
    pub listeners: &'a [Listener],
    /// Offers and handshakes.
    pub offers: &'a [Offer],
    /// Whose they are.
    pub owners: &'a dyn Owners,
}

impl Board<'_> {
    /// This process among the owners.
    pub(super) fn own(&self) -> Result<u32, Reason> {
        self.owners.own()
    }
}

/// Nobody's.
struct Nobody;

impl Owners for Nobody {
    fn own(&self) -> Result<u32, Reason> {
        Err(Reason::NoDevice)
    }

    fn lives(&self, _owner: u32) -> bool {
        false
    }
}

impl Board<'static> {
    /// That of a device which is not there: nothing stands on it.
    pub const fn none(device: u8) -> Board<'static> {
        Board { device, listeners: &[], offers: &[], owners: &Nobody }
    }
}
